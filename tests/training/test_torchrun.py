"""Whole runs on two ranks, as torchrun starts them."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dsv3fp8.training.checkpoint_directory import list_checkpoints
from dsv3fp8.training.loop import train

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]


def start(words: list[str], *options: str) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*TORCHRUN, *options, "-m", "dsv3fp8", "train", *words]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen, timeout: float = 120) -> tuple[str, list[str]]:
    """(standard output, what the run itself said on the other one)."""
    try:
        output, errors = process.communicate(timeout=timeout)
    finally:
        process.kill()
    own = [line for line in errors.splitlines() if line.startswith(("dsv3fp8:", "SIG", "Traceback", "terminate"))]
    if process.returncode:
        own.remove("Traceback (most recent call last):")  # torchrun's own, of the rank that failed
    return output, own


def close(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert a.keys() == b.keys()
        assert [each for each in a.values() if each is not None] == pytest.approx(
            [each for each in b.values() if each is not None], rel=1e-4
        )


def test_two_ranks_train_the_curve_of_one(nano: Any, data_words: list[str], tmp_path: Path, curve: Any) -> None:
    """The same sequences in every step: half of them on each rank."""
    words = ["recipe=fp32", "data.isolate_documents=true", "training.accumulate=2"]
    one = nano(*words, "training.batch=4", "training.validation_batches=1", run="one")
    assert train(one) == 0
    two = [*data_words, *words, "parallel.dp_replicate=2", "training.validation_batches=1", f"run_dir={tmp_path}/two"]
    process = start(two)
    output, errors = finish(process)
    assert process.returncode == 0, errors
    assert not errors
    assert output.count("data: ") == 1  # rank 0 alone speaks
    assert ", 2 processes" in output
    assert "10 steps of 2 × 2 × 2 sequences" in output
    close(curve(tmp_path / "two"), curve(one.run_dir))


def pids(parent: int) -> list[int]:
    """The ranks that torchrun has started, in their order."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True, check=True)
    return sorted(int(word) for word in listed.stdout.split())


def wait_for_lines(process: subprocess.Popen, metrics: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= count):
        assert time.monotonic() < deadline, "the run makes no progress"
        assert process.poll() is None
        time.sleep(0.005)


def test_a_signal_to_one_rank_stops_all_after_the_same_step(data_words: list[str], tmp_path: Path) -> None:
    """K08, and the run goes on from there."""
    words = [*data_words, "recipe=bf16", "parallel.dp_replicate=2", "training.checkpoint_every=0", f"run_dir={tmp_path}/run"]
    process, metrics = start([*words, "training.steps=100000"]), tmp_path / "run" / "metrics.jsonl"
    wait_for_lines(process, metrics, 4)
    ranks = pids(process.pid)
    os.kill(ranks[-1], signal.SIGTERM)
    output, errors = finish(process)
    assert process.returncode != 0
    ((step, _),) = list_checkpoints(tmp_path / "run" / "checkpoints")
    assert f"SIGTERM: saved after step {step}; run again to go on from there" in output
    assert step == metrics.read_text().count("\n")
    assert not errors

    process = start([*words, f"training.steps={step + 2}", "resume=fork"])
    output, errors = finish(process)
    assert process.returncode == 0, errors
    assert f"going on after step {step}, from" in output


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["parallel.dp_replicate=3"], "parallel.dp_replicate=3 with 2 processes: set it to 2"),
        (["parallel.dp_replicate=2", "run_dir=/proc/nowhere"], "run_dir=/proc/nowhere cannot be written"),
        (["parallel.dp_replicate=2", "training.context=2000"], "training.context=2000 is longer than model.context"),
    ],
    ids=["layout", "one rank alone finds it", "every rank finds it"],
)
def test_what_is_wrong_is_one_line(data_words: list[str], tmp_path: Path, words: list[str], line: str) -> None:
    process = start([*data_words, f"run_dir={tmp_path}/run", *words])
    _, errors = finish(process)
    assert process.returncode != 0
    assert len(errors) == 1
    assert re.search(re.escape(line), errors[0]), errors


def test_kill_9_of_any_rank_leaves_the_curve_of_an_undisturbed_run(data_words: list[str], tmp_path: Path, curve: Any) -> None:
    """torchrun starts all again, and they go on from the newest checkpoint: every number is that of the run nobody killed."""
    words = [*data_words, "recipe=dsv3", "parallel.dp_replicate=2", "parallel.expert=2", "training.steps=60"]
    words.append("training.checkpoint_every=4")
    whole = start([*words, f"run_dir={tmp_path}/whole"])
    assert not finish(whole)[1]
    process, metrics = start([*words, f"run_dir={tmp_path}/killed"], "--max-restarts=2"), tmp_path / "killed" / "metrics.jsonl"
    moments = random.Random(3)
    for rank, at_least in ((1, moments.randint(5, 15)), (0, moments.randint(25, 45))):
        wait_for_lines(process, metrics, at_least)
        os.kill(pids(process.pid)[rank], signal.SIGKILL)
    _, errors = finish(process)
    assert process.returncode == 0, errors
    assert len(errors) == 2
    assert all("another rank has stopped, so this one stops too" in line for line in errors)
    assert curve(tmp_path / "killed") == curve(tmp_path / "whole")
