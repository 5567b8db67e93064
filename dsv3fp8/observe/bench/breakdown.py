"""Where the time of a call goes, by kernel, from torch.profiler."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from dsv3fp8 import kernels
from dsv3fp8.observe.bench.rates import Call

SHOWN = 16  # kernels of the table
FUSED, EXCHANGE, ENDS = "norm, SwiGLU, RoPE, residual", "router, dispatch, combine", "embedding, loss"
FOLDERS = {
    "gemm": "GEMM", "quantize": "casts", "norm": FUSED, "swiglu": FUSED, "rope": FUSED, "residual": FUSED, "router": EXCHANGE,
    "exchange": EXCHANGE, "embedding": ENDS, "cross_entropy": ENDS, "optimizer": "optimizer", "attention": "attention",
}  # fmt: skip
"""What the kernels of each folder of dsv3fp8/kernels are for."""
LIBRARIES: tuple[tuple[str, str], ...] = (
    ("fused by torch.compile", r"^triton_(poi|red|per|tem)_"),
    ("attention", r"cudnn|sdpa|flash|fmha|attention"),
    ("GEMM", r"gemm|nvjet|cutlass|xmma|splitk|gemv|aten::mm|aten::bmm|grouped_mm"),
    ("casts", r"quantize|block_scaled|cast_transpose"),
    ("copies", r"memcpy|memset|copy"),
)
OTHER = "other torch kernels"


@dataclass(frozen=True)
class Event:
    """One kernel's run, or one CPU op's, in nanoseconds."""

    name: str
    start: int
    end: int


def breakdown(call: Call, device: torch.device, ms: float | None) -> dict[str, Any]:
    """Time by kernel and by kind of one call, which has run before.

    ms: of the call without the profiler; the busy share is of that. On a CPU the events are torch's
    ops, which nest: the path is tried there, and the shares mean little.
    """
    return summarize(recorded_events(call, device), ms)


def recorded_events(call: Call, device: torch.device, before: Call | None = None, unnoticed: bool = False) -> list[Event]:
    """Kernels of one call, copies and fills among them; on a CPU its ops. before: called when the profiler has started.

    unnoticed: by a profiler of another thread, which still sees all that runs on the GPU. A step that notices one is
    launched, where otherwise it replays a graph. torch's profiler has to have run in this thread before.
    """
    cuda = device.type == "cuda"
    # acc_events: there is one cycle; torch 2.11 warns of what it would do with more.
    recorded = profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU], acc_events=True)
    with ThreadPoolExecutor(1) as other, ExitStack() as stack:
        if unnoticed:
            other.submit(recorded.__enter__).result()
            stack.callback(lambda: other.submit(recorded.__exit__, None, None, None).result())
        else:
            stack.enter_context(recorded)
        if before is not None:
            before()
        call()
        if cuda:
            torch.cuda.synchronize(device)
    # The raw results: torch turning a hundred thousand kernels into FunctionEvents takes longer than the step itself.
    assert recorded.profiler is not None
    assert recorded.profiler.kineto_results is not None
    wanted = "CUDA" if cuda else "CPU"
    return [
        Event(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in recorded.profiler.kineto_results.events()
        if event.device_type().name == wanted and not event.name().startswith("ProfilerStep")
    ]


def summarize(events: Iterable[Event], ms: float | None) -> dict[str, Any]:
    """Kernels by time with counts and shares, kinds by time, launches, and the share of `ms` in which a kernel ran."""
    events = list(events)
    time_of: dict[str, int] = defaultdict(int)
    count_of: dict[str, int] = defaultdict(int)
    kinds: dict[str, int] = defaultdict(int)
    for event in events:
        name = short(event.name)
        time_of[name] += event.end - event.start
        count_of[name] += 1
        kinds[kind_of(event.name)] += event.end - event.start
    total = sum(time_of.values()) or 1
    busy = _union(events) / 1e6
    by_time = sorted(time_of, key=lambda name: -time_of[name])
    memory = sum(event.name.startswith(("Memcpy", "Memset")) for event in events)
    return {
        "kernel_ms": total / 1e6 if events else 0.0,
        "busy_ms": busy,
        "busy_share": min(busy / ms, 1.0) if ms else None,
        "launches": len(events) - memory,
        "copies_and_fills": memory,
        "kinds": {kind: _part(kinds[kind], total) for kind in sorted(kinds, key=lambda kind: -kinds[kind])},
        "kernels": [
            {"name": name, "kind": kind_of(name), "count": count_of[name], **_part(time_of[name], total)}
            for name in by_time[:SHOWN]
        ],
        "shown_share": sum(time_of[name] for name in by_time[:SHOWN]) / total,
    }


def _part(time: int, total: int) -> dict[str, float]:
    return {"ms": time / 1e6, "share": time / total}


@lru_cache(4096)
def kind_of(name: str) -> str:
    """The kind of a kernel, by its name: one of this package's by the folder that it is written in."""
    if (ours := own_kernels().get(name)) is not None:
        return ours
    return next((kind for kind, pattern in LIBRARIES if re.search(pattern, name, re.IGNORECASE)), OTHER)


@cache
def own_kernels() -> dict[str, str]:
    """The kind of every Triton and Gluon kernel of this package, by name."""
    root = Path(next(iter(kernels.__path__)))
    return {
        name: FOLDERS.get(path.relative_to(root).parts[0], OTHER)
        for path in sorted(root.glob("*/**/*.py"))
        for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    }


@lru_cache(4096)
def short(name: str) -> str:
    """A kernel's name without what every C++ name carries, at most 96 characters."""
    name = re.sub(r"^void |at::native::|\(anonymous namespace\)::|std::|c10::", "", name)
    return name if len(name) <= 96 else f"{name[:95]}…"


def _union(events: list[Event]) -> int:
    """Nanoseconds in which at least one of them ran."""
    covered, until = 0, 0
    for event in sorted(events, key=lambda e: e.start):
        covered += max(0, event.end - max(event.start, until))
        until = max(until, event.end)
    return covered
