"""`compare`: which runs it makes, where, and what becomes of those that fail or are interrupted."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up import SMALL, make_run, settings

from dsv3fp8 import cli
from dsv3fp8.config import load_config
from dsv3fp8.errors import UserError
from dsv3fp8.observe.compare import command, pool
from dsv3fp8.observe.compare import plan as plans
from dsv3fp8.observe.compare.command import parse
from dsv3fp8.observe.compare.plan import Plan, PlannedRun, check_against_disk, has_ended, make_plan
from dsv3fp8.observe.compare.pool import places_for, run_all
from dsv3fp8.observe.compare.runs import read_runs
from dsv3fp8.observe.compare.study import study
from dsv3fp8.training.child import LOG
from dsv3fp8.training.loop import train

WORDS = (
    *(word for word in SMALL if "vocab_size" not in word), "data=synthetic", "data.tokens=20000", "data.vocab_size=128",
    "training.steps=60", "training.validate_every=20", "training.validation_batches=2", "training.checkpoint_every=7",
    "schedule.warmup=3", "logging.wandb=disabled",
)  # fmt: skip


def plan_of(*words: str) -> Plan:
    return make_plan(*parse(words))


def complaint(*words: str) -> str:
    with pytest.raises(UserError) as caught:
        plan_of(*words)
    return str(caught.value)


# the plan


def test_every_recipe_gets_every_seed_and_the_baseline_comes_first(tmp_path: Path) -> None:
    plan = plan_of("recipes=dsv3,bf16,dsv3:attention_cache=compute", "seeds=2", f"out={tmp_path}/o", *WORDS, "training.seed=4")
    names = ("bf16", "dsv3", "dsv3:attention_cache=compute")
    assert [run.name for run in plan.runs] == [f"{name} seed {seed}" for name in names for seed in (4, 5)]
    assert plan.runs[4].directory == tmp_path / "o" / "dsv3-attention_cache-compute-seed4"
    assert plan.runs[4].config.recipe.attention_cache == "compute"
    assert (plan.baseline, plan.window, plan.group) == ("bf16", 3, "o")


def test_on_a_gpu_the_baseline_can_be_trained_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "select_device", lambda _: torch.device("cuda"))
    words = ("recipes=bf16,dsv3", "seeds=1", "baseline_seeds=2", "repeats=1", *WORDS)
    plan = plan_of(*words)
    assert [run.name for run in plan.runs] == ["bf16 seed 0", "bf16 seed 1", "bf16 again seed 0", "dsv3 seed 0"]
    first, again = plan.runs[0], plan.runs[2]
    assert again.directory.name == "bf16-seed0-again"
    assert dataclasses.replace(again.config, run_dir="") == dataclasses.replace(first.config, run_dir="")
    assert "training.deterministic=true repeats bits" in complaint(*words, "training.deterministic=true")


def test_runs_differ_in_recipe_and_seed_alone() -> None:
    plan = plan_of("recipes=bf16,dsv3", "seeds=2", *WORDS)
    told = []
    for run in plan.runs:
        training = dataclasses.replace(run.config.training, seed=0)
        told.append(dataclasses.replace(run.config, training=training, recipe=plan.runs[0].config.recipe, run_dir=""))
    assert all(each == told[0] for each in told)
    assert plan.out == Path("runs/compare-tiny").absolute()


def test_what_a_run_is_told_makes_the_settings_it_was_checked_with(tmp_path: Path) -> None:
    """Also where the directory has odd signs."""
    plan = plan_of("recipes=dsv3", f'out={tmp_path}/a "b", = 数据', *WORDS)
    assert [load_config(run.words) for run in plan.runs] == [run.config for run in plan.runs]
    assert plan.runs[0].directory.parent.name == 'a "b", = 数据'


def test_the_baseline_may_have_more_seeds() -> None:
    plan = plan_of("recipes=bf16,dsv3", "seeds=1", "baseline_seeds=3", *WORDS)
    assert [run.name for run in plan.runs] == ["bf16 seed 0", "bf16 seed 1", "bf16 seed 2", "dsv3 seed 0"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["recipes=bf16,dsv4"], "recipe=dsv4: no such recipe"),
        (["recipes=bf16,bf16"], "recipes=bf16,bf16: give bf16 once"),
        (["recipes=dsv3,dsv3:promote_every=128"], "dsv3 and dsv3:promote_every=128 are the same recipe"),
        (["recipes=dsv3:hopper"], "recipes=dsv3:hopper: behind a colon comes key=value"),
        (["recipes=dsv3:promotion=3"], "recipe.promotion: no such key"),
        (["recipes="], "recipes is empty"),
        (["recipes=bf16", "recipe=dsv3"], "recipe=dsv3: a comparison makes its own runs; use recipes=A,B"),
        (["recipes=bf16", "run_dir=x"], "run_dir=x: a comparison makes its own runs; use out=DIR"),
        (["recipes=bf16", "seeds=0"], "seeds=0 must be at least 1"),
        (["recipes=bf16", "seeds=3", "baseline_seeds=2"], "baseline_seeds=2 must be at least seeds=3"),
        (["recipes=bf16", "seeds=1", "repeats=2"], "repeats=2 must be from 0 to the 1 seeds of the baseline"),
        (["recipes=bf16", "repeats=1"], "repeats=1: a CPU repeats bits, so that the second run would be the first"),
        (["recipes=bf16", "baseline=dsv3"], "baseline=dsv3: no run has that recipe"),
        (["recipes=bf16", "window=61"], "window=61: give the steps to smooth over, from 1 to the 60"),
        (["recipes=bf16", "training.steps=0"], "training.steps=0 must be at least 1"),
        (["recipes=bf16", "training.context=9999"], "bf16 seed 0: training.context=9999 is longer than model.context"),
        (
            ["recipes=bf16", "parallel.dp_replicate=2"],
            "parallel.dp_replicate=2 parallel.dp_shard=1: a comparison trains each run",
        ),
    ],
)
def test_a_comparison_that_cannot_be_is_refused_before_any_work(words: list[str], said: str) -> None:
    assert said in complaint(*WORDS, *words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["seeds=2"], "recipes: no value given; name some, as in `dsv3fp8 compare recipes=bf16,dsv3"),
        (["recipes=bf16", "seed=3"], "seed: no such key; did you mean seeds?"),
        (["recipes=bf16", "now"], "now: expected key=value"),
    ],
)
def test_a_misspelt_key_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_help_lists_the_keys_of_both_forms(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {key} " in text for key in ("recipes", "seeds", "baseline_seeds", "jobs", "window", "wandb"))


def test_runs_that_are_there_with_other_settings_or_data_are_refused(tmp_path: Path) -> None:
    words = [word for word in SMALL if "vocab_size" not in word]
    plan = plan_of(
        "recipes=bf16", "seeds=1", f"out={tmp_path}", *words, "data=synthetic", "data.vocab_size=320", "training.steps=200"
    )
    made = make_run(tmp_path / "bf16-seed0", words=("data=synthetic", "data.vocab_size=320", "optimizer.lr=0.5"))
    with pytest.raises(UserError, match=r"holds step 200 of a run with other settings \(optimizer.lr 0.5 → 0.001") as caught:
        check_against_disk(plan)
    assert str(caught.value).endswith("): give the old ones, or another out=DIR")
    shutil.rmtree(made)
    make_run(made, words=("data=synthetic", "data.vocab_size=320"))
    with pytest.raises(
        UserError, match=r"of a run on other data \(corpus hash abab.*\): restore the files, or another out=DIR$"
    ):
        check_against_disk(plan)
    (made / "corpus.json").write_text('{"source": "Py')
    with pytest.raises(UserError, match=r"bf16-seed0/corpus\.json is no JSON .*: restore it, or leave the run out"):
        check_against_disk(plan)
    with (made / "metrics.jsonl").open("a") as file:
        file.write('{"step": 201}\n')
    with pytest.raises(UserError, match=r"bf16-seed0/metrics\.jsonl, line 201 has no loss: delete the line"):
        check_against_disk(plan)


# what is left to do


def planned(directory: Path, **about: Any) -> PlannedRun:
    make_run(directory, **about)
    config = settings("bf16")
    training = dataclasses.replace(config.training, steps=200)
    return PlannedRun("bf16", dataclasses.replace(config, training=training, run_dir=str(directory)), [])


def test_a_run_has_ended_with_its_last_step_and_checkpoint_or_when_it_gave_up(tmp_path: Path) -> None:
    done, short = planned(tmp_path / "done"), planned(tmp_path / "short", stop=199)
    stuck = planned(tmp_path / "stuck", loss=lambda step: 1.0 if step < 90 else float("nan"), stop=99)
    assert [has_ended(run) for run in (done, short, stuck)] == [True, False, True]
    (tmp_path / "done" / "checkpoints" / "step-00000180").mkdir(parents=True)
    assert not has_ended(done), "killed between its last record and its last checkpoint"
    (tmp_path / "done" / "checkpoints" / "step-00000200").mkdir()
    assert has_ended(done)


# places


def test_runs_take_the_gpus_that_are_visible_or_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(pool, "_cores", lambda: 6)
    assert places_for("cpu", None) == [{}]
    assert places_for("cpu", 4) == [{"OMP_NUM_THREADS": "1"}] * 4
    assert places_for("cpu", 2) == [{"OMP_NUM_THREADS": "3"}] * 2
    monkeypatch.setattr(pool, "select_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [place["CUDA_VISIBLE_DEVICES"] for place in places_for("auto", None)] == ["0", "1"]
    assert [place["CUDA_VISIBLE_DEVICES"] for place in places_for("auto", 3)] == ["0", "1", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-ab")
    assert [place["CUDA_VISIBLE_DEVICES"] for place in places_for("auto", None)] == ["5", "GPU-ab"]


class Shell:
    """Stands in for training: copies records that are made up, after a moment, or fails."""

    def __init__(self, records: Path, failing: str) -> None:
        self.records, self.failing = records, failing
        self.started: list[tuple[str, str, int]] = []
        self.running: list[subprocess.Popen[bytes]] = []

    def __call__(self, words: list[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        self.running = [process for process in self.running if process.poll() is None]
        self.started.append((log.parent.name, environment["CUDA_VISIBLE_DEVICES"], len(self.running)))
        log.parent.mkdir(parents=True, exist_ok=True)
        script = f"sleep 0.3; mkdir {log.parent}/checkpoints; cp {self.records} {log.parent}/metrics.jsonl"
        if log.parent.name == self.failing:
            script = f"echo 'dsv3fp8: error: out of memory: take less' > {log}; exit 2"
        process = subprocess.Popen(["sh", "-c", script])
        self.running.append(process)
        return process


def test_one_run_a_gpu_and_a_failing_one_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = make_run(tmp_path / "made") / "metrics.jsonl"
    shell = Shell(records, "r1")
    monkeypatch.setattr(pool, "start_training", shell)
    config = settings("bf16")
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, steps=200))
    runs = [PlannedRun(f"r{i}", dataclasses.replace(config, run_dir=str(tmp_path / f"r{i}")), []) for i in range(5)]
    said: list[str] = []
    failed, stopped = run_all(runs, [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in "AB"], False, said.append)
    assert [run.recipe for run in failed] == ["r1"]
    assert stopped is None
    assert [name for name, _, _ in shell.started] == [f"r{i}" for i in range(5)]
    assert [gpu for _, gpu, _ in shell.started[:2]] == ["A", "B"]
    assert max(others for _, _, others in shell.started) == 1
    assert any("r1 seed 0: failed (exit status 2): out of memory: take less; see" in line for line in said)
    assert any(line.startswith("r4 seed 0: done; r4 seed 0: step 200 of 200, loss 2.0") for line in said)
    assert not (tmp_path / "r0" / "checkpoints").exists()
    shell.started.clear()
    run_all(runs[:1] + runs[2:], [{"CUDA_VISIBLE_DEVICES": "A"}], False, said.append)
    assert shell.started == []
    assert said[-1] == "4 of 4 runs are there already"


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (59, "SIGINT: 1 of 1 runs have not ended; the same command goes on from their checkpoints"),
        (60, "SIGINT: every run has ended; the same command writes the report"),
    ],
)
def test_a_signal_says_what_is_left(
    steps: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(runs: list[PlannedRun], *_: Any) -> tuple[list[PlannedRun], signal.Signals]:
        make_run(runs[0].directory, steps=60, stop=steps)
        return [], signal.SIGINT

    monkeypatch.setattr(command, "run_all", stopped)
    assert cli.main(["compare", "recipes=bf16", "seeds=1", f"out={tmp_path}", *WORDS]) == 130
    assert capsys.readouterr().out.splitlines()[-1] == said


# the whole of it


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def start(words: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "dsv3fp8", "compare", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)


def steps_of(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for(process: subprocess.Popen[bytes], run: Path) -> None:
    deadline = time.monotonic() + 120
    while steps_of(run) < 3:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run makes no progress"
        time.sleep(0.002)


def test_interrupted_killed_and_resumed_it_reports_what_undisturbed_runs_do(
    tmp_path: Path, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    dense = ("model.layers=1", "model.dense_layers=1", "model.mtp_depth=0", "training.steps=30", "training.checkpoint_every=4")
    words = ["recipes=bf16,dsv3", "seeds=2", f"out={out}", *WORDS, *dense]
    process = start(words)
    wait_for(process, out / "bf16-seed0")
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert not (out / "report.json").exists()
    assert not (out / "dsv3-seed1").exists(), "the signal came too late to show anything"
    assert "Traceback" not in (out / "bf16-seed0" / LOG).read_text()

    process = start(words)
    wait_for(process, out / "bf16-seed1")
    process.kill()
    process.communicate(timeout=120)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert cli.main(["compare", *words, "jobs=2"]) == 0

    whole = tmp_path / "whole"
    for run in plan_of(*words).runs:
        assert train(dataclasses.replace(run.config, run_dir=str(whole / run.directory.name))) == 0
    want = json.loads(json.dumps(study(read_runs(sorted(whole.iterdir())))))
    got = json.loads((out / "report.json").read_text())
    for recipe in got["recipes"]:
        assert recipe.pop("kept_bytes_per_token") > 0
    for recipe in want["recipes"]:
        recipe.pop("kept_bytes_per_token"), recipe.pop("kept_bytes_missing")
    for recipe in got["recipes"]:
        assert recipe.pop("kept_bytes_missing") == ""
    assert {key: got[key] for key in ("settings", "recipes", "curves")} == {
        key: want[key] for key in ("settings", "recipes", "curves")
    }
    assert [recipe["verdict"] for recipe in got["recipes"]] != ["unfinished"] * 2
