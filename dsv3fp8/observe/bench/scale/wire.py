"""The wire in a profiled step: how long its kernels run, and how much of that something is computed meanwhile."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dsv3fp8.observe.bench.breakdown import Event, recorded_events
from dsv3fp8.observe.bench.scale.traffic import Call
from dsv3fp8.parallel.ranks import Ranks

Spans = list[tuple[int, int]]
NCCL = re.compile(r"nccl\w*?_(SendRecv|AllReduce|AllGather|ReduceScatter|Broadcast|AllToAll)")
GLOO = "gloo:"
"""What the names of a CPU's transfers begin with: there the path is tried, and the times mean nothing."""


def profiled(step: Callable[[], object], device: torch.device, ranks: Ranks, unnoticed: bool = False) -> dict[str, Any]:
    """Times of one step, which all ranks take at once. unnoticed: as `recorded_events` has it."""
    return wire_times(recorded_events(step, device, ranks.wait, unnoticed))


def wire_times(events: Sequence[Event]) -> dict[str, Any]:
    """Milliseconds of a step: from its first kernel to its last, in NCCL's kernels, and in those while others run.

    kernels: NCCL's, in the order in which they began, each with its name and milliseconds.
    """
    wire = sorted((event for event in events if is_wire(event.name)), key=lambda event: event.start)
    on_wire = merged([(event.start, event.end) for event in wire])
    computing = merged([(event.start, event.end) for event in events if not is_wire(event.name)])
    whole = merged([*on_wire, *computing])
    return {
        "span_ms": (whole[-1][1] - whole[0][0]) / 1e6 if whole else 0.0,
        "compute_ms": length(computing) / 1e6,
        "wire_ms": length(on_wire) / 1e6,
        "hidden_ms": length(common(on_wire, computing)) / 1e6,
        "kernels": [[_kernel(event.name), (event.end - event.start) / 1e6] for event in wire],
    }


def is_wire(name: str) -> bool:
    """Whether a kernel moves bytes between ranks."""
    return NCCL.search(name) is not None or name.startswith(GLOO)


def over_ranks(each: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Means over the ranks, and `moving_ms`: the kernels' times without waiting for whoever comes last, or None."""
    found: dict[str, float | None] = {
        key: sum(one[key] for one in each) / len(each) for key in ("span_ms", "compute_ms", "wire_ms", "hidden_ms")
    }
    least = _least(each)
    return found | {"moving_ms": None if least is None else sum(ms for _, ms in least)}


def by_what(each: Sequence[dict[str, Any]], calls: Sequence[Sequence[Call]]) -> dict[str, dict[str, float]]:
    """Milliseconds on the wire without waiting, and the bytes that leave the rank that sends most, by what is carried.

    calls: of each rank in one step. Empty where a kernel cannot be told from another: not one for each call.
    """
    least = _least(each)
    found: dict[str, dict[str, float]] = {}
    for kernel in {call.kernel for call in calls[0]} - {""} if least is not None else ():
        times = [ms for name, ms in least or [] if name == kernel]
        named = [[call for call in rank if call.kernel == kernel] for rank in calls]
        if any(len(rank) != len(times) for rank in named):
            continue
        for index, ms in enumerate(times):
            entry = found.setdefault(named[0][index].what, {"ms": 0.0, "sent": 0.0})
            entry["ms"] += ms
            entry["sent"] += max(rank[index].sent for rank in named)
    return found


def _least(each: Sequence[dict[str, Any]]) -> list[tuple[str, float]] | None:
    """Each kernel with its least time over the ranks: that of the one that nobody had to wait for."""
    names = [[name for name, _ in one["kernels"]] for one in each]
    if any(other != names[0] for other in names):
        return None
    return [(name, min(one["kernels"][i][1] for one in each)) for i, name in enumerate(names[0])]


def _kernel(name: str) -> str:
    found = NCCL.search(name)
    return found.group(1) if found else name


def merged(spans: Spans) -> Spans:
    """The same moments in spans that do not touch, in order."""
    found: Spans = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def common(left: Spans, right: Spans) -> Spans:
    """The moments that lie in both; both merged."""
    found, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            found.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(spans: Spans) -> int:
    """Of merged spans."""
    return sum(end - start for start, end in spans)
