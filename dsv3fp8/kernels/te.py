"""Transformer Engine, where it is installed and runs: its block-scaled linears are a peer of ours (`recipe.linears: te`)."""

from __future__ import annotations

import importlib
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch

from dsv3fp8.errors import UserError
from dsv3fp8.kernels.backend import Choice, hopper_reason

NAME = "transformer_engine"
INSIDE = "Transformer Engine under Float8BlockScaling; what happens inside its linears is not observed"


REMEDY = "take a Hopper GPU (H100, H200) and torch for CUDA 12.9 or later, or another recipe, such as recipe=dsv3"


def choose(device: torch.device) -> Choice:
    """The backend of every linear under `recipe.linears: te`."""
    against = reason_against(device)
    return Choice(NAME, INSIDE if against is None else f"does not run here: {against}")


def reason_against(device: torch.device) -> str | None:
    """Why its block-scaled linears do not run on this device, with what helps, or None when they do."""
    if (against := hopper_reason(device)) is not None:
        return f"{against}: {REMEDY}"
    return import_error()


@lru_cache
def import_error() -> str | None:
    """Why it cannot be imported, in one line, or None when it can."""
    try:
        library()
    # It is loaded by what the machine has of CUDA, cuDNN and NCCL, and asserts versions as it goes.
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        said = " ".join(str(error).split())[:160]
        return f"Transformer Engine cannot be imported ({said}): pip install 'dsv3fp8[te]'"
    return None


def library() -> ModuleType:
    return importlib.import_module("transformer_engine.pytorch")


def block_scaling() -> Any:
    """The context in which its modules run in E4M3 with 1x128 and 128x128 tiles."""
    return library().autocast(enabled=True, recipe=_recipe())


@lru_cache
def _recipe() -> Any:
    return importlib.import_module("transformer_engine.common.recipe").Float8BlockScaling()


def require(device: torch.device) -> None:
    """UserError where `recipe.linears: te` cannot run."""
    if (against := reason_against(device)) is not None:
        raise UserError(f"recipe.linears=te: {against}")
