"""What all experiments are given: a seed, sizes, a device, and the ways to sum that this machine has."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv3fp8.kernels.gemm import emulated
from dsv3fp8.observe.drift.sums import Sums
from dsv3fp8.precision.formats import E4M3, encode

Row = dict[str, Any]
"""One line of an experiment: plain values by name."""


@dataclass(frozen=True)
class Size:
    """How much is summed. A sum of M x N outputs over K costs M · N · K products.

    products: of one sum at most; side: outputs are side x side at most. longest: the largest K.
    extreme: outputs (squared) that the largest error is looked for in. rows, columns: of the matrices that are cast.
    tokens: that a checkpoint's model is run on.
    """

    products: int
    side: int
    longest: int
    extreme: int
    rows: int
    columns: int
    tokens: int


SIZES = {
    "small": Size(products=2**28, side=128, longest=65536, extreme=1024, rows=1024, columns=4096, tokens=2048),
    "full": Size(products=2**31, side=512, longest=65536, extreme=2048, rows=4096, columns=4096, tokens=8192),
}


def size_for(name: str, device: torch.device) -> Size:
    """The size by name; on a CPU without the compiled emulator, which is some 70 times faster, less of it."""
    size = SIZES[name]
    if device.type == "cpu" and emulated.reason_against_compiled(device):
        return replace(size, products=size.products // 16, extreme=size.extreme // 4)
    return size


@dataclass(frozen=True)
class Study:
    """One run of the study. `run` is a run directory whose checkpoint gives real operands, or None."""

    seed: int
    size: Size
    device: torch.device
    sums: Sums
    run: Path | None = None

    def generator(self, name: str) -> torch.Generator:
        """A CPU generator of its own for each name: the same draws on every device, whichever experiments run."""
        return torch.Generator().manual_seed((self.seed * 1_000_003 + zlib.crc32(name.encode())) % 2**64)

    def outputs(self, k: int) -> int:
        """Rows, and columns, of a product over K: at most size.side, a multiple of 16, within size.products."""
        side = 16
        while side < self.size.side and 4 * side * side * k <= self.size.products:
            side *= 2
        return side

    def draw(self, data: str, rows: int, columns: int, generator: torch.Generator) -> Tensor:
        """float32 values [rows, columns] on the study's device. data: uniform is U(0,1), normal is N(0,1)."""
        values = torch.empty(rows, columns)
        values = values.uniform_(0, 1, generator=generator) if data == "uniform" else values.normal_(generator=generator)
        return values.to(self.device)

    def codes(self, data: str, rows: int, k: int, generator: torch.Generator) -> Tensor:
        """E4M3 codes of a draw, scale 1."""
        return encode(self.draw(data, rows, k, generator), E4M3)
