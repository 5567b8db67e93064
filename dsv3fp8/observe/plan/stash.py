"""Bytes that a unit keeps for backward: by the precision contract, and what it leaves out of its sum."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from dsv3fp8.model.config import ModelConfig
from dsv3fp8.observe.kept_bytes import contract_bytes
from dsv3fp8.observe.plan.weights import compute_bytes
from dsv3fp8.parallel.config import ParallelConfig
from dsv3fp8.precision.recipe import Recipe
from dsv3fp8.precision.tiles import ceil_div

# Each expert's rows fill whole tiles of so many tokens.
TILE = 128


@dataclass(frozen=True)
class Load:
    """What one micro-batch brings to a GPU. tokens: its own. rows: copies that its experts compute. experts: it holds.

    reach: tokens that may come to one expert, those of all GPUs that the experts are dealt out to.
    """

    tokens: int
    rows: int
    experts: int
    reach: int

    @property
    def padded(self) -> int:
        """Rows with the inert ones between experts, however the copies fall: an expert's first begins a tile."""
        used = min(self.experts, self.rows)
        return TILE * min(used + (self.rows - used) // TILE, self.experts * ceil_div(self.reach, TILE))


def load_of(config: ModelConfig, parallel: ParallelConfig, tokens: int, imbalance: float) -> Load:
    """imbalance: copies that the fullest GPU receives, over the mean."""
    if not config.has_experts:
        return Load(tokens, 0, 0, 0)
    rows = round(tokens * config.top_k * imbalance)
    return Load(tokens, rows, config.experts // parallel.expert, tokens * parallel.expert)


def largest_imbalance(config: ModelConfig, parallel: ParallelConfig) -> float:
    """Where every token of an expert group chooses as many experts of one GPU as it can: they are different ones."""
    if not config.has_experts:
        return 1.0
    return parallel.expert * min(config.top_k, config.experts // parallel.expert) / config.top_k


def dense_view(config: ModelConfig) -> ModelConfig:
    """A dense layer as a MoE layer that has a shared expert alone: to the byte the same tensors."""
    return dataclasses.replace(config, top_k=0, shared_experts=1, expert_ffn=config.ffn)


def kept_by_token(config: ModelConfig, recipe: Recipe, unit: str) -> int:
    """Bytes per token of a unit's own tokens: everything but the routed experts' rows."""
    wide = compute_bytes(recipe)
    norm = wide * config.dim * (2 if recipe.recompute == "none" else 1)  # a norm's input, and its output for wgrad
    if unit == "embedding":
        return 8  # ids
    if unit == "head":
        return norm + 8 + 4  # targets, log-sum-exp
    joint = 3 * norm + 8 + 4 if unit == "mtp" else 0
    if unit == "dense" or not config.has_experts:
        return joint + _contract(dense_view(config), recipe)
    return joint + _contract(dataclasses.replace(config, top_k=0), recipe) + kept_by_router(config)


def kept_by_router(config: ModelConfig) -> int:
    """Bytes per token of the router's numbers and of where each copy is, both ways."""
    router = 4 * config.experts + 12 * config.top_k + 4  # scores; ids and gate weights; a sum
    if config.normalize:
        router += 4 * config.top_k + 4  # the chosen scores and their sum
    return router + 8 * config.top_k


def kept_by_row(config: ModelConfig, recipe: Recipe) -> int:
    """Bytes per row of a routed expert: as received, SwiGLU's input, and the output where backward reads it."""
    with_one, with_none = (_contract(dataclasses.replace(config, top_k=k), recipe) for k in (1, 0))
    return with_one - with_none + (compute_bytes(recipe) * config.dim if recipe.gate == "after" else 0)


def kept_bytes(config: ModelConfig, recipe: Recipe, unit: str, load: Load) -> int:
    """Of one unit after the forward of a micro-batch."""
    routed = unit in ("moe", "mtp") and config.has_experts
    return load.tokens * kept_by_token(config, recipe, unit) + (load.padded * kept_by_row(config, recipe) if routed else 0)


def kept_by_swiglu(config: ModelConfig, recipe: Recipe, unit: str) -> int:
    """Bytes per token of the shared expert, or of a dense layer's FFN: SwiGLU's input, and its output where that is kept."""
    alone = dataclasses.replace(_alone(config, unit), top_k=0)
    return _contract(alone, recipe) - _contract(dataclasses.replace(alone, shared_experts=0), recipe)


def kept_by_norm(config: ModelConfig, recipe: Recipe) -> tuple[int, int]:
    """Bytes per token of the norm before the experts: (its input, its output as wgrad reads it)."""
    one, none = (_contract(dataclasses.replace(config, top_k=k, expert_ffn=0), recipe) for k in (1, 0))
    return compute_bytes(recipe) * config.dim, one - none if recipe.recompute == "none" else 0


def _alone(config: ModelConfig, unit: str) -> ModelConfig:
    return dense_view(config) if unit == "dense" or not config.has_experts else config


def _contract(config: ModelConfig, recipe: Recipe) -> int:
    """The contract's sum, which counts 2 bytes for a value that is carried in the compute type."""
    total, statistics = contract_bytes(config, recipe), 4 * config.heads
    return total if recipe.compute == "bf16" else 2 * (total - statistics) + statistics
