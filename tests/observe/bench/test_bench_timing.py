"""The clock on a GPU that is played: what is captured, what falls back to the host, and how samples become milliseconds."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import pytest
import torch

from dsv3fp8.observe.bench import timing
from dsv3fp8.observe.bench.rates import Call, Timing, Way
from dsv3fp8.observe.bench.timing import Clock, race


class Chip:
    """A stream with its own time: a call takes `ms` on it, launched one by one or from a graph."""

    def __init__(self) -> None:
        self.now, self.mode, self.capturing = 0.0, 0, False
        self.graphs: list[list[float]] = []
        self.captures_fail = False

    def call(self, ms: float, waits: bool = False) -> Call:
        def run() -> None:
            if waits and self.mode:
                raise RuntimeError("called a synchronizing CUDA operation")
            if self.capturing:
                self.graphs[-1].append(ms)
            else:
                self.now += ms

        return run


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch) -> Chip:
    played = Chip()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = played.now

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, other: Event) -> float:
            return other.at - self.at

    class Graph:
        def __init__(self) -> None:
            self.kernels: list[float] = []

        def replay(self) -> None:
            played.now += sum(self.kernels)

    @contextlib.contextmanager
    def graph(into: Graph) -> Iterator[None]:
        if played.captures_fail:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        played.graphs.append(into.kernels)
        played.capturing = True
        try:
            yield
        finally:
            played.capturing = False

    def set_mode(mode: int | str) -> None:
        played.mode = 2 if mode == "error" else int(mode)

    for name, fake in {
        "Event": Event, "CUDAGraph": Graph, "graph": graph, "set_sync_debug_mode": set_mode,
        "get_sync_debug_mode": lambda: played.mode, "synchronize": lambda device=None: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)
    return played


CUDA = Clock(torch.device("cuda", 0), rounds=3, sample_ms=6.0)


def test_calls_are_captured_and_their_time_is_of_one_call(chip: Chip) -> None:
    found = race([Way("a", lambda: [chip.call(2.0)]), Way("b", lambda: [chip.call(1.0), chip.call(3.0)])], CUDA)
    assert found["a"].samples == [2.0, 2.0, 2.0]
    assert found["b"].samples == [2.0, 2.0, 2.0]  # the mean of its rotation
    assert {timing.host for timing in found.values()} == {""}
    assert chip.graphs == [[2.0] * 3, [1.0, 3.0, 1.0, 3.0]]  # 6 ms of calls, whole rotations
    assert chip.mode == 0


def test_what_a_graph_reads_is_held_until_its_last_replay(chip: Chip) -> None:
    """Operands that only the calls know: a graph has their addresses, and does not hold them."""

    class Operand:
        pass

    held = [Operand()]
    alive = weakref.ref(held[0])

    def make() -> list[Call]:
        operand, run = held.pop(), chip.call(2.0)

        def call(operand: Operand = operand) -> None:
            run()

        return [call]

    sample = timing._sampler(Way("a", make), CUDA, Timing())
    assert alive() is not None
    assert sample() == 2.0
    del sample
    assert alive() is None


def test_what_waits_for_the_device_is_launched_by_the_host(chip: Chip) -> None:
    found = race([Way("waits", lambda: [chip.call(4.0, waits=True)])], CUDA)
    assert (found["waits"].ms, found["waits"].host) == (4.0, "the call waits for the device")
    assert not chip.graphs
    assert chip.mode == 0


def test_a_capture_that_fails_falls_back_with_its_reason(chip: Chip) -> None:
    chip.captures_fail = True
    found = race([Way("a", lambda: [chip.call(10.0)]), Way("by hand", lambda: [chip.call(1.0)], graph=False)], CUDA)
    assert found["a"].samples == [10.0, 10.0, 10.0]
    assert found["a"].host == "not captured: RuntimeError: operation not permitted when stream is capturing"
    assert (found["by hand"].ms, found["by hand"].host) == (1.0, "launched by the host")


def test_an_error_of_the_call_itself_is_its_failure(chip: Chip) -> None:
    def broken() -> None:
        if chip.mode:
            raise RuntimeError("an illegal memory access was encountered")
        chip.now += 1.0

    found = race([Way("broken", lambda: [broken])], CUDA)
    assert found["broken"].failed == "RuntimeError: an illegal memory access was encountered"
