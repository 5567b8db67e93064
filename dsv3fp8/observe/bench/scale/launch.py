"""Processes of this machine, one a GPU, that are gone when their time is up or one of them has failed."""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch

from dsv3fp8.observe.bench.timing import one_line

Report = Callable[[str, Any], None]
"""Tells the parent something under a key, as soon as it is known."""
DONE, FAILED = "done", "failed"
LOADED = ["dsv3fp8.observe.bench.scale.rank"]
"""What the process has loaded that ranks are forked from: torch, and all that trains."""


@dataclass
class Outcome:
    """found: what each rank has told, rank by rank, as far as it came. failed: why not all of it is there, else ""."""

    found: list[dict[str, Any]] = field(default_factory=list)
    failed: str = ""

    def all_told(self, key: str) -> list[Any] | None:
        """What every rank has said under the key, or None where one has not."""
        return [each[key] for each in self.found] if self.found and all(key in each for each in self.found) else None


def on_ranks(count: int, limit: float, function: Callable[..., None], *arguments: Any) -> Outcome:
    """Runs function(report, *arguments) on so many ranks for `limit` seconds at most, with torchrun's environment.

    Processes are forked from one that has loaded torch and has touched no GPU, so that they begin at once.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    outcome, port = Outcome([{} for _ in range(count)]), _free_port()
    pipes: list[Connection] = []
    processes: list[ForkServerProcess] = []
    deadline, patience = time.monotonic() + limit, 0
    try:
        for index in range(count):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(theirs, index, count, port, function, arguments), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        outcome.failed = _listen(pipes, processes, outcome, deadline, limit)
        patience = 0 if outcome.failed else 5  # those that are done are on their way out
    finally:
        for process in processes:
            process.join(patience)
            process.kill()
            process.join()
    return outcome


def _listen(
    pipes: list[Connection], processes: list[ForkServerProcess], outcome: Outcome, deadline: float, limit: float
) -> str:
    """Until all are done: why not, or ""."""
    open_pipes = {pipe: index for index, pipe in enumerate(pipes)}
    while open_pipes:
        ready = wait(list(open_pipes), max(0.0, deadline - time.monotonic()))
        if not ready:
            return f"not done within {limit:.0f} s"
        for pipe in ready:
            assert isinstance(pipe, Connection)
            index = open_pipes[pipe]
            try:
                key, value = pipe.recv()
            except EOFError:
                processes[index].join(5)
                return f"rank {index} died (exit code {processes[index].exitcode})"
            if key == FAILED:
                return str(value)
            if key == DONE:
                del open_pipes[pipe]
            else:
                outcome.found[index][key] = value
    return ""


def _run(pipe: Connection, index: int, count: int, port: int, function: Callable[..., None], given: tuple[Any, ...]) -> None:
    os.environ |= {
        "RANK": str(index), "LOCAL_RANK": str(index), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    threading.Thread(target=_leave_with_the_parent, daemon=True).start()
    torch.set_num_threads(1)  # as torchrun has it
    try:
        function(lambda key, value: pipe.send((key, value)), *given)
        pipe.send((DONE, None))
    except Exception as error:  # one row lacks its figures, and the others go on
        pipe.send((FAILED, one_line(error)))


def _leave_with_the_parent() -> None:
    """However it ended: nobody would end a rank that waits for another one on a GPU."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
