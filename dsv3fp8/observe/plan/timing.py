"""Time of one optimizer step: what the GPU computes, and what of the wire is not hidden behind it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from dsv3fp8.observe.bench.roofline import byte_passes
from dsv3fp8.observe.plan.memory import Planned
from dsv3fp8.observe.plan.rates import Rates
from dsv3fp8.observe.plan.stash import dense_view
from dsv3fp8.observe.plan.weights import FP32, compute_bytes
from dsv3fp8.observe.plan.wire import Transfer
from dsv3fp8.observe.plan.work import attention_work, unit_work

BLOCKS = ("dense", "moe", "mtp")


@dataclass(frozen=True)
class Speeds:
    """blocks, head: rates of the recipe and of BF16. copy, nvlink, network: GB/s; the latter two a direction and GPU."""

    blocks: Rates
    head: Rates
    copy: float
    nvlink: float
    network: float


@dataclass(frozen=True)
class Timing:
    """Seconds of a step. gemm, attention, passes, update: one after the other. hidden: wire behind computing; exposed: not."""

    gemm: float
    attention: float
    passes: float
    update: float
    hidden: float
    exposed: float

    @property
    def step(self) -> float:
        """All but what is hidden."""
        return self.gemm + self.attention + self.passes + self.update + self.exposed


def timing(plan: Planned, sent: list[Transfer], length: int, speeds: Speeds) -> Timing:
    """length: tokens of a sequence.

    Weights and gradients travel while blocks are computed. Dispatch and combine hide behind the shared expert alone, which
    is what runs while tokens are on the wire.
    """
    gemm, attention, passes = (plan.accumulate * seconds for seconds in _micro_batch(plan, length, speeds))
    of_tokens, of_weights = 0.0, 0.0
    for transfer in sent:
        seconds = transfer.seconds(speeds.nvlink * 1e9, speeds.network * 1e9)
        if transfer.group.name == "expert":
            of_tokens += seconds
        else:
            of_weights += seconds
    shared = min(of_tokens, plan.accumulate * _shared_seconds(plan, speeds))
    behind = min(of_weights, gemm + attention + passes - shared)
    exposed = (of_tokens - shared) + (of_weights - behind)
    return Timing(gemm, attention, passes, _update(plan, speeds), shared + behind, exposed)


def _micro_batch(plan: Planned, length: int, speeds: Speeds) -> tuple[float, float, float]:
    """Seconds of GEMMs, attention, and what passes bytes between them."""
    config, load = plan.config, plan.load
    again = plan.recipe.recompute == "norms_and_up"
    work = sum(unit_work(unit, load.tokens, load.rows, again) for unit in plan.units if unit.name in BLOCKS)
    # The head is never quantized; each depth of multi-token prediction passes through it again, and its chunks' logits are
    # made twice.
    logits = 2.0 * 4 * load.tokens * (config.vocab_size or 0) * config.dim * (1 + config.mtp_depth)
    names = [unit.name for unit in plan.units if unit.name in BLOCKS]
    attended = attention_work(config, load.tokens, length) * len(names)
    passed = 0.0
    for name in names:
        dense = name == "dense" or not config.has_experts
        passed += sum(byte_passes(dense_view(config) if dense else config, load.tokens).values())
    return (
        work / speeds.blocks.gemm / 1e12 + logits / speeds.head.gemm / 1e12,
        attended / speeds.blocks.attention / 1e12,
        passed / speeds.blocks.passes / 1e9,
    )


def _shared_seconds(plan: Planned, speeds: Speeds) -> float:
    """GEMMs of the shared expert in all MoE layers, forward and backward."""
    work = 0.0
    for unit in plan.units:
        if unit.name in ("moe", "mtp"):
            some = tuple(weight for weight in unit.weights if weight.op.startswith("shared_"))
            work += unit_work(dataclasses.replace(unit, weights=some), plan.load.tokens, 0.0)
    return work / speeds.blocks.gemm / 1e12


def _update(plan: Planned, speeds: Speeds) -> float:
    """Gradient norm, AdamW and weight casts, at the rate of a copy."""
    mine = sum(weight.kept(plan.parallel) for unit in plan.units for weight in unit.weights)
    adamw = 3 * FP32 + 4 * plan.moment_bytes  # weight read and written, gradient; moments read and written
    return mine * (FP32 + adamw + FP32 + compute_bytes(plan.recipe)) / speeds.copy / 1e9
