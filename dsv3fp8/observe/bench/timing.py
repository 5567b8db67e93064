"""Times calls on one device: CUDA events around replays of a CUDA graph, rounds of all ways interleaved, medians of rounds.

Back to back: a hot chip throttles, so that ways compare within a run and not between runs. Where a call cannot be captured,
it is launched from the host between the events, and the timing says that host time is included.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from dsv3fp8.errors import UserError
from dsv3fp8.observe.bench.rates import Call, Case, Timing, Way

MOST_CALLS = 64  # in one sample
HOST_SAMPLE_MS = 100.0  # of calls that the host launches: a sample's first launches find the chip idle


@dataclass(frozen=True)
class Clock:
    """rounds: samples a way. sample_ms: about how long one sample runs; a call that takes longer is run once."""

    device: torch.device
    rounds: int = 5
    sample_ms: float = 6.0

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def sets(self, size: int) -> int:
        """Sets of buffers to rotate through, so that what one call reads is out of the L2 cache before it is read again."""
        if not self.cuda:
            return 1
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size
        return 1 if size > 3 * cache else min(8, -(-3 * cache // max(size, 1)))


def race(ways: Sequence[Way], clock: Clock) -> dict[str, Timing]:
    """Every way's timing. One that fails says why in one line and leaves the others alone."""
    timings = {way.name: Timing() for way in ways}
    samplers: dict[str, Callable[[], float]] = {}
    for way in ways:
        with _guarded(timings[way.name]):
            samplers[way.name] = _sampler(way, clock, timings[way.name])
    for _ in range(clock.rounds):
        for name, sample in samplers.items():
            if not timings[name].failed:
                with _guarded(timings[name]):
                    timings[name].samples.append(sample())
    return timings


def run_case(case: Case, clock: Clock) -> tuple[list[Way], dict[str, Timing], str]:
    """The case's ways, their timings, and why there are none if its operands could not be built."""
    try:
        ways = case.build()
    except Exception as error:
        return [], {}, one_line(error)
    timings = race(ways, clock)
    return ways, timings, ""


def release(clock: Clock) -> None:
    """Give back what the last case's operands and graphs held."""
    if clock.cuda:
        torch.cuda.synchronize(clock.device)
        torch.cuda.empty_cache()


def one_line(error: BaseException) -> str:
    """The error as one short line, whose kind only a bug's reader wants to know."""
    said = " ".join(str(error).split())
    return said if isinstance(error, UserError) else f"{type(error).__name__}: {said}"[:240]


@contextlib.contextmanager
def _guarded(timing: Timing) -> Iterator[None]:
    # Whatever a library refuses, one row lacks its number, and the run goes on.
    try:
        yield
    except Exception as error:
        timing.failed = one_line(error)


def _sampler(way: Way, clock: Clock, timing: Timing) -> Callable[[], float]:
    calls = list(way.make())
    for call in calls:  # compiles, allocates, makes handles
        call()
    if not clock.cuda:
        return lambda: _host_ms(calls)
    each = event_ms(lambda: [call() for call in calls]) / len(calls)
    timing.host = "" if way.graph or way.replays else "launched by the host"
    if way.graph:
        timing.host = _synchronizes(calls[0])
    count = _calls_in_a_sample(each, clock.sample_ms, len(calls))
    if way.graph and not timing.host:
        try:
            graph = _captured(calls, count)
        except Exception as error:
            timing.host = f"not captured: {one_line(error)}"
            torch.cuda.synchronize(clock.device)
        else:
            return partial(_replayed_ms, graph, calls, count)
    # The host may run ahead of the chip, once it has started: what counts is the slower of the two.
    several = _calls_in_a_sample(each, HOST_SAMPLE_MS, len(calls))
    return lambda: event_ms(lambda: [calls[i % len(calls)]() for i in range(several)]) / several


def _calls_in_a_sample(each_ms: float, sample_ms: float, sets: int) -> int:
    """About sample_ms of calls, a whole number of rotations where there are several."""
    count = min(MOST_CALLS, max(1, round(sample_ms / max(each_ms, 1e-3))))
    return max(1, round(count / sets)) * sets


def _synchronizes(call: Call) -> str:
    """Why a call cannot be captured: it waits for the device. "" if it does not."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return "the call waits for the device"
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return ""


def _captured(calls: Sequence[Call], count: int) -> torch.cuda.CUDAGraph:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            calls[i % len(calls)]()
    return graph


def _replayed_ms(graph: torch.cuda.CUDAGraph, calls: Sequence[Call], count: int) -> float:
    """One of the `count` calls in the graph. calls: they hold the operands, of which a graph has the addresses alone."""
    graph.replay()  # clocks and caches as they are when the same work goes on
    return event_ms(graph.replay) / count


def event_ms(call: Call) -> float:
    """Milliseconds between CUDA events around a call."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _host_ms(calls: Sequence[Call]) -> float:
    started = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - started) * 1e3 / len(calls)
