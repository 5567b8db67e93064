"""scripts/slurm.sbatch with commands that play Slurm: two nodes are two torchruns of this machine."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import Command

ROOT = Path(__file__).parents[2]

# Starts the command once a node, passes signals on, and ends with the largest status, as srun does.
SRUN = """#!/usr/bin/env bash
while [ "${1#--}" != "$1" ]; do shift; done
tasks=()
for node in $(seq 0 $((SLURM_NNODES - 1))); do SLURM_NODEID=$node "$@" & tasks+=($!); done
trap 'kill -USR1 "${tasks[@]}"; again=yes' USR1
worst=0
for task in "${tasks[@]}"; do
    again=yes
    while [ -n "$again" ]; do again=; status=0; wait "$task" || status=$?; done
    [ "$status" -le "$worst" ] || worst=$status
done
exit "$worst"
"""
SCONTROL = """#!/usr/bin/env bash
echo "scontrol $*" >>"$CALLS"
[ "$1" != show ] || printf '127.0.0.1\\nelsewhere\\n'
"""


class Cluster:
    """Starts jobs; all processes of theirs are gone when the test is over."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls, self.jobs = folder, folder / "calls", list[subprocess.Popen[str]]()
        commands = folder / "bin"
        commands.mkdir()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (commands / name).write_text(text)
            (commands / name).chmod(0o755)
        self.environment = {
            **os.environ, "PATH": f"{commands}:{os.environ['PATH']}", "CALLS": str(self.calls), "PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RANKS_PER_NODE": "1", "SLURM_SUBMIT_DIR": str(ROOT),
            "SLURM_JOB_ID": str(os.getpid()), "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[0-1]",
        }  # fmt: skip

    def submit(self, *words: str, starts: int = 0) -> "subprocess.Popen[str]":
        """Of a copy of the script, as Slurm runs it."""
        copy = self.folder / "slurm_script"
        copy.write_text((ROOT / "scripts" / "slurm.sbatch").read_text())
        job = subprocess.Popen(
            ["bash", str(copy), *words], env={**self.environment, "SLURM_RESTART_COUNT": str(starts)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.jobs.append(job)
        return job

    def end(self) -> None:
        for job in self.jobs:
            if job.poll() is None:
                for process in [*psutil.Process(job.pid).children(recursive=True), psutil.Process(job.pid)]:
                    process.kill()
            job.wait()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.end()


def steps(run: Path) -> int:
    return (run / "metrics.jsonl").read_bytes().count(b"\n") if (run / "metrics.jsonl").exists() else 0


def until_steps(job: "subprocess.Popen[str]", run: Path, count: int) -> None:
    deadline = time.monotonic() + 120
    while steps(run) < count:
        assert time.monotonic() < deadline
        assert job.poll() is None, job.communicate()[0]
        time.sleep(0.01)


def ranks(job: "subprocess.Popen[str]") -> list[psutil.Process]:
    """All ranks of both nodes: who trains is not torchrun, and is started by one."""
    found = psutil.Process(job.pid).children(recursive=True)
    return [each for each in found if "train" in each.cmdline() and "torch.distributed.run" not in each.cmdline()]


def test_a_job_saves_before_its_time_is_up_and_goes_on_after_a_lost_rank(
    cluster: Cluster, data_words: list[str], tmp_path: Path, curve: Any
) -> None:
    words = [*data_words, "parallel.dp_replicate=2", "training.steps=60", "training.checkpoint_every=4"]
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert Command([["train", *words, f"run_dir={whole}"]] * 2, tmp_path / "said").wait() == [0, 0]

    job = cluster.submit(*words, f"run_dir={run}")
    until_steps(job, run, 5)
    job.send_signal(signal.SIGUSR1)
    output = job.communicate(timeout=120)[0]
    assert job.returncode not in (0, None), output
    saved = steps(run)
    assert saved < 60, "the signal came too late to show anything"
    assert f"SIGTERM: saved after step {saved}; run again to go on from there" in output
    assert f"scontrol requeue {os.getpid()}" in cluster.calls.read_text()
    cluster.calls.unlink()

    job = cluster.submit(*words, f"run_dir={run}", starts=1)
    until_steps(job, run, saved + 5)
    ranks(job)[1].kill()
    output = job.communicate(timeout=120)[0]
    assert job.returncode == 0, output
    assert f"going on after step {saved}, from" in output
    assert output.count("has stopped, so the others stop too") == 1
    assert "requeue" not in cluster.calls.read_text()
    assert curve(run) == curve(whole)


def test_a_job_that_cannot_work_ends_with_its_line_and_stays_out_of_the_queue(cluster: Cluster, data_words: list[str]) -> None:
    cluster.environment["MAX_RESTARTS"] = "0"
    job = cluster.submit(*data_words, "parallel.dp_replicate=3", f"run_dir={cluster.folder}/run")
    output = job.communicate(timeout=120)[0]
    assert job.returncode == 1
    assert output.count("make 3 ranks, not 2: set parallel.dp_replicate=2") == 1
    assert "requeue" not in cluster.calls.read_text()


def test_a_job_from_elsewhere_is_told_where_to_start(cluster: Cluster) -> None:
    cluster.environment["SLURM_SUBMIT_DIR"] = str(cluster.folder)
    job = cluster.submit()
    assert job.communicate(timeout=20)[0].endswith("is no checkout of dsv3fp8: run sbatch from the top of one\n")
    assert job.returncode == 2
