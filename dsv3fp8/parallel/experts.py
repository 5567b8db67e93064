"""Experts dealt out to the ranks of a group: every rank keeps its own of each stack, and sends tokens to the others'."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

from dsv3fp8.model.experts import RoutedExperts
from dsv3fp8.parallel.ranks import Ranks
from dsv3fp8.parallel.wire import make_plan
from dsv3fp8.precision.recipe import ROLES, Recipe

if TYPE_CHECKING:
    from dsv3fp8.model.transformer import Transformer

STACKS = ("gate_up", "down")


def deal_out(model: Transformer, ranks: Ranks) -> None:
    """Cut the stacks of experts [E, …] of a model, initialized or without memory, down to those of this rank, [E / P, …]."""
    if ranks.expert_group is None:
        return
    for _, module in _routed(model):
        for stack in STACKS:
            setattr(module, stack, nn.Parameter(_own(getattr(module, stack).detach(), ranks).clone()))
        module.make_plan = partial(make_plan, group=ranks.expert_group)
    model.invalidate_codes()


def expert_names(model: nn.Module) -> list[str]:
    """The parameters that are stacks of experts."""
    return [f"{prefix}.{stack}" for prefix, _ in _routed(model) for stack in STACKS]


def expert_parameters(model: Transformer) -> list[nn.Parameter]:
    """Those of `expert_names`."""
    return [getattr(module, stack) for _, module in _routed(model) for stack in STACKS]


def reason_against(recipe: Recipe) -> str | None:
    """Why rows under this recipe cannot travel, or None when they can."""
    for op in ("expert_gate_up", "expert_down"):
        for role in ROLES:
            spec = getattr(recipe.linear(op), role)
            if spec.quantized and (spec.tile == "tensor" or spec.scaling != "current"):
                return f"recipe={recipe.name} keeps one scale for all rows of {op}'s {role}, and every rank would have another"
    return None


def own_experts(count: int, ranks: Ranks) -> range:
    """Which of `count` experts this rank has."""
    each = count // ranks.expert
    first = ranks.index % ranks.expert * each
    return range(first, first + each)


def _own(stack: Tensor, ranks: Ranks) -> Tensor:
    mine = own_experts(len(stack), ranks)
    return stack[mine.start : mine.stop]


def _routed(model: nn.Module) -> Iterator[tuple[str, RoutedExperts]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, RoutedExperts))
