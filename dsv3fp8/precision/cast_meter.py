"""Counts what casts lose, small values and large ones, while someone asks. Off (the default) it costs one `is None`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from dsv3fp8.precision.watcher import Watcher


class CastCounts(NamedTuple):
    """Values that are not zero; of them, those whose code is zero; and those whose scale was given, not found from them, and
    put them more than half a step beyond the largest code, which stands in for them.
    """

    nonzero: int
    flushed: int
    saturated: int

    @property
    def flushed_share(self) -> float:
        """Of the nonzero values; 0.0 when nothing was quantized."""
        return self.flushed / self.nonzero if self.nonzero else 0.0

    @property
    def saturated_share(self) -> float:
        """Likewise, of all nonzero values, under given scales or not."""
        return self.saturated / self.nonzero if self.nonzero else 0.0


class CastMeter:
    """Adds up, on the device, what the quantizers report."""

    def __init__(self) -> None:
        self._counts: dict[torch.device, Tensor] = {}

    def record(self, values: Tensor, zero_codes: Tensor, saturated: Tensor | None) -> None:
        """values: of any float dtype; zero_codes, saturated: bool, of their shape. None: under a scale of their own amax."""
        nonzero = values != 0
        beyond = torch.zeros((), dtype=torch.int64, device=values.device) if saturated is None else saturated.sum()
        counts = torch.stack((nonzero.sum(), (nonzero & zero_codes).sum(), beyond))
        seen = self._counts.get(values.device)
        self._counts[values.device] = counts if seen is None else seen + counts

    def counts(self) -> CastCounts:
        """Over all devices, so far. Waits for each of them once."""
        return CastCounts(*sum((counts.cpu() for counts in self._counts.values()), torch.zeros(3, dtype=torch.int64)).tolist())


_meter: Watcher[CastMeter] = Watcher()


def active_meter() -> CastMeter | None:
    return _meter.current


def uncounted() -> AbstractContextManager[None]:
    """While open, no meter counts: for what was counted in forward and is made again in backward."""
    return _meter.be(None)


@contextmanager
def measure_casts() -> Iterator[CastMeter]:
    """While open, every quantizer in the process reports to the meter it yields. Changes no bit of any result."""
    meter = CastMeter()
    with _meter.be(meter):
        yield meter
