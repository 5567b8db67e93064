"""The keys of `dsv3fp8 plan`, beside those of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from dsv3fp8.observe.plan.rates import COPY, NETWORK, NVLINK
from dsv3fp8.parallel.config import ParallelConfig
from dsv3fp8.training.config import raise_problems


@dataclass
class RatesConfig:
    """Rates in place of the measured ones; null: as they were measured."""

    # TFLOP/s of the blocks' GEMMs, forward and backward.
    gemm: float | None = None
    # TFLOP/s of causal attention, forward and backward.
    attention: float | None = None
    # GB/s of all that moves bytes between GEMMs, counted as the bytes that dsv3's ops must move.
    passes: float | None = None
    # GB/s read and written of a copy, for the optimizer.
    copy: float = COPY
    # GB/s that a GPU sends to those of its node.
    nvlink: float = NVLINK
    # GB/s that a GPU sends to other nodes.
    network: float = NETWORK

    def validate(self) -> None:
        """Raise UserError with every value that makes no sense."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        raise_problems([f"rates.{name}={value} must be above 0" for name, value in given.items() if not value > 0])


@dataclass
class PlanConfig:
    """What is planned: GPUs, their layout, and what they can do."""

    # GPUs in all; null: as many as parallel.dp_replicate times parallel.dp_shard.
    gpus: int | None = None
    # How the work is cut over them.
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    # GB (10^9 bytes) of one GPU that may be allocated; the default is an H200's on its data sheet.
    memory: float = 141.0
    # GPUs of a node.
    node: int = 8
    # Copies that the fullest GPU's experts receive, over the mean; parallel.expert at most.
    imbalance: float = 1.0
    # A layer.json of `dsv3fp8 bench layer` to take rates from; null: those of the committed page.
    layer: str | None = None
    # Rates by hand.
    rates: RatesConfig = field(default_factory=RatesConfig)
    # Directory to write plan.json to; null: none.
    out: str | None = None

    def validate(self) -> None:
        """Raise UserError with every value that makes no sense."""
        problems = [
            f"{name}={getattr(self, name)} must be at least 1" for name in ("node", "imbalance") if getattr(self, name) < 1
        ]
        if self.gpus is not None and self.gpus < 1:
            problems.append(f"gpus={self.gpus} must be at least 1")
        if not self.memory > 0:
            problems.append(f"memory={self.memory} must be above 0")
        raise_problems(problems)
