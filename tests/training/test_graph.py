"""Which steps a CUDA graph may take: played without one. That replays equal launched steps is tested on a GPU."""

import json
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.profiler import profile

from dsv3fp8.data import Batch
from dsv3fp8.errors import UserError
from dsv3fp8.kernels.backend import Choice
from dsv3fp8.precision.cast_meter import measure_casts
from dsv3fp8.precision.ledger import observe_ops
from dsv3fp8.precision.tiles import QuantizedTensor
from dsv3fp8.training import graph, setup
from dsv3fp8.training.graph import StepGraph, choose_steps, reasons_to_launch
from dsv3fp8.training.loop import train
from dsv3fp8.training.setup import build


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What became of each step: launched, recorded, replayed."""
    happened: list[str] = []
    found = torch.zeros(5, dtype=torch.float64), torch.zeros(1, 4, dtype=torch.int64)

    def capture(self: StepGraph, *_: Any) -> None:
        happened.append("recorded")
        self._graph = object()  # type: ignore[assignment]

    def named(name: str) -> Any:
        return lambda *_: happened.append(name) or found

    monkeypatch.setattr(StepGraph, "_capture", capture)
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


@pytest.mark.parametrize("watching", [measure_casts, observe_ops, profile])
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


def without_graph(monkeypatch: pytest.MonkeyPatch, why: str, happened: list[str]) -> None:
    """Recordings end without a graph."""
    monkeypatch.setattr(StepGraph, "_capture", lambda *_: happened.append("tried") or why)


def test_where_nothing_can_be_recorded_steps_are_launched_and_it_is_said_once(
    nano: Any, taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_graph(monkeypatch, "out of memory", taken)
    model, optimizer = build(nano("model.vocab_size=64"), torch.device("cpu"))
    said: list[str] = []
    steps = StepGraph(model, optimizer, 1.0, launched=said.append)
    for _ in range(5):
        steps.step([batch()], lr=1e-3)
    assert taken == ["launched", "launched", "tried", "launched", "launched", "launched"]
    assert said == ["out of memory"]


def test_what_a_recording_has_left_behind_is_gone(nano: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients and weight codes that no kernel has filled: the steps after it are those of a run without it."""
    runs = []
    for tried in (False, True):
        model, optimizer = build(nano("model.vocab_size=64"), torch.device("cpu"))
        steps = StepGraph(model, optimizer, 1.0, launched=lambda _: None)

        def capture(self: StepGraph, windows: Any, totals: Any, model: Any = model) -> str:
            model.objective(model(*windows[0]), totals).backward()
            for parameter in model.parameters():
                parameter.grad.fill_(float("nan"))
            for cached in (codes._cached for codes in model._codes if codes._cached is not None):
                made = cached.fprop.scale if isinstance(cached.fprop, QuantizedTensor) else cached.fprop
                made.fill_(float("nan"))
            return "no memory"

        monkeypatch.setattr(StepGraph, "_capture", capture)
        monkeypatch.setattr(graph, "WARM_UP", 1 if tried else 9)
        losses = [steps.step([batch()], lr=1e-3).loss for _ in range(3)]
        runs.append((losses, [parameter.detach().clone() for parameter in model.parameters()]))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))


