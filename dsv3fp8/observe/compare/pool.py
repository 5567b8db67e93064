"""Runs the runs: one process each, as many at a time as there are places for them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from dsv3fp8.observe.compare.plan import PlannedRun, has_ended
from dsv3fp8.observe.compare.runs import read_records
from dsv3fp8.training.checks import select_device
from dsv3fp8.training.child import LOG, last_error, start_training, wait_until_free
from dsv3fp8.training.signals import StopRequest

POLL = 0.1  # seconds
PROGRESS_EVERY = 15.0  # seconds

Place = Mapping[str, str]
"""Environment variables that give a process its GPU, or its share of the cores."""


@dataclass
class _Running:
    run: PlannedRun
    place: Place
    process: subprocess.Popen[bytes]


def places_for(device: str, jobs: int | None) -> list[Place]:
    """Where runs can be at the same time. device: of training.device. On GPUs, one each unless `jobs` asks for more."""
    if select_device(device).type == "cuda":
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = [name for name in given.split(",") if name] if given else [str(i) for i in range(torch.cuda.device_count())]
        return [{"CUDA_VISIBLE_DEVICES": gpus[index % len(gpus)]} for index in range(jobs or len(gpus))]
    count = jobs or 1
    if count == 1 or "OMP_NUM_THREADS" in os.environ:
        return [{}] * count
    # Threads decide the order of sums, so the same command always gives the same number.
    return [{"OMP_NUM_THREADS": str(max(1, _cores() // count))}] * count


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_all(
    runs: Sequence[PlannedRun], places: Sequence[Place], keep_checkpoints: bool, say: Callable[[str], None]
) -> tuple[list[PlannedRun], signal.Signals | None]:
    """Make all runs that have not ended; (those that failed, the signal that stopped everything if one did).

    A run that fails is told of and the others go on. SIGINT and SIGTERM are passed on, once, and every run saves.
    """
    waiting = [run for run in runs if not has_ended(run)]
    done = len(runs) - len(waiting)
    if done:
        say(f"{done} of {len(runs)} runs are there already")
    free, running, failed = list(places), list[_Running](), list[PlannedRun]()
    stopped, told = False, time.monotonic()
    with StopRequest() as stop:
        try:
            while running or (waiting and not stopped):
                if stop.heard() and not stopped:
                    stopped = True
                    for each in running:
                        each.process.send_signal(stop.signal or signal.SIGTERM)
                while free and waiting and not stopped:
                    running.append(_start(waiting.pop(0), free.pop(0), say))
                for each in [each for each in running if each.process.poll() is not None]:
                    running.remove(each)
                    free.append(each.place)
                    if not _conclude(each, keep_checkpoints, stopped, say):
                        failed.append(each.run)
                if time.monotonic() - told >= PROGRESS_EVERY:
                    told = time.monotonic()
                    say("; ".join(_progress(each.run) for each in running))
                time.sleep(POLL)
        finally:
            for each in running:  # an error of ours: what still runs saves and stops
                each.process.terminate()
            for each in running:
                each.process.wait()
        return failed, stop.signal if stopped else None


def _start(run: PlannedRun, place: Place, say: Callable[[str], None]) -> _Running:
    wait_until_free(run.directory, say)
    where = f" on GPU {place['CUDA_VISIBLE_DEVICES']}" if "CUDA_VISIBLE_DEVICES" in place else ""
    say(f"{run.name}: starts{where}, in {run.directory}")
    return _Running(run, place, start_training(run.words, run.directory / LOG, place))


def _conclude(each: _Running, keep_checkpoints: bool, stopped: bool, say: Callable[[str], None]) -> bool:
    """Say how a process ended; False for a run that failed."""
    run, status = each.run, each.process.returncode
    if has_ended(run):
        say(f"{run.name}: {'done' if status == 0 else 'gave up'}; {_progress(run)}")
        if not keep_checkpoints:
            shutil.rmtree(run.directory / "checkpoints", ignore_errors=True)
        return True
    if stopped:
        say(f"{run.name}: stopped; {_progress(run)}")
        return True
    reason = last_error(run.directory / LOG) or "no word of why"
    ended = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    say(f"{run.name}: failed ({ended}): {reason}; see {run.directory / LOG}. The others go on")
    return False


def _progress(run: PlannedRun) -> str:
    records = read_records(run.directory / "metrics.jsonl")
    if not records:
        return f"{run.name}: no step yet"
    last = records[-1]
    return f"{run.name}: step {last['step']:,} of {run.config.training.steps:,}, loss {last['loss']:.4f}"
