"""Ranks that die, freeze or fail: the others end soon, with one line, whatever they are waiting for."""

import functools
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Command

from dsv3fp8.parallel import ranks as ranks_module
from dsv3fp8.training import loop

# What docs/many_gpus.md promises of a killed process: a second to find it, one to tell, five for the main thread to come back,
# and some for a machine that has more to do.
STATED = 10
STOPPED = r"dsv3fp8: error: rank {} \(process \d+ on .*\) has stopped, so the others stop too; start again to go on"


@pytest.fixture
def command(data_words: list[str], tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """command(count, "key=value", …): a run of so many ranks, which does not end by itself."""
    started: list[Command] = []

    def start(count: int, *words: str, run: str = "run", **options: Any) -> Command:
        every = [
            "train",
            *data_words,
            f"parallel.dp_replicate={count}",
            "training.steps=100000",
            f"run_dir={tmp_path}/{run}",
            *words,
        ]
        started.append(Command([every] * count, tmp_path / f"said-{run}", **options))
        return started[-1]

    yield start
    for each in started:
        each.end()


def until(reached: Callable[[], bool], patience: float = 60) -> None:
    deadline = time.monotonic() + patience
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def until_steps(run: Command, tmp_path: Path, count: int, name: str = "run") -> None:
    metrics = tmp_path / name / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= count)


def the_others_end(run: Command, victim: int, within: float) -> None:
    began = time.monotonic()
    codes = run.wait(60)
    assert time.monotonic() - began < within
    assert codes == [-signal.SIGKILL if rank == victim else 1 for rank in range(len(codes))]
    (line,) = run.said()
    assert re.match(STOPPED.format(victim), line)


def test_all_end_soon_after_one_of_them_was_killed(command: Any, tmp_path: Path) -> None:
    """On four ranks, and with no signal of torchrun's to help: another host would send none."""
    run = command(4, "parallel.expert=2")
    until_steps(run, tmp_path, 3)
    run.signal(2, signal.SIGKILL)
    the_others_end(run, 2, STATED)


def test_the_signal_of_torchrun_takes_the_line_from_nobody(command: Any, tmp_path: Path) -> None:
    """It comes while the survivor finds out what has happened; it is nobody's wish to stop and save."""
    run = command(2)
    until_steps(run, tmp_path, 3)
    run.signal(0, signal.SIGKILL)
    run.signal(1, signal.SIGTERM)
    the_others_end(run, 0, STATED)


def half_a_broadcast(index: int) -> None:
    """In the place of a run: rank 0 sends more than sockets hold, to a rank 1 that does not read on."""

    def run_steps(self: loop.Loop) -> int:
        ranks = self.run.ranks
        ranks.wait()
        if ranks.index == 1:
            threading_stop()
        dist.broadcast(torch.ones(64 << 20), src=0)
        return 0

    loop.Loop.run_steps = run_steps  # type: ignore[method-assign]


def threading_stop() -> None:
    """Freezes this process in the middle of what its other threads read."""
    import threading

    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGSTOP)).start()


def test_a_send_that_gloo_would_wait_for_without_end_is_ended(command: Any, tmp_path: Path) -> None:
    """gloo tells a half-written send nothing of the reader's end: it would wait for two hours, torchrun for thirty seconds."""
    run = command(2, first=half_a_broadcast)
    until(lambda: is_stopped(run, 1))
    time.sleep(0.3)
    run.signal(1, signal.SIGKILL)
    the_others_end(run, 1, STATED)


def is_stopped(run: Command, rank: int) -> bool:
    stat = Path(f"/proc/{run.processes[rank].pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "T"


def short_silence(index: int) -> None:
    """Often looked for as well: the first sign of life is waited for longer, and steps are short."""
    ranks_module.Watch = functools.partial(ranks_module.Watch, silence=4.0, beat=0.05)  # type: ignore[misc, assignment]


def test_all_end_after_one_of_them_froze(command: Any, tmp_path: Path) -> None:
    """The limit of a minute, made one of four seconds."""
    run = command(2, first=short_silence)
    until_steps(run, tmp_path, 3)
    run.signal(1, signal.SIGSTOP)
    began = time.monotonic()
    until(lambda: not run.processes[0].is_alive(), 30)
    assert time.monotonic() - began > 2
    assert run.wait(0) == [1, None]
    (line,) = run.said()
    assert "rank 1 has given no sign of life for 4 s, so the others stop too" in line


def die_in_the_start(index: int) -> None:
    """Rank 1 meets the others and is killed before they have made their groups."""
    if index == 1:
        dist.init_process_group = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]


def test_a_rank_that_is_killed_in_the_start_is_not_waited_for(command: Any) -> None:
    run = command(2, first=die_in_the_start)
    the_others_end(run, 1, 40)


def fail_with_a_bug(index: int) -> None:
    """After the second step rank 1 divides by zero."""
    real = loop.Loop._step

    def step(self: loop.Loop) -> dict[str, Any]:
        if index == 1 and self.state.step == 2:
            raise ZeroDivisionError("a bug")
        return real(self)

    loop.Loop._step = step  # type: ignore[method-assign]


def test_a_bug_on_one_rank_keeps_its_traceback_and_ends_all(command: Any) -> None:
    run = command(2, first=fail_with_a_bug)
    assert run.wait(60) == [1, 1]
    assert "ZeroDivisionError: a bug" in run.output(1)
    assert [line for line in run.said() if not line.startswith("Traceback")] == [
        line for line in run.output(0).splitlines() if re.match(STOPPED.format(1), line)
    ]