def test_asked_for_and_not_to_be_had_is_an_error(nano: Any, taken: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    without_graph(monkeypatch, "out of memory", taken)
    model, optimizer = build(nano("model.vocab_size=64"), torch.device("cpu"))
    steps = StepGraph(model, optimizer, 1.0)
    for _ in range(2):
        steps.step([batch()], lr=1e-3)
    with pytest.raises(UserError, match=r"^training.cuda_graph=true: the step .* \(out of memory\); set it to false$"):
        steps.step([batch()], lr=1e-3)


def test_a_step_that_waits_for_the_gpu_is_not_recorded(nano: Any, taken: list[str]) -> None:
    model, optimizer = build(nano("model.vocab_size=64"), torch.device("cpu"))
    said: list[str] = []
    steps = StepGraph(model, optimizer, 1.0, launched=said.append)
    for number in range(4):
        steps._waits = "it waits" if number == 2 else steps._waits
        steps.step([batch()], lr=1e-3)
    assert taken == ["launched"] * 4
    assert said == ["it waits"]


def test_what_waits_for_the_gpu_is_seen_and_other_warnings_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[Any] = [0]

    def switch(mode: Any) -> None:
        modes.append(mode)
        if mode == "warn":
            warnings.warn("Synchronization debug mode is a prototype feature and does not yet detect all", stacklevel=2)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", switch)
    with warnings.catch_warnings(record=True) as passed_on:
        warnings.simplefilter("always")
        with graph._watching() as waits:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
            warnings.warn("something else", stacklevel=1)
    assert [str(each.message) for each in passed_on] == ["something else"]
    (wait,) = waits
    assert wait.startswith(f"it waits for the GPU, at {__file__}:")
    assert modes == [0, "warn", 0]


@pytest.mark.parametrize(("graph_bytes", "free", "fits"), [(10, 11, True), (100, 109, False), (0, 0, True)])
def test_a_graph_leaves_room_for_a_step_outside_of_it(graph_bytes: int, free: int, fits: bool) -> None:
    assert (graph._lack_of_room(graph_bytes, free) is None) == fits


def test_null_takes_a_graph_where_it_can_and_says_what_it_takes(nano: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(graph.outer, "choose", lambda *_: Choice("triton", "one kernel"))
    monkeypatch.setattr(graph, "reads_counts", lambda *_: None)
    assert str(choose_steps(nano(), gpu)).startswith("graph: steps, recorded as a CUDA graph after 2")
    assert str(choose_steps(nano("training.cuda_graph=true"), gpu)).startswith("graph: ")
    assert str(choose_steps(nano("training.cuda_graph=false"), gpu)).endswith("training.cuda_graph=false")
    assert str(choose_steps(nano(), torch.device("cpu"))).endswith("on a CUDA GPU alone, not on cpu")
    isolated = choose_steps(nano("data.isolate_documents=true"), gpu)
    assert (isolated.backend, "data.isolate_documents=true" in isolated.reason) == ("launched", True)
    (dealt_out,) = reasons_to_launch(nano("parallel.dp_replicate=2", "parallel.expert=2"), gpu)
    assert dealt_out.startswith("parallel.expert=2 reads")
    assert not reasons_to_launch(nano("parallel.dp_replicate=2"), gpu)
    monkeypatch.setattr(graph, "reads_counts", lambda *_: "a GEMM per expert")
    monkeypatch.setattr(graph.outer, "choose", lambda *_: Choice("torch", "sm_80"))
    assert [reason[-14:].strip() for reason in reasons_to_launch(nano(), gpu)] == ["counts (sm_80)", "EMM per expert"]
    assert len(reasons_to_launch(nano("model.dense_layers=2", "model.mtp_depth=0"), gpu)) == 1


def test_a_run_tells_how_it_takes_its_steps(nano: Any, taken: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """In its first lines and in precision.json, and again where it could not do as it had said."""
    monkeypatch.setattr(setup, "choose_steps", lambda *_: Choice("graph", "recorded"))
    without_graph(monkeypatch, "out of memory", taken)
    config = nano("training.steps=5", "training.log_every=5", "model.layers=1")
    train(config)
    output = capsys.readouterr().out
    assert "  backend graph: recorded\n" in output
    line = "step 4: launched: steps, kernel by kernel, since no CUDA graph could be recorded: out of memory"
    assert output.count(line) == 1
    rows = json.loads((Path(config.run_dir) / "precision.json").read_text())["backends"]
    assert [(row["backend"], row["reason"][-13:]) for row in rows if row["op"] == "step"] == [("launched", "out of memory")]
