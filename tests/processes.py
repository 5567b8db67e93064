"""Functions on several ranks of this machine, in processes that are gone when the test is over."""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from dsv3fp8.parallel.ranks import Ranks, join

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["dsv3fp8.training.loop"])  # torch is loaded once


def on_ranks(
    count: int, function: Callable[..., Any], *arguments: Any, expert: int = 1, device: str = "cpu", timeout: float = 120
) -> list[Any]:
    """What function(ranks, *arguments) returns on each of so many ranks, rank by rank. AssertionError if one fails or hangs.

    device: "cuda" gives each rank a GPU and NCCL.
    """
    port, pipes, processes = _free_port(), [], []
    for index in range(count):
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(
            target=_run, args=(theirs, index, count, port, expert, device, function, arguments), daemon=True
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
    pipe: Connection, index: int, count: int, port: int, expert: int, device: str, function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:  # fmt: skip
    os.environ |= {
        "RANK": str(index), "LOCAL_RANK": str(index), "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(1)
    try:
        with join(torch.device(device, index) if device == "cuda" else torch.device(device), expert) as ranks:
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


__all__ = ["Ranks", "on_ranks"]
