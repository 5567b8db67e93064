"""What is raced and what came of it: cases, ways, rates and ratios."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Call = Callable[[], object]

TIMES = {"ms": 1.0, "µs": 1e3}
"""Units in which a table has times themselves: how many are in a millisecond."""
PER_MS = {"TFLOP/s": 1e-9, "GB/s": 1e-6, "tokens/s": 1e3}
"""What work (FLOP, bytes, tokens) in a millisecond is in each unit."""


@dataclass(frozen=True)
class Way:
    """One way to do a case's work.

    make: builds the calls, one for each set of buffers; each call does the whole work on its own set.
    work: of one call, where it is not the case's (a copy of another size). graph: whether a CUDA graph may be tried.
    replays: whether the calls replay a graph of their own.
    note: the backend, or what else a reader has to know.
    """

    name: str
    make: Callable[[], Sequence[Call]]
    work: float | None = None
    graph: bool = True
    replays: bool = False
    note: str = ""


@dataclass(frozen=True)
class Case:
    """A row: the work of one call (FLOP, bytes or tokens) and the ways that race. build: makes the operands they share."""

    name: str
    work: float
    build: Callable[[], list[Way]]


@dataclass(frozen=True)
class Table:
    """Cases in one unit, and the way that all others are compared with. about: one line on what is measured."""

    name: str
    title: str
    unit: str
    peer: str
    about: str
    cases: list[Case]


@dataclass
class Timing:
    """Milliseconds of one call in each round.

    host: why host time is included, "" where it is not. failed: why nothing was measured.
    """

    samples: list[float] = field(default_factory=list)
    host: str = ""
    failed: str = ""

    @property
    def ms(self) -> float | None:
        """The median, or None where nothing was measured."""
        return statistics.median(self.samples) if self.samples and not self.failed else None


def rate(work: float, ms: float, unit: str) -> float:
    """Work of one call in `ms` milliseconds, in the unit; a unit of time is the time itself."""
    return ms * TIMES[unit] if unit in TIMES else work * PER_MS[unit] / ms


def ratio(work: float, ms: float, peer_work: float, peer_ms: float) -> float:
    """How many times the peer's speed: work per time over the peer's work per time."""
    return (work / ms) / (peer_work / peer_ms)


def judged(case: Case, unit: str, peer: str, ways: Sequence[Way], timings: dict[str, Timing]) -> dict[str, Any]:
    """A case as it goes into the JSON: every way with its median, rate and ratio to the peer."""
    works = {way.name: case.work if way.work is None else way.work for way in ways}
    beside = timings[peer].ms if peer in timings else None
    rows: dict[str, Any] = {}
    for way in ways:
        timing, work = timings[way.name], works[way.name]
        ms = timing.ms
        rows[way.name] = {
            "ms": ms,
            "rate": None if ms is None else rate(work, ms, unit),
            "ratio": None if ms is None or beside is None else ratio(work, ms, works[peer], beside),
            "samples": timing.samples,
            "work": work,
            "host_included": timing.host,
            "note": way.note,
            "failed": timing.failed,
        }
    return {"case": case.name, "ways": rows}
