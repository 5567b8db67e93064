"""Checks between the rooms: what one of them is told must fit what the others are told, and this machine."""

import dataclasses
import os

import torch

from dsv3fp8.config import RunConfig
from dsv3fp8.data.tokenizer import Tokenizer
from dsv3fp8.kernels import te
from dsv3fp8.kernels.backend import reads_counts
from dsv3fp8.model.config import ModelConfig
from dsv3fp8.model.manifest import linear_shapes
from dsv3fp8.training.config import DEVICES, raise_problems

# A vocabulary taken from the tokenizer is rounded up to a multiple of this, for the sake of the GEMM of the head.
VOCABULARY_MULTIPLE = 64


def validate_run(config: RunConfig) -> None:
    """Raise UserError with every setting that does not fit another one or this machine. Looks at no file."""
    training, model = config.training, config.model
    problems = []
    world = os.environ.get("WORLD_SIZE", "1")
    if world != "1":
        problems.append(f"WORLD_SIZE={world}: this release trains in one process; start it without torchrun")
    if training.context > model.context:
        problems.append(
            f"training.context={training.context} is longer than model.context={model.context}, the end of the rope "
            "table: lower the one or raise the other"
        )
    if training.context <= model.mtp_depth:
        problems.append(
            f"training.context={training.context} leaves nothing to predict at model.mtp_depth={model.mtp_depth}: raise it"
        )
    problems += device_problems("training.device", training.device)
    if config.recipe.linears == "te" and not problems:
        against = te.reason_against(select_device(training.device))
        problems += [] if against is None else [f"recipe.linears=te: {against}"]
    if training.cuda_graph and not problems and select_device(training.device).type != "cuda":
        problems.append("training.cuda_graph=true needs a CUDA GPU: set it to false")
    elif training.cuda_graph and not problems and model.dense_layers < model.layers:
        against = reads_counts(config.recipe, select_device(training.device), linear_shapes(model))
        if against is not None:
            problems.append(
                f"training.cuda_graph=true cannot record a step that reads counts back ({against}): set it to false"
            )
    if training.cuda_graph and config.data.isolate_documents:
        problems.append(
            "training.cuda_graph=true cannot record steps that keep documents apart: set it or data.isolate_documents to false"
        )
    raise_problems(problems)


def fit_vocabulary(model: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    """The model with the tokenizer's vocabulary, if it has none of its own; UserError if its own is too small."""
    if model.vocab_size is None:
        rounded = -(-tokenizer.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        return dataclasses.replace(model, vocab_size=rounded)
    if tokenizer.vocab_size > model.vocab_size:
        raise_problems(
            [
                f"model.vocab_size={model.vocab_size} is below the {tokenizer.vocab_size} ids of the tokenizer "
                f"{tokenizer.name}: raise it, or set it to null to follow the tokenizer"
            ]
        )
    return model


def device_problems(key: str, name: str) -> list[str]:
    """What is wrong with a choice of device, on this machine."""
    if name not in DEVICES:
        return [f"{key}={name} must be one of {', '.join(DEVICES)}"]
    if name == "cuda" and not torch.cuda.is_available():
        return [f"{key}=cuda, but torch finds no CUDA GPU: take cpu, or see what `dsv3fp8 doctor` says"]
    return []


def select_device(name: str) -> torch.device:
    """The device of training.device; ``auto`` is cuda where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name, 0) if name == "cuda" else torch.device(name)
