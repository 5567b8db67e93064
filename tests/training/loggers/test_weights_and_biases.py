"""W&B offline, read back from the files that `wandb sync` would send."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from wandb_files import history, sessions

from dsv3fp8.errors import UserError
from dsv3fp8.training import loop
from dsv3fp8.training.checkpoint import open_checkpoint
from dsv3fp8.training.config import LoggingConfig
from dsv3fp8.training.loggers.weights_and_biases import WeightsAndBiases, new_run_id
from dsv3fp8.training.loop import train

wandb = pytest.importorskip("wandb")


def open_run(path: Path, run_id: str, **changes: Any) -> WeightsAndBiases:
    path.mkdir(exist_ok=True)
    logging = LoggingConfig(**{"wandb": "offline", "tags": ["a"], **changes})
    return WeightsAndBiases(logging, path, {"model": {"dim": 32}, "optimizer": {"betas": [0.9, 0.95]}}, run_id, print)


def test_points_lie_on_the_step_axis_and_nan_is_visible(tmp_path: Path) -> None:
    """W05."""
    logger = open_run(tmp_path / "run", "abcd1234")
    logger.log({"step": 5, "loss": 1.5, "bf16_peak_share": None})
    logger.log({"step": 7, "loss": math.nan, "grad_norm": math.inf})
    logger.close()
    (session,) = sessions(tmp_path / "run")
    first, second = history(session)
    assert first["_step"] == first["step"] == 5
    assert first["loss"] == 1.5
    assert "bf16_peak_share" not in first
    assert second["_step"] == 7
    assert math.isnan(float(second["loss"]))
    assert math.isinf(float(second["grad_norm"]))
    metrics = {record.metric.name or record.metric.glob_name: record.metric for record in session if record.HasField("metric")}
    assert metrics["*"].step_metric == "step"
    (run,) = [record.run for record in session if record.HasField("run")]
    assert (run.run_id, run.project, run.display_name, list(run.tags)) == ("abcd1234", "dsv3fp8", "run", ["a"])
    assert {item.key: json.loads(item.value_json) for item in run.config.update}["model"] == {"dim": 32}


def test_a_killed_and_resumed_run_keeps_its_id_and_loses_no_point(nano: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """W01, W03: logged to 7, checkpoint of step 5, resumed there."""
    config = nano("recipe=bf16", "logging.wandb=offline")
    real = loop.train_step
    calls: list[int] = []

    def dying(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 8:
            raise ZeroDivisionError
        return real(*arguments)

    monkeypatch.setattr(loop, "train_step", dying)
    with pytest.raises(ZeroDivisionError):
        train(config)
    monkeypatch.setattr(loop, "train_step", real)
    assert train(config) == 0
    before, after = sessions(Path(config.run_dir), count=2)
    ids = {record.run.run_id for session in (before, after) for record in session if record.HasField("run")}
    assert ids == {open_checkpoint(config.run_dir, 10).state["wandb_id"]}
    assert [row["step"] for row in history(before)] == [row["_step"] for row in history(before)] == list(range(1, 8))
    assert [row["step"] for row in history(after)] == [row["_step"] for row in history(after)] == list(range(6, 11))
    for row in (5, 6):  # steps 6 and 7, logged by both: the same points
        assert history(before)[row]["loss"] == history(after)[row - 5]["loss"]


def test_points_that_the_server_holds_already_are_not_sent_again(tmp_path: Path) -> None:
    """W01: online, W&B would drop steps below its own with a warning each."""
    logger = open_run(tmp_path / "run", new_run_id())
    logger._first_step = 8
    for step in range(6, 11):
        logger.log({"step": step, "loss": 1.0})
    logger.close()
    (session,) = sessions(tmp_path / "run")
    assert [row["step"] for row in history(session)] == [8, 9, 10]


def test_a_fork_is_another_run(nano: Any) -> None:
    assert train(nano("recipe=bf16", "training.steps=3", "logging.wandb=offline")) == 0
    config = nano("recipe=bf16", "training.steps=5", "logging.wandb=offline", "resume=fork")
    assert train(config) == 0
    ids = [
        record.run.run_id for session in sessions(Path(config.run_dir), count=2) for record in session if record.HasField("run")
    ]
    assert len(set(ids)) == 2


def test_without_wandb_a_line_says_so_and_training_goes_on(
    nano: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = nano("recipe=bf16", "training.steps=2", "logging.wandb=offline")
    assert train(config) == 0
    assert capsys.readouterr().out.count("W&B is not installed") == 1
    assert (Path(config.run_dir) / "metrics.jsonl").exists()


@pytest.mark.parametrize("key", ["", "0" * 40])
def test_online_without_login_or_network_is_one_line_before_any_step(
    nano: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: str, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", key) if key else monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setattr("dsv3fp8.training.loggers.weights_and_biases.INIT_TIMEOUT", 1)
    config = nano("recipe=bf16", "logging.wandb=online")
    with pytest.raises(UserError, match=r"logging\.wandb=online cannot start .*wandb sync") as error:
        train(config)
    assert "\n" not in str(error.value)
    assert "wandb:" not in capfd.readouterr().err  # the one line is ours
    assert not read_lines(Path(config.run_dir) / "metrics.jsonl")


def read_lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def test_trouble_after_the_start_is_one_line_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    logger = open_run(tmp_path / "run", new_run_id())
    run = logger._run
    assert run is not None

    def broken(*arguments: Any, **named: Any) -> None:
        raise BrokenPipeError("the service is gone")

    monkeypatch.setattr(run, "log", broken)
    for step in (1, 2, 3):
        logger.log({"step": step, "loss": 1.0})
    logger.close()
    assert capsys.readouterr().out == "W&B stopped (BrokenPipeError: the service is gone); metrics.jsonl goes on\n"
    run.finish()
