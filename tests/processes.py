"""Functions on several ranks of this machine, in processes that are gone when the test is over."""

import multiprocessing
import os
import re
import signal
import socket
import time
import traceback
from collections.abc import Callable
from functools import lru_cache
from multiprocessing.connection import Connection, wait
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from dsv3fp8.cli import main
from dsv3fp8.parallel.ranks import Ranks, join

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["preloaded"])


@lru_cache
def _serve_forks() -> None:
    """Start the process that ranks are forked from; its environment is all that tells it where `preloaded` lies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        ensure_running()


def on_ranks(
    count: int,
    function: Callable[..., Any],
    *arguments: Any,
    expert: int = 1,
    shard: int = 1,
    device: str = "cpu",
    timeout: float = 120,
) -> list[Any]:
    """What function(ranks, *arguments) returns on each of so many ranks, rank by rank. AssertionError if one fails or hangs.

    device: "cuda" gives each rank a GPU and NCCL.
    """
    _serve_forks()
    port, pipes, processes = _free_port(), [], []
    for index in range(count):
        ours, theirs = CONTEXT.Pipe()
        layout = expert, shard
        process = CONTEXT.Process(
            target=_run, args=(theirs, index, count, port, layout, device, function, arguments), daemon=True
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return _results(pipes, timeout)
    finally:
        for process in processes:
            process.join(5)
            process.kill()


def _results(pipes: list[Connection], timeout: float) -> list[Any]:
    """The first to fail is told of: the others fail after it, because it is gone."""
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        open_pipes = [pipe for i, pipe in enumerate(pipes) if i not in results]
        ready = wait(open_pipes, timeout)
        assert ready, f"ranks {[i for i in range(len(pipes)) if i not in results]} hang"
        for pipe in ready:
            index = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                good, results[index] = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                good, results[index] = False, "it died without a word"
            assert good, f"rank {index}: {results[index]}"
    return [results[index] for index in range(len(pipes))]


def _run(
    pipe: Connection, index: int, count: int, port: int, layout: tuple[int, int], device: str, function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:  # fmt: skip
    _become(index, count, port)
    try:
        with join(torch.device(device, index) if device == "cuda" else torch.device(device), *layout) as ranks:
            pipe.send((True, _portable(function(ranks, *arguments))))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def _portable(value: Any) -> Any:
    """Tensors by value: shared memory would go with the process."""
    if isinstance(value, torch.Tensor):
        return value.numpy(force=True).copy() if value.dtype != torch.bfloat16 else value.float().numpy(force=True).copy()
    if isinstance(value, dict):
        return {key: _portable(each) for key, each in value.items()}
    return type(value)(map(_portable, value)) if type(value) in (list, tuple) else value


class Command:
    """`dsv3fp8` on so many ranks, started as torchrun starts it: the store where they meet is no rank's own."""

    def __init__(self, words: list[list[str]], folder: Path, first: Callable[[int], None] | None = None) -> None:
        """words: of each rank. What rank 0 writes goes to folder/rank-0.txt, and so on. first: called there before all else."""
        _serve_forks()
        self._store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        folder.mkdir(parents=True, exist_ok=True)
        self._files = [folder / f"rank-{index}.txt" for index in range(len(words))]
        self.processes = [
            CONTEXT.Process(target=_command, args=(index, len(words), self._store.port, each, file, first), daemon=True)
            for index, (each, file) in enumerate(zip(words, self._files, strict=True))
        ]
        for process in self.processes:
            process.start()

    def signal(self, rank: int, number: signal.Signals) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def wait(self, timeout: float = 120) -> list[int | None]:
        """Exit statuses by rank, -9 for one that was killed; None for what has not ended by then, and is killed now."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        self.end()
        return codes

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def output(self, rank: int) -> str:
        return self._files[rank].read_text()

    def said(self) -> list[str]:
        """The errors of all ranks, tracebacks and what threads of C++ say at their end among them."""
        words = re.compile(r"dsv3fp8: error:|Traceback|terminate|Fatal Python|.*No backend of type")
        lines = [line for rank in range(len(self._files)) for line in self.output(rank).splitlines()]
        return [line for line in lines if words.match(line)]


def _command(index: int, count: int, port: int, words: list[str], file: Path, first: Callable[[int], None] | None) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    _become(index, count, port)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    if first is not None:
        first(index)
    os._exit(main(words))


def _become(index: int, count: int, port: int) -> None:
    """What torchrun tells a rank of this machine."""
    os.environ |= {
        "RANK": str(index), "LOCAL_RANK": str(index), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


__all__ = ["Command", "Ranks", "on_ranks"]
