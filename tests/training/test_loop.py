"""Whole runs: what they leave behind, that they repeat bit for bit, and what stops them."""

import gc
import json
import math
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from dsv3fp8.config import group_options
from dsv3fp8.errors import UserError
from dsv3fp8.parallel.ranks import Ranks
from dsv3fp8.training import checkpoint_saver, loop
from dsv3fp8.training.checkpoint import open_checkpoint
from dsv3fp8.training.checkpoint_directory import list_checkpoints
from dsv3fp8.training.loop import train
from dsv3fp8.training.metrics import read_metrics
from dsv3fp8.training.reporting import Reporters
from dsv3fp8.training.run_directory import RunDirectory
from dsv3fp8.training.setup import prepare


def steps_on_disk(config: Any) -> list[int]:
    return [step for step, _ in list_checkpoints(Path(config.run_dir) / "checkpoints")]


def tensors(config: Any, step: int) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(config.run_dir, step)
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, action: Callable[[], Any]) -> None:
    """Do something once, while the record of a step is being logged."""
    real, done = Reporters.log, []

    def log(self: Reporters, record: dict[str, Any]) -> None:
        real(self, record)
        if record["step"] == step and not done:
            done.append(step)
            action()

    monkeypatch.setattr(Reporters, "log", log)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_leaves_all_that_is_needed_to_resume_plot_and_compare_it(nano: Any, capsys: pytest.CaptureFixture) -> None:
    config = nano("logging.progress=plain", "logging.plot=true", "training.keep=1")
    assert train(config) == 0
    directory = Path(config.run_dir)
    assert yaml.safe_load((directory / "config.yaml").read_text())["model"]["vocab_size"] == 320  # resolved
    assert json.loads((directory / "corpus.json").read_text())["bigram"]["loss"] > 0
    assert json.loads((directory / "precision.json").read_text())["recipe"] == "dsv3"
    assert json.loads((directory / "environment.json").read_text())["packages"]["torch"] == torch.__version__
    assert (directory / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert steps_on_disk(config) == [10]
    records = read_metrics(directory / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, 11))
    assert records[-1]["tokens"] == 10 * 2 * 32
    for record in records:
        assert record["loss"] == pytest.approx(math.log(320), rel=0.5)
        assert record["expert_load_max"] >= 1
        assert record["bf16_peak_share"] is None  # a CPU has no such peak
    assert [record["flushed_share"] is not None for record in records] == [step in (1, 5, 10) for step in range(1, 11)]
    assert 0 < records[-1]["flushed_share"] < 0.01
    assert [record["saturated_share"] for record in records] == [0.0 if step in (1, 5, 10) else None for step in range(1, 11)]
    assert ["validation_loss" in record for record in records] == [step in (5, 10) for step in range(1, 11)]
    text = records[-1]["validation_bits_per_byte"] / records[-1]["validation_loss"] * math.log(2)
    assert text == pytest.approx(1, rel=0.01)  # bytes are the tokens; an end of document each few thousand
    output = capsys.readouterr().out
    assert "precision: recipe dsv3" in output
    lines = output.splitlines()
    assert any(line.startswith("step 1/10  loss ") for line in lines)
    assert lines[-3].startswith("validation loss ")
    assert lines[-2].startswith("bigram model    ")


def test_the_curve_goes_down(nano: Any) -> None:
    config = nano("training.steps=40", "optimizer.lr=0.01", "recipe=bf16")
    assert train(config) == 0
    records = read_metrics(Path(config.run_dir) / "metrics.jsonl")
    assert records[-1]["validation_loss"] < 0.75 * records[0]["loss"]


def test_scales_that_were_frozen_too_early_are_told_by_what_saturates(nano: Any) -> None:
    """Weights that grow a hundredfold under scales that were calibrated on the first two steps."""
    config = nano(
        "recipe=static", "recipe.calibration_steps=2", "training.steps=20", "training.validate_every=20", "optimizer.lr=0.1"
    )
    assert train(config) == 0
    records = read_metrics(Path(config.run_dir) / "metrics.jsonl")
    assert records[0]["saturated_share"] == 0
    assert records[-1]["saturated_share"] > 0.01


