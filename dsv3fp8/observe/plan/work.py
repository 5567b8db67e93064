"""FLOP of forward and backward, three GEMMs a linear; recomputed up-projections count, as they take time."""

from __future__ import annotations

from dsv3fp8.model.config import ModelConfig
from dsv3fp8.observe.plan.weights import Unit, block_weights

UP = ("q_b", "q", "kv_b")
"""Linears that `recompute=norms_and_up` runs again."""


def unit_work(unit: Unit, tokens: float, rows: float, again: bool = False) -> float:
    """FLOP of a unit's matrices. rows: of all routed experts on this GPU. again: up-projections are recomputed."""
    total = 0.0
    for weight in unit.weights:
        if weight.columns > 1 and unit.name != "embedding":
            gemms = 4 if again and weight.op in UP else 3
            total += 2.0 * gemms * (rows if weight.experts else tokens) * weight.rows * weight.columns
    return total


def block_work(config: ModelConfig, tokens: int, rows: float) -> float:
    """FLOP of one MoE block's matrices."""
    return unit_work(Unit("moe", block_weights(config, dense=False)), tokens, rows)


def attention_work(config: ModelConfig, tokens: int, length: int) -> float:
    """FLOP of causal attention in one block: two products forward, and as much again twice in backward."""
    return 3.0 * 2.0 * tokens * (length / 2) * config.heads * (config.head_qk + config.head_v)
