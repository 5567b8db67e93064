"""Ranks under torchrun, killed at random moments; the curve has to be that of a run nobody disturbed.

    PYTHONPATH=.:tests:tests/training python tests/training/kill_ranks.py --ranks 4 --kills 10 --seed 0 recipe=dsv3 …

trains a nano model (or what the settings make of it) twice, the second time with so many ranks killed, and says whether
metrics.jsonl holds the same bits but for what hangs on the clock. It takes GPUs where there are any. --moments freeze stops a
rank (SIGSTOP) in place of killing it. tests/training/test_torchrun.py does a few kills.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from dsv3fp8.training.checkpoint_directory import NAME
from dsv3fp8.training.metrics import TIMING_FIELDS, read_metrics

PATIENCE = 180.0


class TorchRun:
    """One torchrun with its ranks."""

    def __init__(self, words: list[str], *options: str, ranks: int = 2) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone", *options]
        self.process = subprocess.Popen(
            [*command, "-m", "dsv3fp8", "train", *words],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        directory = Path(next(word for word in words if word.startswith("run_dir=")).partition("=")[2])
        self.metrics, self.checkpoints = directory / "metrics.jsonl", directory / "checkpoints"

    def pids(self) -> list[int]:
        """The ranks, in their order."""
        return sorted(child.pid for child in psutil.Process(self.process.pid).children())

    def until(self, reached: Callable[[], bool], every: float = 0.002) -> None:
        """Looks every few milliseconds. AssertionError if the run ends before, or nothing comes of it."""
        deadline = time.monotonic() + PATIENCE
        while not reached():
            assert time.monotonic() < deadline, "the run makes no progress"
            assert self.process.poll() is None, f"the run has ended before: {self.process.communicate()}"
            time.sleep(every)

    def lines(self) -> int:
        """Steps recorded so far."""
        return self.metrics.read_bytes().count(b"\n") if self.metrics.exists() else 0

    def file(self) -> int:
        """Which file metrics.jsonl is: a start writes another one."""
        return self.metrics.stat().st_ino if self.metrics.exists() else 0

    def until_lines(self, count: int) -> None:
        self.until(lambda: self.lines() >= count)

    def until_all_are_new(self, old: set[int], ranks: int) -> None:
        """torchrun has started all again."""
        self.until(lambda: len(set(self.pids()) - old) == ranks, every=0.05)

    def kill(self, rank: int) -> None:
        os.kill(self.pids()[rank], signal.SIGKILL)

    def kill_in_a_checkpoint(self, rank: int) -> None:
        """Stopped when one has begun, and killed if it is not done by then."""
        pid = self.pids()[rank]
        while True:
            self.until(self._saving)
            os.kill(pid, signal.SIGSTOP)
            if self._saving():
                os.kill(pid, signal.SIGKILL)
                return
            os.kill(pid, signal.SIGCONT)

    def _saving(self) -> bool:
        return self.checkpoints.is_dir() and any(not NAME.fullmatch(path.name) for path in self.checkpoints.iterdir())

    def finish(self, timeout: float = PATIENCE) -> tuple[str, list[str]]:
        """(standard output, what the run itself said on the other one)."""
        try:
            output, errors = self.process.communicate(timeout=timeout)
        finally:
            self.process.kill()
        own = [line for line in errors.splitlines() if re.match("dsv3fp8:|SIG|Traceback|terminate|Fatal Python", line)]
        if self.process.returncode:
            own.remove("Traceback (most recent call last):")  # torchrun's own, of the rank that failed
        return output, own


MOMENTS = ("start", "steps", "steps", "checkpoint")


def kill_at_random(run: TorchRun, ranks: int, moments: list[str], draw: random.Random) -> list[str]:
    """One kill a moment: in the start, some steps after it, or in a checkpoint. What was killed, and how soon all were gone."""
    old, file, log = set[int](), 0, []
    for number, moment in enumerate(moments, 1):
        run.until_all_are_new(old, ranks)
        old = set(run.pids())
        rank, share = draw.randrange(ranks), draw.random()
        if moment == "start":
            time.sleep(3 * share)
        else:
            run.until(lambda was=file: run.file() not in (0, was))  # opened anew, without what is to be made again
            run.until_lines(run.lines() + 1 + int(10 * share))
            time.sleep(share / 10)
        file = run.file()
        if moment == "checkpoint":
            run.kill_in_a_checkpoint(rank)
        elif moment == "freeze":
            os.kill(run.pids()[rank], signal.SIGSTOP)
        else:
            run.kill(rank)
        began, lines = time.monotonic(), run.lines()
        run.until(lambda now=old: not set(run.pids()) & now, every=0.05)
        log.append(f"{number}: rank {rank}, {moment}, after {lines} lines; all gone after {time.monotonic() - began:.1f} s")
    return log


def curve(metrics: Path) -> list[dict[str, object]]:
    """The metrics without those that hang on the clock."""
    records = read_metrics(metrics)
    return [{name: value for name, value in record.items() if name not in TIMING_FIELDS} for record in records]


def main() -> int:
    from conftest import NANO

    parser = argparse.ArgumentParser()
    for name, given in (("ranks", 2), ("kills", 10), ("seed", 0), ("steps", 400)):
        parser.add_argument(f"--{name}", type=int, default=given)
    parser.add_argument("--moments", default=",".join(MOMENTS), help="of start, steps, checkpoint and freeze; drawn from these")
    options, words = parser.parse_known_args()
    folder = Path(tempfile.mkdtemp(prefix="kill-ranks-"))
    for file in range(8):
        (folder / f"{file}.txt").write_text("".join(f"line {line * file % 97} of file {file}\n" for line in range(400)))
    words = [
        *NANO, f"data.paths={folder}/*.txt", f"data.cache_dir={folder}/cache", f"training.steps={options.steps}",
        "training.checkpoint_every=4", f"parallel.dp_replicate={options.ranks}", *words,
    ]  # fmt: skip
    whole = TorchRun([*words, f"run_dir={folder}/whole"], ranks=options.ranks)
    print(whole.finish(3600)[0].splitlines()[-3:])
    killed = TorchRun([*words, f"run_dir={folder}/killed"], f"--max-restarts={options.kills}", ranks=options.ranks)
    draw = random.Random(options.seed)
    moments = [draw.choice(options.moments.split(",")) for _ in range(options.kills)]
    print("\n".join(kill_at_random(killed, options.ranks, moments, draw)), flush=True)
    _, said = killed.finish(3600)
    print("\n".join(said))
    same = killed.process.returncode == 0 and curve(killed.metrics) == curve(whole.metrics)
    steps = killed.lines()
    print(f"{options.ranks} ranks, {options.kills} kills, {steps} steps: {'same bits' if same else 'NOT THE SAME'} ({folder})")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
