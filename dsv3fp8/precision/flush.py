"""Counts what quantization flushes to zero, while someone asks. Off (the default) it costs one `is None`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class FlushMeter:
    """Counts, on the device, nonzero values seen by quantizers and those that became code 0."""

    def __init__(self) -> None:
        self._counts: dict[torch.device, Tensor] = {}

    def record(self, values: Tensor, zero_codes: Tensor) -> None:
        nonzero = values != 0
        counts = torch.stack((nonzero.sum(), (nonzero & zero_codes).sum()))
        seen = self._counts.get(values.device)
        self._counts[values.device] = counts if seen is None else seen + counts

    def counts(self) -> tuple[int, int]:
        """(nonzero values, those of them that were flushed to zero)."""
        nonzero, flushed = (sum(int(c[i]) for c in self._counts.values()) for i in (0, 1))
        return nonzero, flushed

    def share(self) -> float:
        """Share of nonzero values that were flushed to zero, 0.0 when nothing was quantized."""
        return flushed_share(*self.counts())


def flushed_share(nonzero: int, flushed: int) -> float:
    return flushed / nonzero if nonzero else 0.0


_active: FlushMeter | None = None


def active_meter() -> FlushMeter | None:
    return _active


@contextmanager
def uncounted() -> Iterator[None]:
    """While open, no meter counts: for what was counted in forward and is made again in backward."""
    global _active
    outer, _active = _active, None
    try:
        yield
    finally:
        _active = outer


@contextmanager
def measure_flush() -> Iterator[FlushMeter]:
    """While open, every quantizer in the process reports to the meter it yields. Changes no bit of any result."""
    global _active
    outer, _active = _active, FlushMeter()
    try:
        yield _active
    finally:
        _active = outer
