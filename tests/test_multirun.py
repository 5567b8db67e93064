"""`train -m`: combinations of values, their directories, and Hydra's launchers."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import DictConfig

from dsv3fp8 import cli, multirun
from dsv3fp8.errors import UserError
from dsv3fp8.multirun import Job, expand
from dsv3fp8.observe.compare.runs import find_runs, read_runs
from dsv3fp8.training.metrics import read_metrics

TINY = (
    "data=synthetic", "data.tokens=5000", "data.vocab_size=64", "logging=quiet", "schedule.warmup=1",
    "model.dim=32", "model.layers=1", "model.dense_layers=1", "model.heads=2", "model.q_latent=16", "model.kv_latent=16",
    "model.head_nope=8", "model.head_rope=8", "model.head_v=8", "model.ffn=32", "model.mtp_depth=0",
    "training.steps=2", "training.batch=1", "training.context=16", "training.validation_batches=1",
)  # fmt: skip


def jobs_of(*words: str) -> list[Job]:
    return expand(words)[1]


def test_every_combination_is_a_run_named_after_its_values() -> None:
    base, jobs = expand(["recipe=bf16,dsv3", "training.seed=0,1", "training.steps=5", "run_dir=here"])
    assert base == Path("here").absolute()
    assert [job.name for job in jobs] == ["bf16-seed0", "bf16-seed1", "dsv3-seed0", "dsv3-seed1"]
    assert jobs[2].words == ("training.steps=5", "recipe=dsv3", "training.seed=0", f'run_dir="{base}/dsv3-seed0"')
    assert [job.directory for job in jobs] == [base / job.name for job in jobs]


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("optimizer.lr=1e-3,2e-3", ["lr_0.001", "lr_0.002"]),
        ("training.seed=range(3,6)", ["seed3", "seed4", "seed5"]),
        ("training.seed=choice(1,4)", ["seed1", "seed4"]),
        ("optimizer.betas=[0.9,0.95],[0.8,0.9]", ["betas_-0.9-0.95-", "betas_-0.8-0.9-"]),
        ("data.paths='a b.txt',\"数据.txt\"", ["paths_-a-b.txt-", "paths_-.txt-"]),
    ],
)
def test_values_are_swept_in_hydra_s_grammar(word: str, names: list[str]) -> None:
    assert [job.name for job in jobs_of(word)] == names


def test_names_that_come_out_equal_are_numbered() -> None:
    assert [job.name for job in jobs_of("data.text_key='a b','a?b'")] == ["text_key_-a-b-", "text_key_-a-b--1"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["training.steps=3"], "-m: no key has several values"),
        (["recipe=bf16,dsv3", "run_dir=a,b"], "run_dir=a,b: with -m, run_dir is the"),
        (["optimizer.lr=interval(0,1)"], "optimizer.lr=interval(0,1): a sweep needs a list of values"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(UserError) as caught:
        expand(words)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["recipe=bf16,dsv4"], "recipe=dsv4: no such recipe"),
        (["training.step=1,2"], "training.step: no such key"),
        (["recipe=bf16,dsv3", "hydra/launcher=slurm"], "hydra/launcher=slurm: no such launcher; there are basic, joblib,"),
        (["recipe=bf16,dsv3", "hydra.launcher.n_job=2", "hydra/launcher=joblib"], "n_job"),
        (["recipe=bf16,dsv3", "hydra.run.dir=x"], "the place for a run's files is run_dir=PATH"),
    ],
)
def test_what_no_run_could_start_with_is_one_line_before_any_starts(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "-m", *words, *TINY, f"run_dir={tmp_path}/sweep"]) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert said in line
    assert captured.out == ""
    assert not (tmp_path / "sweep").exists()


def test_under_torchrun_there_is_no_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"^-m starts its runs itself, each in one process: leave out torchrun"):
        multirun.multirun(["-m", "recipe=bf16,dsv3"])


def test_a_launcher_that_is_not_installed_is_one_line(tmp_path: Path) -> None:
    code = "import sys; sys.modules['hydra_plugins'] = None; from dsv3fp8.cli import main; sys.exit(main(sys.argv[1:]))"
    words = ["train", "-m", "recipe=bf16,dsv3", "hydra/launcher=submitit_slurm", f"run_dir={tmp_path}/sweep"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "hydra/launcher=submitit_slurm is not installed: `pip install 'dsv3fp8[sweep]'`" in line


def test_a_signal_is_passed_on_and_goes_no_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of the sweep is not started: launchers catch exceptions, but no exit."""

    def start(words: list[str], log: Path, environment: Any) -> subprocess.Popen[bytes]:
        script = f"trap 'echo saved > {tmp_path}/saved; exit 130' INT; echo > {tmp_path}/ready; while :; do sleep 0.05; done"
        return subprocess.Popen(["sh", "-c", script], start_new_session=True)

    def interrupt() -> None:
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(multirun, "start_training", start)
    monkeypatch.setattr(multirun.HydraConfig, "get", lambda: SimpleNamespace(job=SimpleNamespace(num=0)))
    threading.Thread(target=interrupt).start()
    with pytest.raises(SystemExit) as caught:
        multirun.run_job((Job("a", (), tmp_path / "a"),), DictConfig({}))
    assert caught.value.code == 130
    assert (tmp_path / "saved").exists()


LAUNCHERS: list[Any] = [
    pytest.param((), id="one after another"),
    pytest.param(("hydra/launcher=joblib", "hydra.launcher.n_jobs=2"), id="joblib"),
    pytest.param(("hydra/launcher=submitit_local",), id="submitit"),
]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_makes_runs_that_a_report_reads(launcher: tuple[str, ...], tmp_path: Path) -> None:
    sweep = tmp_path / "my sweep"
    words = ["-m", "recipe=bf16,dsv3", *launcher, *TINY, f"run_dir='{sweep}'"]
    code = "import sys; from dsv3fp8.cli import main; sys.exit(main(['train', *sys.argv[1:]]))"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"compare them with `dsv3fp8 compare report '{sweep}'`" in done.stdout
    runs = read_runs(find_runs([sweep]))
    assert [(run.recipe, run.state) for run in runs] == [("bf16", "complete"), ("dsv3", "complete")]
    assert [len(read_metrics(run.directory / "metrics.jsonl")) for run in runs] == [2, 2]
