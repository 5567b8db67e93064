"""The same runs on a GPU, where there is one."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv3fp8.data import Batch
from dsv3fp8.errors import UserError
from dsv3fp8.ops import grouped
from dsv3fp8.training import graph as graph_module
from dsv3fp8.training.checkpoint import Checkpoint
from dsv3fp8.training.checkpoint_saver import Saver
from dsv3fp8.training.checks import validate_run
from dsv3fp8.training.generate import main
from dsv3fp8.training.graph import StepGraph, choose_steps
from dsv3fp8.training.loop import Loop, train
from dsv3fp8.training.metrics import read_metrics
from dsv3fp8.training.optimizer import AdamW
from dsv3fp8.training.setup import build
from dsv3fp8.training.state import random_states, restore_random_states
from dsv3fp8.training.step import StepResult, train_step

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("recipe", ["dsv3", "delayed", "bf16"])
def test_a_run_resumes_on_the_gpu_and_follows_the_uninterrupted_one(
    nano: Any, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    words = (f"recipe={recipe}", "training.device=cuda", "optimizer.lr=0.01", "optimizer.moments=bf16")
    whole, cut = nano(*words, run="whole"), nano(*words, run="cut")
    assert train(whole) == 0

    def dying(self: Loop) -> Any:
        if next(calls) == 7:
            raise ZeroDivisionError
        return real(self)

    calls, real = iter(range(100)), Loop._step
    monkeypatch.setattr(Loop, "_step", dying)
    with pytest.raises(ZeroDivisionError):
        train(cut)
    monkeypatch.setattr(Loop, "_step", real)
    assert train(cut) == 0
    records, expected = (read_metrics(Path(config.run_dir) / "metrics.jsonl") for config in (cut, whole))
    assert [record["step"] for record in records] == list(range(1, 11))
    for record, other in zip(records, expected, strict=True):
        assert record["loss"] == pytest.approx(other["loss"], rel=1e-3)
        assert record["lr"] == other["lr"]
    assert records[-1]["cuda_allocated_peak_gb"] > 0
    assert records[-1]["cuda_reserved_peak_gb"] >= records[-1]["cuda_allocated_peak_gb"]


def test_a_snapshot_holds_what_was_on_the_gpu_when_it_was_taken(tmp_path: Path) -> None:
    """1 GB: training would not wait for the disk, and its next update is not in what is written."""
    tensors = {f"model.{i}": torch.full((1 << 24,), float(i), device="cuda") for i in range(16)}
    saver = Saver(tmp_path, 1, tensors)
    for step in (1, 2):
        for tensor in tensors.values():
            tensor.add_(1)
        saver.save(step, tensors, {"step": step}, random_states(torch.device("cuda")))
        for tensor in tensors.values():
            tensor.fill_(-step)
    saver.wait()
    checkpoint = Checkpoint(tmp_path / "step-00000002")
    assert all((checkpoint.read(name) == 0).all() for name in tensors)
    checkpoint.read_into({"model.3": (read := torch.ones(1 << 24, device="cuda"))})
    assert bool((read == 0).all())


def test_a_generator_of_the_gpu_continues_its_stream() -> None:
    """K06."""
    device = torch.device("cuda", torch.cuda.current_device())
    states = json.loads(json.dumps(random_states(device)))
    drawn = torch.rand(3, device=device).tolist()
    restore_random_states(states, device)
    assert torch.rand(3, device=device).tolist() == drawn


def test_a_checkpoint_of_the_gpu_resumes_and_samples_on_the_cpu(nano: Any, capsys: pytest.CaptureFixture) -> None:
    config = nano("recipe=bf16", "training.device=cuda", "training.steps=5")
    assert train(config) == 0
    assert train(nano("recipe=bf16", "training.device=cpu", "training.steps=8", "resume=fork")) == 0
    capsys.readouterr()
    for device in ("cpu", "cuda"):
        assert main([f"run={config.run_dir}", "tokens=3", f"device={device}"]) == 0
    assert torch.cuda.is_available()


# Widths of which whole tiles and the MLA kernels of a GPU can take.
WIDTHS = (
    "model.vocab_size=512", "model.dim=256", "model.heads=2", "model.q_latent=128", "model.kv_latent=128",
    "model.head_nope=128", "model.head_rope=64", "model.head_v=128", "model.ffn=256", "model.expert_ffn=128",
    "model.experts=8", "model.top_k=2", "model.context=128",
)  # fmt: skip


@contextmanager
def nothing_read_back() -> Iterator[None]:
    """An error for whatever waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def batches(seed: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [Batch(torch.randint(0, 512, (4, 129), generator=generator), None) for _ in range(2)]


def state(model: torch.nn.Module, optimizer: AdamW) -> list[torch.Tensor]:
    return [t.clone() for t in (*model.state_dict().values(), *optimizer.first.values(), *optimizer.second.values())]


OTHERS = ["hybrid", "tensorwise", "delayed", "static", "rowwise", "blockwise_grad", "no_promotion"]
KINDS = [(recipe, words) for recipe in ("dsv3", "bf16") for words in ((), ("model.mtp_depth=1",), ("model.dense_layers=2",))]
KINDS += [(recipe, ()) for recipe in OTHERS]


@pytest.mark.parametrize(("recipe", "words"), KINDS, ids=str)
def test_a_step_reads_nothing_back_and_repeats_its_bits(nano: Any, recipe: str, words: tuple[str, ...]) -> None:
    """Warmed up for one step, in which kernels are compiled."""
    runs: list[list[torch.Tensor]] = []
    results: list[StepResult] = []
    for _ in range(2):
        model, optimizer = build(nano(f"recipe={recipe}", *WIDTHS, *words), torch.device("cuda"))
        train_step(model, optimizer, batches(0), 1e-3, 1.0)
        with nothing_read_back():
            steps = [train_step(model, optimizer, batches(seed), 1e-3, 1.0) for seed in range(1, 4)]
        assert all(step.applied for step in steps)
        results.append(steps[-1])
        runs.append(state(model, optimizer))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert results[0].loss == results[1].loss
    assert results[0].grad_norm == results[1].grad_norm


@pytest.mark.parametrize("recipe", ["bf16", "delayed"])
@pytest.mark.parametrize("bad", [float("nan"), 1e25])
def test_a_skipped_step_moves_nothing_and_is_decided_on_the_gpu(nano: Any, recipe: str, bad: float) -> None:
    model, optimizer = build(nano(f"recipe={recipe}", *WIDTHS), torch.device("cuda"))
    assert train_step(model, optimizer, batches(0), 1e-3, 1.0).applied
    before, steps = state(model, optimizer), optimizer.steps
    hook = model.embedding.register_hook(lambda gradient: gradient * bad)
    skipped = train_step(model, optimizer, batches(1), 1e-3, 0.0)
    hook.remove()
    assert not skipped.applied
    assert optimizer.steps == steps
    assert all(torch.equal(a, b) for a, b in zip(before, state(model, optimizer), strict=True))
    assert train_step(model, optimizer, batches(2), 1e-3, 1.0).applied
    assert not all(torch.equal(a, b) for a, b in zip(before, state(model, optimizer), strict=True))


@pytest.mark.parametrize(
    ("recipe", "words", "moments"),
    [(*kind, moments) for kind in KINDS for moments in ("fp32", "bf16") if moments == "fp32" or kind[0] not in OTHERS],
    ids=str,
)
def test_replayed_steps_equal_launched_ones(nano: Any, recipe: str, words: tuple[str, ...], moments: str) -> None:
    """Rates and loads change, a step is skipped for a weight that is NaN, and one is launched in between."""
    runs, losses = [], []
    for graphed in (False, True):
        config = nano(f"recipe={recipe}", f"optimizer.moments={moments}", *WIDTHS, *words)
        model, optimizer = build(config, torch.device("cuda"))
        graph = StepGraph(model, optimizer, 1.0)
        seen: list[float] = []
        for seed in range(9):
            lr, given = 1e-3 * (seed + 1), batches(seed) if seed != 6 else batches(seed)[:1]
            if seed == 5:
                kept = model.embedding.detach().clone()
                with torch.no_grad():
                    model.embedding.fill_(float("nan"))
            result = graph.step(given, lr) if graphed else train_step(model, optimizer, given, lr, 1.0)
            seen += [result.loss, result.grad_norm, *result.expert_load.flatten().tolist()] if seed != 5 else []
            assert result.applied == (seed != 5)
            if seed == 5:
                with torch.no_grad():
                    model.embedding.copy_(kept)
        assert (graph._graph is not None) == graphed
        runs.append(state(model, optimizer))
        losses.append(seen)
    assert losses[0] == losses[1]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_a_recipe_whose_experts_are_looped_over_is_not_recorded(nano: Any) -> None:
    words = ("recipe=dsv3", "recipe.roles.weight.format=none", "training.device=cuda", *WIDTHS)
    with pytest.raises(UserError, match=r"^training.cuda_graph=true: .*: expert_gate_up.fprop takes a GEMM per expert: "):
        validate_run(nano(*words, "training.cuda_graph=true"))
    assert choose_steps(nano(*words), torch.device("cuda")).backend == "launched"


def test_a_run_with_a_graph_is_the_run_without_it(nano: Any, curve: Any) -> None:
    """Validation, counting of what casts lose and checkpoints in between. null takes a graph here."""
    configs = [
        nano("recipe=dsv3", "training.device=cuda", "training.steps=12", f"training.cuda_graph={on}", *WIDTHS[1:-1], run=on)
        for on in ("false", "true", "null")
    ]
    for config in configs:
        assert train(config) == 0
    taken = [json.loads((Path(config.run_dir) / "precision.json").read_text())["backends"][-1] for config in configs]
    assert [row["backend"] for row in taken] == ["launched", "graph", "graph"]
    assert curve(configs[0].run_dir) == curve(configs[1].run_dir) == curve(configs[2].run_dir)


@pytest.mark.parametrize("failing", ["memory", "waiting", "room"])
def test_steps_that_cannot_be_recorded_are_launched_with_the_same_bits(
    nano: Any, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory ends in the middle of a recording, a step waits for the GPU, or nothing is left beside the graph."""
    runs, said = [], []
    if failing == "room":
        monkeypatch.setattr(graph_module, "ROOM", 1e9)
    for fails in (False, True):
        model, optimizer = build(nano("recipe=dsv3", *WIDTHS), torch.device("cuda"))
        graph = StepGraph(model, optimizer, 1.0, launched=said.append if fails else None)
        real = model.layers[1].forward

        def forward(*given: Any, real: Any = real, model: Any = model) -> Any:
            if failing == "memory" and torch.cuda.is_current_stream_capturing():
                raise torch.OutOfMemoryError("CUDA out of memory, as planned")
            if failing == "waiting":
                assert model.embedding.detach()[0, 0].item() == model.embedding.detach()[0, 0].item()
            return real(*given)

        if fails:
            model.layers[1].forward = forward
        losses = []
        for seed in range(5):
            given = (batches(seed), 1e-3)
            result = graph.step(*given) if fails else train_step(model, optimizer, *given, 1.0)
            losses.append(result.loss)
        assert graph._graph is None
        runs.append((losses, state(model, optimizer)))
    (line,) = said
    assert {"memory": "as planned", "waiting": "it waits for the GPU", "room": "GB are left"}[failing] in line
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))


def test_experts_add_to_the_gradient_so_far_and_change_no_bit(nano: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for _ in range(2):
        model, optimizer = build(nano("recipe=dsv3", *WIDTHS), torch.device("cuda"))
        for seed in range(3):
            train_step(model, optimizer, batches(seed), 1e-3, 1.0)
        runs.append(state(model, optimizer))
        monkeypatch.setattr(grouped, "running_sum", lambda _: None)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("recipe", ["dsv3", "bf16"])
def test_deterministic_training_repeats_the_bits_of_its_steps(recipe: str) -> None:
    """At a size at which cuDNN's backward adds in varying order, launched and replayed.

    In a process of its own: cuBLAS looks once for the workspace that it is given for this.
    """
    script = Path(__file__).with_name("repeated_steps.py")
    path = os.pathsep.join((str(script.parents[1]), os.environ.get("PYTHONPATH", "")))
    environment = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    done = subprocess.run(
        [sys.executable, str(script), recipe, "cuda", "16", "1024"], env={**environment, "PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["attention"] == "triton"
    assert found["recorded"] == [False] * 5 + [True] * 5
    assert len(found["gradients"]) == 10
    assert len(set(found["gradients"])) == 1
    assert len(set(found["states"])) == 1