# Transformer Engine's needs its library and a Hopper GPU: tests/model/test_te.py.
@pytest.mark.parametrize("recipe", [name for name in group_options("recipe") if name != "te_blockwise"])
def test_every_recipe_trains_with_nothing_but_its_name_changed(nano: Any, recipe: str) -> None:
    config = nano(f"recipe={recipe}", "training.steps=4", "optimizer.lr=0.01")
    assert train(config) == 0
    records = read_metrics(Path(config.run_dir) / "metrics.jsonl")
    assert records[-1]["skipped"] == 0
    assert records[-1]["validation_loss"] < records[0]["loss"]
    assert records[-1]["flushed_share"] == 0 or recipe not in ("fp32", "bf16")


@pytest.mark.parametrize(
    "words",
    [
        ("recipe=dsv3", "optimizer.moments=bf16", "training.accumulate=2", "training.log_every=3"),
        ("recipe=delayed", "data.workers=2"),
        ("recipe=static", "data.isolate_documents=true", "recipe.calibration_steps=8"),
    ],
    ids=["dsv3", "delayed", "static"],
)
def test_a_run_that_was_stopped_and_resumed_equals_the_uninterrupted_one_bit_for_bit(
    nano: Any, curve: Any, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """O02, O14, K08: losses, learning rates, weights, moments, biases and amax histories."""
    whole, cut = nano(*words, run="whole"), nano(*words, run="cut")
    assert train(whole) == 0
    at_step(monkeypatch, 6, terminate)
    assert train(cut) == 143
    assert steps_on_disk(cut) == [5, 6]
    assert train(cut) == 0
    assert curve(cut.run_dir) == curve(whole.run_dir)
    expected, found = tensors(whole, 10), tensors(cut, 10)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("where", ["validation", "saving", "waiting for data"])
@pytest.mark.parametrize("workers", [0, 2])
def test_sigterm_finishes_the_step_saves_it_and_exits_143_wherever_it_arrives(
    nano: Any, curve: Any, monkeypatch: pytest.MonkeyPatch, where: str, workers: int
) -> None:
    """K08."""
    config = nano(f"data.workers={workers}", "recipe=bf16")
    owner, name = {
        "validation": (loop, "validate"),
        "saving": (loop, "begin_checkpoint"),
        "waiting for data": (loop, "train_step"),
    }[where]
    real, calls = getattr(owner, name), []

    def signalled(*arguments: Any, **named: Any) -> Any:
        calls.append(name)
        if len(calls) == 1:
            terminate()
        return real(*arguments, **named)

    monkeypatch.setattr(owner, name, signalled)
    assert train(config) == 143
    stopped = 1 if where == "waiting for data" else 5
    assert steps_on_disk(config) == [stopped]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert train(config) == 0
    assert [record["step"] for record in curve(config.run_dir)] == list(range(1, 11))


def test_a_checkpoint_is_written_while_steps_go_on_and_a_signal_waits_for_it(
    nano: Any, curve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K08: steps 6 and 7 are taken while step 5 is being written, and are not in it."""
    whole, config = nano("recipe=bf16", "training.keep=2", run="whole"), nano("recipe=bf16", "training.keep=2", run="slow")
    assert train(whole) == 0
    real, taken = checkpoint_saver.write_file, threading.Event()

    def write_file(*arguments: Any) -> bytes:
        assert taken.wait(60), "training waits for the disk"
        return real(*arguments)

    monkeypatch.setattr(checkpoint_saver, "write_file", write_file)
    at_step(monkeypatch, 7, lambda: (terminate(), threading.Timer(0.5, taken.set).start()))
    assert train(config) == 143
    assert steps_on_disk(config) == [5, 7]
    expected = tensors(whole, 5)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors(config, 5).items())
    assert train(config) == 0
    assert curve(config.run_dir) == curve(whole.run_dir)


def test_sigint_exits_130(nano: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """K08."""
    config = nano("recipe=bf16")
    at_step(monkeypatch, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert train(config) == 130
    assert steps_on_disk(config) == [3]


def test_a_finished_run_says_so_and_stays_as_it_is(nano: Any, capsys: pytest.CaptureFixture) -> None:
    config = nano("recipe=bf16")
    assert train(config) == 0
    before = (Path(config.run_dir) / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    assert train(config) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line == (
        f"run_dir={config.run_dir} is finished (10 steps): choose another run_dir=, or set training.steps higher with "
        "resume=fork"
    )
    assert (Path(config.run_dir) / "metrics.jsonl").read_bytes() == before


def test_changed_settings_are_refused_unless_they_fork(nano: Any, curve: Any, capsys: pytest.CaptureFixture) -> None:
    assert train(nano("recipe=bf16")) == 0
    changed = ("recipe=dsv3", "training.steps=12", "optimizer.lr=0.001")
    with pytest.raises(UserError) as error:
        train(nano(*changed))
    assert "\n" not in str(error.value)
    for part in ("holds step 10", "training.steps 10 → 12", "optimizer.lr 0.002 → 0.001", "recipe.name bf16 → dsv3"):
        assert part in str(error.value)
    config = nano(*changed, "resume=fork")
    assert train(config) == 0
    assert "forked with other settings: " in capsys.readouterr().out
    directory = Path(config.run_dir)
    assert [record["step"] for record in curve(directory)] == list(range(1, 13))
    assert yaml.safe_load((directory / "config.yaml").read_text())["recipe"]["name"] == "dsv3"
    assert yaml.safe_load((directory / "config-until-step-00000010.yaml").read_text())["recipe"]["name"] == "bf16"
    assert train(nano(*changed)) == 0  # finished under the settings of the fork


def test_a_fork_that_is_started_twice_keeps_the_settings_before_it(nano: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train(nano("recipe=bf16")) == 0
    for lr in ("0.001", "0.0005"):
        with monkeypatch.context() as patch:
            patch.setattr(loop.Loop, "run_steps", lambda _: 137)  # it ends before its first checkpoint
            assert train(nano("recipe=bf16", "training.steps=12", f"optimizer.lr={lr}", "resume=fork")) == 137
    directory = Path(nano().run_dir)
    (kept,) = directory.glob("config-until-*")
    assert [yaml.safe_load(path.read_text())["optimizer"]["lr"] for path in (kept, directory / "config.yaml")] == [
        0.002,
        0.0005,
    ]


def test_a_validation_split_too_short_for_the_ranks_is_found_before_the_first_step(
    nano: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of so many ranks would find it alone, in its first validation."""
    ranks = Ranks(index=0, count=1000)
    for name, given in (("require_equal", None), ("wait", None)):
        monkeypatch.setattr(Ranks, name, lambda *_, given=given: given)
    monkeypatch.setattr(Ranks, "from_first", lambda _, value: value)
    config = nano()
    with (
        RunDirectory(Path(config.run_dir)) as directory,
        pytest.raises(UserError, match=r"validation split has .* on each of 1000 ranks; .*data\.validation_fraction") as error,
    ):
        prepare(config, directory, torch.device("cpu"), ranks)
    assert "\n" not in str(error.value)


def test_what_only_looks_or_saves_may_change_without_a_word(nano: Any, curve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = nano("recipe=bf16", run="whole")
    assert train(whole) == 0
    at_step(monkeypatch, 4, terminate)
    assert train(nano("recipe=bf16", run="cut")) == 143
    config = nano("recipe=bf16", "training.checkpoint_every=3", "training.keep=5", "data.workers=1", run="cut")
    assert train(config) == 0
    assert steps_on_disk(config) == [4, 6, 9, 10]
    assert curve(config.run_dir) == curve(whole.run_dir)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("recipe=bf16", ("recipe=delayed",)), ("recipe=delayed", ("recipe=dsv3",)), ("recipe=delayed", ("recipe=static",)),
        ("recipe=delayed", ("recipe=delayed", "recipe.amax_history=4")),
    ],
    ids=["none to delayed", "delayed to none", "delayed to static", "another history"],
)  # fmt: skip
def test_a_fork_into_another_recipe_begins_its_histories_anew(nano: Any, before: str, after: tuple[str, ...]) -> None:
    """Which amax histories there are is the recipe's: they must not make it another model."""
    assert train(nano(before)) == 0
    config = nano(*after, "training.steps=12", "resume=fork")
    assert train(config) == 0
    steps = {int(tensor) for name, tensor in tensors(config, 12).items() if name.endswith("states.input.steps")}
    assert steps == (set() if after == ("recipe=dsv3",) else {2})


def test_a_fork_under_the_same_recipe_keeps_its_histories(nano: Any) -> None:
    assert train(nano("recipe=delayed")) == 0
    config = nano("recipe=delayed", "training.steps=12", "optimizer.lr=0.001", "resume=fork")
    assert train(config) == 0
    assert {int(t) for name, t in tensors(config, 12).items() if name.endswith("states.input.steps")} == {12}


def test_another_model_cannot_be_forked_into(nano: Any) -> None:
    """K04."""
    assert train(nano("recipe=bf16")) == 0
    with pytest.raises(UserError, match=r"is of another model: embedding is \(320, 32\) float32 there and \(320, 64\)"):
        train(nano("recipe=bf16", "model.dim=64", "training.steps=12", "resume=fork"))


def test_other_files_under_the_same_settings_are_refused(nano: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some words to learn\n" * 400)
    config = nano(f"data.paths={text}", "data.validation_fraction=0.2", "recipe=bf16")
    at_step(monkeypatch, 2, terminate)
    assert train(config) == 143
    text.write_text("other words to learn\n" * 400)
    with pytest.raises(UserError, match=r"holds step 2 of a run on other data \(corpus hash \w+ → \w+"):
        train(config)
    text.write_text("some words to learn\n" * 400)
    assert train(config) == 0


def test_a_fork_onto_other_data_begins_them_anew(nano: Any, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert train(nano("recipe=bf16")) == 0
    config = nano("recipe=bf16", "training.context=16", "training.steps=12", "resume=fork")
    assert train(config) == 0
    assert "the training data begin anew" in capsys.readouterr().out
    assert open_checkpoint(config.run_dir, None).state["data"]["consumed"] == 2 * 2


def poison(monkeypatch: pytest.MonkeyPatch, bad_steps: set[int]) -> None:
    """NaN as the gradient norm of some steps."""
    from dsv3fp8.training import step

    real, calls = step.gradient_norm, [0]

    def gradient_norm(gradients: Any, device: torch.device) -> torch.Tensor:
        calls[0] += bool(gradients)  # of experts that lie elsewhere there are none
        if gradients and calls[0] in bad_steps:
            gradients[0].fill_(math.nan)
        return real(gradients, device)

    monkeypatch.setattr(step, "gradient_norm", gradient_norm)


def test_a_skipped_step_is_counted_and_moves_neither_learning_rate_nor_weights(
    nano: Any, curve: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """O07: NaN at steps 3 and 4."""
    clean, config = nano(run="clean"), nano(run="bad")
    assert train(clean) == 0
    poison(monkeypatch, {3, 4})
    assert train(config) == 0
    bad, expected = read_metrics(Path(config.run_dir) / "metrics.jsonl"), curve(clean.run_dir)
    assert [record["skipped"] for record in bad] == [0, 0, 1, 2, 2, 2, 2, 2, 2, 2]
    assert all(math.isnan(bad[step]["grad_norm"]) for step in (2, 3))
    assert [record["lr"] for record in bad][2:5] == [expected[2]["lr"]] * 3
    assert [record["lr"] for record in bad][5:] == [record["lr"] for record in expected][3:8]
    assert bad[1]["loss"] == expected[1]["loss"]
    output = capsys.readouterr().out
    assert "step 4: loss " in output
    assert "gradient norm nan: skipped (2 in a row, 2 in all)" in output


def test_too_many_skipped_steps_in_a_row_end_the_run_without_touching_the_good_checkpoint(
    nano: Any, curve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O07: no NaN checkpoint is written, no good one is rotated out."""
    poison(monkeypatch, {2, 3, *range(7, 30)})
    config = nano("training.steps=30", "training.max_skipped=4", "training.checkpoint_every=1", "training.keep=1")
    with pytest.raises(UserError, match=r"training\.max_skipped=4 steps in a row up to step 10 .*resume=fork"):
        train(config)
    assert steps_on_disk(config) == [6]
    assert all(tensor.isfinite().all() for tensor in tensors(config, 6).values())
    assert [record["skipped"] for record in curve(config.run_dir)] == [0, 1, 2, 2, 2, 2, 3, 4, 5, 6]


def test_weights_that_are_not_finite_are_never_saved(nano: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """O07: gradients were finite, but an update overflowed."""
    config = nano("recipe=fp32")
    real, calls = loop.train_step, []

    def overflowing(model: Any, *rest: Any) -> Any:
        result = real(model, *rest)
        calls.append(result)
        if len(calls) == 5:
            with torch.no_grad():
                model.norm.weight[0] = math.inf
        return result

    monkeypatch.setattr(loop, "train_step", overflowing)
    with pytest.raises(UserError, match=r"norm\.weight is not finite after step 5"):
        train(config)
    assert steps_on_disk(config) == []


def test_a_full_disk_in_the_middle_keeps_the_last_checkpoint(nano: Any, curve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """K10: checkpoint of step 5 written, that of step 10 not."""
    config = nano("recipe=bf16")
    real = checkpoint_saver.write_file

    def write_file(path: Path, *rest: Any) -> bytes:
        if "step-00000010" in str(path):
            raise OSError(28, "No space left on device")
        return real(path, *rest)

    monkeypatch.setattr(checkpoint_saver, "write_file", write_file)
    with pytest.raises(UserError, match=r"No space left on device.*the checkpoint of step 5 is kept"):
        train(config)
    assert steps_on_disk(config) == [5]
    monkeypatch.setattr(checkpoint_saver, "write_file", real)
    assert train(config) == 0
    assert [record["step"] for record in curve(config.run_dir)] == list(range(1, 11))


def test_a_file_where_the_checkpoints_belong_is_named(nano: Any) -> None:
    config = nano("recipe=bf16")
    Path(config.run_dir).mkdir()
    (Path(config.run_dir) / "checkpoints").touch()
    with pytest.raises(UserError, match=r"checkpoints cannot be made: File exists; choose another run_dir="):
        train(config)


def test_memory_stays_flat_over_200_steps(nano: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Y01: no loss may keep its graph alive; live tensors and resident memory of steps 40 and 200."""
    psutil = pytest.importorskip("psutil")
    seen = {}

    def look(step: int) -> None:
        gc.collect()
        live = sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())
        seen[step] = live, psutil.Process().memory_info().rss

    real = Reporters.log

    def log(self: Reporters, record: dict[str, Any]) -> None:
        real(self, record)
        if record["step"] in (40, 200):
            look(record["step"])

    monkeypatch.setattr(Reporters, "log", log)
    words = ("recipe=fp32", "model.mtp_depth=0", "training.steps=200", "training.checkpoint_every=50")
    assert train(nano(*words, "training.validate_every=20")) == 0
    assert seen[200][0] <= seen[40][0]
    assert seen[200][1] < seen[40][1] + (8 << 20)


def test_the_profiler_writes_a_trace_and_a_table(nano: Any) -> None:
    config = nano("recipe=bf16", "training.profile=2", "training.steps=6")
    assert train(config) == 0
    directory = Path(config.run_dir) / "profile"
    trace = json.loads((directory / "trace-step-00000003.json").read_text())
    assert trace["traceEvents"]
    assert "aten::mm" in (directory / "table-step-00000003.txt").read_text()


def test_deterministic_algorithms_can_be_asked_for(nano: Any) -> None:
    try:
        assert train(nano("training.deterministic=true", "training.steps=2")) == 0
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
