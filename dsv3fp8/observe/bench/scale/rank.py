"""What one process of a layout does: it trains as `train` does, and tells its parent what it has measured so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dsv3fp8.config import load_config
from dsv3fp8.data import open_corpus
from dsv3fp8.observe.bench.scale.launch import Report
from dsv3fp8.observe.bench.scale.traffic import Traffic
from dsv3fp8.observe.bench.scale.wire import profiled
from dsv3fp8.observe.bench.steps import Trainer
from dsv3fp8.parallel.ranks import Ranks, join
from dsv3fp8.training.checks import select_device, validate_run
from dsv3fp8.training.graph import WARM_UP
from dsv3fp8.training.step import StepResult

STEPS = 3  # of a sample
BEFORE = {"launched": 2, "graph": WARM_UP + 2}
"""Steps before the first sample: kernels are compiled, and the graph is recorded."""
LR = 0.0
"""Every kernel of an update runs all the same, and tokens stay spread over the experts as at the start."""


def measure_layout(report: Report, words: list[str], modes: Sequence[str], rounds: int) -> None:
    """One row of the table. words: the settings of a run, its layout among them."""
    config = load_config(words)
    validate_run(config)
    device = select_device(config.training.device)
    with join(device, config.parallel.expert, config.parallel.dp_shard) as ranks:
        torch.manual_seed(0)  # all ranks draw the same weights
        with ranks.host_by_host():
            corpus = open_corpus(config.data)
        trainer = Trainer(config, corpus, device, ranks, LR)
        with trainer.batches:
            if "launched" in modes:
                report("launched", _timed("launched", trainer.launched_step, device, ranks, rounds))
            with Traffic(config.model.dim, 2 if config.recipe.compute == "bf16" else 4) as traffic:
                trainer.launched_step()
            report("calls", traffic.calls)
            report("launched wire", profiled(trainer.launched_step, device, ranks))
            if "graph" in modes and trainer.graph is None:
                report("graph", {"failed": f"not recorded: {trainer.against_graph}"})
            elif trainer.graph is not None and "graph" in modes:
                report("graph", _timed("graph", trainer.step, device, ranks, rounds))
                report("graph wire", profiled(trainer.step, device, ranks, unnoticed=True))
                trainer.graph.close()  # before the ranks part


def _timed(mode: str, step: Callable[[], StepResult], device: torch.device, ranks: Ranks, rounds: int) -> dict[str, Any]:
    """Seconds of a step in each round on this rank, and its peak of memory, allocated and reserved."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(BEFORE[mode]):
        _taken(step)
    if cuda and mode == "launched":  # without what is allocated once; a graph's memory is that of its recording
        torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    for _ in range(rounds):
        ranks.wait()
        started = time.perf_counter()
        for _ in range(STEPS):
            _taken(step)
        seconds.append((time.perf_counter() - started) / STEPS)
    peak = torch.cuda.max_memory_allocated(device) if cuda else None
    reserved = torch.cuda.max_memory_reserved(device) if cuda else None
    return {"seconds": seconds, "peak": peak, "reserved": reserved, "failed": ""}


def _taken(step: Callable[[], StepResult]) -> None:
    """One step; the host waits for its figures, as the training loop does."""
    result = step()
    if not result.applied:
        raise RuntimeError(f"a step was skipped: loss {result.loss}, gradient norm {result.grad_norm}")
