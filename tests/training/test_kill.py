"""Runs in processes of their own, killed at random moments."""

import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dsv3fp8.training.checkpoint_directory import list_checkpoints
from dsv3fp8.training.loop import train

TRAIN = [sys.executable, "-m", "dsv3fp8", "train"]
WORDS = ("recipe=bf16", "training.steps=60", "training.checkpoint_every=7", "training.validate_every=10")


def start(words: list[str]) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*TRAIN, *words], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_lines(process: subprocess.Popen, path: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while lines(path) < count and process.poll() is None:
        assert time.monotonic() < deadline, "the run makes no progress"
        time.sleep(0.002)


def test_kill_9_at_random_moments_leaves_the_curve_of_an_uninterrupted_run(
    nano: Any, data_words: list[str], tmp_path: Path, curve: Any
) -> None:
    """O02, W01: no step lost, none twice, every number bit for bit that of the run nobody killed."""
    whole = nano(*WORDS, run="whole")
    assert train(whole) == 0
    words = [*data_words, *WORDS, f"run_dir={tmp_path}/killed"]
    metrics = tmp_path / "killed" / "metrics.jsonl"
    moments = random.Random(7)
    for at_least in (moments.randint(2, 12), moments.randint(18, 40)):
        process = start(words)
        wait_for_lines(process, metrics, at_least)
        time.sleep(moments.random() * 0.05)
        process.kill()
        process.wait()
    assert 0 < lines(metrics) < 60, "the last kill came too late to show anything"
    process = start(words)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert curve(tmp_path / "killed") == curve(whole.run_dir)


def test_a_signal_to_the_whole_group_is_a_checkpoint_and_143(data_words: list[str], tmp_path: Path) -> None:
    """K08: as a batch system sends it, with workers at work."""
    words = [*data_words, *WORDS, "training.steps=100000", "data.workers=2", f"run_dir={tmp_path}/run"]
    process = subprocess.Popen(
        [*TRAIN, *words], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    wait_for_lines(process, tmp_path / "run" / "metrics.jsonl", 3)
    os.killpg(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143
    assert errors.strip() == "SIGTERM: saving after this step; once more to stop at once"
    ((step, _), *_) = reversed(list_checkpoints(tmp_path / "run" / "checkpoints"))
    assert step == lines(tmp_path / "run" / "metrics.jsonl")


TWICE = """
import os, signal, time
from dsv3fp8.training.signals import StopRequest
with StopRequest() as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.heard() and stop.signal is signal.SIGTERM and stop.exit_code == 143
    print("still here", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(20)
"""


def test_a_second_signal_stops_at_once() -> None:
    """K08."""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGTERM
    assert done.stdout == "still here\n"
    assert time.monotonic() - began < 15


def test_a_file_size_limit_is_one_line_before_any_step(data_words: list[str], tmp_path: Path) -> None:
    """K10: `ulimit -f` below the size of a checkpoint; its unit is 512 or 1024 bytes, as the shell pleases."""
    words = [*data_words, f"run_dir={tmp_path}/run"]
    command = f"ulimit -f 200; exec {shlex.join([*TRAIN, *words])}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "(ulimit -f), but a checkpoint needs" in line
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
