"""Bytes that a unit keeps for backward: by the precision contract, and what it leaves out of its sum."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from dsv3fp8.model.config import ModelConfig
from dsv3fp8.observe.kept_bytes import contract_bytes
from dsv3fp8.observe.plan.weights import compute_bytes
from dsv3fp8.parallel.config import ParallelConfig
from dsv3fp8.precision.recipe import Recipe

# Each expert's rows fill whole tiles of 128 tokens.
INERT_ROWS = 127


@dataclass(frozen=True)
class Load:
    """What one micro-batch brings to a GPU. tokens: its own. rows: copies that its experts compute. experts: it holds."""

    tokens: int
    rows: int
    experts: int

    @property
    def padded(self) -> int:
        """Rows with the inert ones between experts."""
        return self.rows + INERT_ROWS * min(self.experts, self.rows)


def load_of(config: ModelConfig, parallel: ParallelConfig, tokens: int, imbalance: float) -> Load:
    """imbalance: copies that the fullest GPU receives, over the mean."""
    if not config.has_experts:
        return Load(tokens, 0, 0)
    return Load(tokens, round(tokens * config.top_k * imbalance), config.experts // parallel.expert)


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
    router = 4 * config.experts + 12 * config.top_k + 4  # scores; ids and gate weights; a sum
    if config.normalize:
        router += 4 * config.top_k + 4  # the chosen scores and their sum
    plan = 8 * config.top_k  # where each copy is, both ways
    return joint + _contract(dataclasses.replace(config, top_k=0), recipe) + router + plan


def kept_by_row(config: ModelConfig, recipe: Recipe) -> int:
    """Bytes per row of a routed expert: as received, SwiGLU's input, and the output where backward reads it."""
    with_one, with_none = (_contract(dataclasses.replace(config, top_k=k), recipe) for k in (1, 0))
    return with_one - with_none + (compute_bytes(recipe) * config.dim if recipe.gate == "after" else 0)


def kept_bytes(config: ModelConfig, recipe: Recipe, unit: str, load: Load) -> int:
    """Of one unit after the forward of a micro-batch."""
    routed = unit in ("moe", "mtp") and config.has_experts
    return load.tokens * kept_by_token(config, recipe, unit) + (load.padded * kept_by_row(config, recipe) if routed else 0)


def _contract(config: ModelConfig, recipe: Recipe) -> int:
    """The contract's sum, which counts 2 bytes for a value that is carried in the compute type."""
    total, statistics = contract_bytes(config, recipe), 4 * config.heads
    return total if recipe.compute == "bf16" else 2 * (total - statistics) + statistics
