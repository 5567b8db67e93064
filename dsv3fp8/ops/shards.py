"""Codes of a part of a weight under the scales of the whole: what a rank makes of the rows, or the experts, that it holds.

A tile that a border cuts has one scale all the same. So the largest magnitudes of all tiles are looked for in every part, the
parts' are compared elsewhere, and the codes follow from the scales of the whole grid: bit for bit those of the whole weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv3fp8.kernels.backend import quantize
from dsv3fp8.ops.quantizers import LinearQuantizers
from dsv3fp8.precision.tiles import QuantizedTensor, Tile, expand_grid, grid_size


@dataclass(frozen=True)
class Part:
    """Where a rank's slice begins along dimension `dim` of a parameter."""

    whole: tuple[int, ...]
    dim: int
    first: int

    @property
    def first_row(self) -> int:
        """Of the matrices [N, K] of a weight [..., N, K]."""
        return self.first if self.dim == len(self.whole) - 2 else 0


class ShardCodes:
    """Codes of one part, for each orientation that the GEMMs read, and the scales of the whole weight.

    The part is of rows or of matrices; a weight is never cut along K.
    """

    def __init__(self, quantizers: LinearQuantizers, row_parts: int, part: Part) -> None:
        assert part.dim < len(part.whole) - 1, f"a weight {part.whole} cut along its columns"
        self.quantizers, self.part = quantizers, part
        self.spec = quantizers.gemm.weight
        axes = (1,) if self.spec.one_orientation else (1, 0)
        self.tiles: list[Tile] = [self.spec.tile_along(axis) for axis in axes]
        self.row_parts = [1 if tile.rows is None else row_parts for tile in self.tiles]
        self.codes: list[Tensor] = []
        self.scales: list[Tensor] = []
        self._made_of: tuple[int, int] | None = None

    def fresh(self, master: Tensor) -> bool:
        """Whether the codes are those of this part as it is now."""
        return bool(self.codes) and self._made_of == (master._version, master.data_ptr())

    def invalidate(self) -> None:
        """Drops the codes."""
        self.codes, self.scales = [], []

    def amaxes(self, master: Tensor) -> list[Tensor]:
        """FP32 grids of the whole weight with the largest magnitudes in this part, 0 in tiles that lie elsewhere."""
        return [tile_amax(master, tile, n, self.part) for tile, n in zip(self.tiles, self.row_parts, strict=True)]

    def make(self, master: Tensor, amaxes: Sequence[Tensor], padded: torch.Size) -> None:
        """Makes codes [padded] of the master's part, zeros behind it, under the scales that the whole weight's amaxes give."""
        self.invalidate()
        for tile, parts, amax in zip(self.tiles, self.row_parts, amaxes, strict=True):
            scale = torch.where(torch.isfinite(amax), self.quantizers.scale_of("weight", amax), torch.nan)
            codes = torch.zeros(padded, dtype=torch.uint8, device=master.device).view(self.spec.storage.dtype)
            codes.narrow(self.part.dim, 0, master.shape[self.part.dim]).copy_(self._cast(master, tile, parts, scale))
            self.codes.append(codes)
            self.scales.append(scale)
        self._made_of = master._version, master.data_ptr()

    def assembled(self, codes: Sequence[Tensor], scales: Sequence[Tensor]) -> list[QuantizedTensor]:
        """The whole weight [..., N, K] from the codes of all parts: K along the columns, then, where made, along the rows."""
        return [
            QuantizedTensor(each, scale, self.spec.storage, tile, self.part.whole, self.spec.scale, parts)
            for each, scale, tile, parts in zip(codes, scales, self.tiles, self.row_parts, strict=True)
        ]

    def _cast(self, master: Tensor, tile: Tile, parts: int, scale: Tensor) -> Tensor:
        """The part's codes: with a scale for each of its rows no tile is cut any more."""
        if self.part.dim < len(self.part.whole) - 2:
            scale = scale.narrow(self.part.dim, self.part.first, master.shape[self.part.dim])
        if tile.rows is not None:
            scale = expand_grid(scale, -2, self.part.whole[-2], tile.rows, parts)
            scale = scale.narrow(-2, self.part.first_row, master.shape[-2])
            tile = Tile(1, tile.cols)
        return quantize(master, self.spec.storage, tile, self.spec.scale, scale=scale).codes


def tile_amax(x: Tensor, tile: Tile, row_parts: int, part: Part) -> Tensor:
    """FP32 [..., grid rows, grid columns] of the whole weight, from its part x; NaN where x holds NaN, 0 where x is not."""
    *_, rows, cols = part.whole
    amax = _largest_along(x, -1, 0, cols, tile.cols, 1)
    amax = _largest_along(amax, -2, part.first_row, rows, tile.rows, row_parts)
    if part.dim == len(part.whole) - 2:
        return amax
    grid = amax.new_zeros(*part.whole[:-2], *amax.shape[-2:])
    grid.narrow(part.dim, part.first, x.shape[part.dim]).copy_(amax)
    return grid


def _largest_along(x: Tensor, dim: int, first: int, length: int, tile: int | None, parts: int) -> Tensor:
    """Largest magnitudes by tile of a dimension of `length`, of which x holds what begins at `first`; 0 in other tiles."""
    part = length // parts
    each = tile or part
    shape = list(x.shape)
    shape[dim] = grid_size(length, tile, parts)
    grid = x.new_zeros(shape)
    at, end = first, first + x.shape[dim]
    while at < end:
        half, within = divmod(at, part)
        ahead = min(end - at, part - within)  # what is left of x in this half
        tiles = ahead // each if within % each == 0 else 0
        taken = tiles * each or min(each - within % each, ahead)
        run = x.narrow(dim, at - first, taken).unflatten(dim, (tiles or 1, taken // (tiles or 1)))
        into = grid.narrow(dim, half * grid_size(part, tile, 1) + within // each, tiles or 1)
        into.copy_(torch.linalg.vector_norm(run, float("inf"), dim=dim))
        at += taken
    return grid
