"""Which steps a CUDA graph may take: played without one. That replays equal launched steps is tested on a GPU."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.autograd.profiler import profile

from dsv3fp8.data import Batch
from dsv3fp8.precision.flush import measure_flush
from dsv3fp8.precision.ledger import observe_ops
from dsv3fp8.training import graph
from dsv3fp8.training.graph import StepGraph
from dsv3fp8.training.setup import build


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What became of each step: launched, recorded, replayed."""
    happened: list[str] = []
    found = torch.zeros(5, dtype=torch.float64), torch.zeros(1, 4, dtype=torch.int64)

    def record(self: StepGraph, *_: Any) -> None:
        happened.append("recorded")
        self._graph = object()  # type: ignore[assignment]

    def named(name: str) -> Any:
        return lambda *_: happened.append(name) or found

    monkeypatch.setattr(StepGraph, "_record", record)
    monkeypatch.setattr(StepGraph, "_replay", named("replayed"))
    monkeypatch.setattr(graph, "take_step", named("launched"))
    return happened


def batch(sequences: int = 2, documents: bool = False) -> Batch:
    tokens = torch.zeros(sequences, 9, dtype=torch.int64)
    return Batch(tokens, torch.zeros(sequences, 9, dtype=torch.int32) if documents else None)


def test_the_third_step_of_a_shape_is_recorded_and_others_are_launched(nano: Any, taken: list[str]) -> None:
    model, optimizer = build(nano("model.vocab_size=64"), torch.device("cpu"))
    steps = StepGraph(model, optimizer, clip_norm=1.0)
    for batches in ([batch(1)], [batch()], [batch()], [batch()], [batch()], [batch(1)], [batch(), batch()], [batch()]):
        steps.step(batches, lr=1e-3)
    assert taken == ["launched"] * 3 + ["recorded", "replayed", "replayed", "launched", "launched", "replayed"]


@pytest.mark.parametrize("watching", [measure_flush, observe_ops, profile])
def test_a_step_that_is_watched_is_launched(nano: Any, taken: list[str], watching: Any) -> None:
    model, optimizer = build(nano("model.vocab_size=64"), torch.device("cpu"))
    steps = StepGraph(model, optimizer, clip_norm=1.0)
    for watched in (True, False, False, True, False, True, False):
        with watching() if watched else nullcontext():
            steps.step([batch()], lr=1e-3)
    assert taken == ["launched"] * 4 + ["recorded", "replayed", "launched", "replayed"]


def test_documents_are_kept_apart_by_launched_steps(nano: Any, taken: list[str]) -> None:
    model, optimizer = build(nano("model.vocab_size=64"), torch.device("cpu"))
    steps = StepGraph(model, optimizer, clip_norm=1.0)
    for _ in range(4):
        steps.step([batch(documents=True)], lr=1e-3)
    assert taken == ["launched"] * 4
