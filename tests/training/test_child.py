"""Training in a process of its own: what it is told, what it says, and that it goes with its parent."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dsv3fp8.errors import UserError
from dsv3fp8.training.checkpoint_directory import list_checkpoints
from dsv3fp8.training.child import last_error, start_training, wait_until_free
from dsv3fp8.training.run_directory import RunDirectory

PARENT = """
import sys, time
from pathlib import Path
from dsv3fp8.training.child import start_training
log, *words = sys.argv[1:]
print(start_training(words, Path(log), {"OMP_NUM_THREADS": "1"}).pid, flush=True)
time.sleep(120)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells a process of its parent's death")
def test_a_run_whose_parent_is_killed_saves_and_stops(data_words: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [*data_words, "recipe=bf16", "training.steps=100000", f"run_dir={run}"]
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(run / "train.log"), *words], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    deadline = time.monotonic() + 60
    while not (run / "metrics.jsonl").exists() or (run / "metrics.jsonl").read_bytes().count(b"\n") < 3:
        assert time.monotonic() < deadline, (run / "train.log").read_text()
        time.sleep(0.01)
    assert os.getsid(child) == child, "Ctrl-C would reach it"
    parent.kill()
    parent.wait()
    said: list[str] = []
    wait_until_free(run, said.append, seconds=60)
    ((step, _),) = list_checkpoints(run / "checkpoints")[-1:]
    assert step == (run / "metrics.jsonl").read_bytes().count(b"\n")
    assert "SIGTERM: saved after step" in (run / "train.log").read_text()


def test_what_ended_a_run_is_the_last_process_s_own_error(tmp_path: Path) -> None:
    log = tmp_path / "run" / "train.log"
    assert last_error(log) is None
    log.parent.mkdir()
    log.write_text("--- started: train x\ndsv3fp8: error: the disk was full\n")
    assert start_training(["recipe=none", f"run_dir={tmp_path}/run"], log, {}).wait(60) == 2
    text = log.read_text()
    assert text.count("--- started: train ") == 2
    told = last_error(log)
    assert told is not None
    assert told.startswith("recipe=none: no such recipe;")
    log.write_text(f"{text}--- started: train x\nTraceback\nRuntimeError: odd\n\n")
    assert last_error(log) == "RuntimeError: odd"


def test_a_run_directory_in_use_is_waited_for(tmp_path: Path) -> None:
    """The lock belongs to a process, so that another one has to hold it."""
    holding = "import sys, time; from pathlib import Path; from dsv3fp8.training.run_directory import RunDirectory\n"
    holding += "with RunDirectory(Path(sys.argv[1])): print(1, flush=True); sys.stdin.read()"
    holder = subprocess.Popen([sys.executable, "-c", holding, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdin is not None
    holder.stdout.readline()
    said: list[str] = []
    with pytest.raises(UserError, match=f"in use by process {holder.pid} on .*: end it, or wait for it"):
        wait_until_free(tmp_path, said.append, seconds=0.3)
    threading.Timer(0.3, holder.stdin.close).start()
    wait_until_free(tmp_path, said.append, seconds=60)
    assert said[-1].endswith("waiting for it to save and stop")
    assert holder.wait(60) == 0
    with RunDirectory(tmp_path):
        pass
