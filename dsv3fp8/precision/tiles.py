"""QuantizedTensor: codes, scales, tile and logical shape travel together. The one object that crosses room borders.

A scale is always the dequantization factor: value = fp32(code * scale).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv3fp8.precision.formats import E5M6, Format, decode


@dataclass(frozen=True)
class Tile:
    """How many rows and columns share a scale; None means all of them."""

    rows: int | None
    cols: int | None

    def transposed(self) -> Tile:
        return Tile(self.cols, self.rows)

    def __str__(self) -> str:
        return f"{self.rows or 'all'}x{self.cols or 'all'}"


ROW_128 = Tile(1, 128)
COLUMN_128 = Tile(128, 1)
BLOCK_128 = Tile(128, 128)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def grid_size(length: int, tile: int | None, parts: int) -> int:
    """Number of scales along a dimension of `length`, cut in `parts` equal halves that are tiled on their own."""
    part = length // parts
    return parts * (ceil_div(part, tile) if tile else 1)


@dataclass(frozen=True)
class QuantizedTensor:
    """A quantized matrix, or a stack of them (leading dimensions never share a tile).

    codes: [..., R, C] float8, or for E5M6 uint8 [..., R, roundup(C, 2) * 3 / 2].
    scale: float32 [..., grid rows, grid cols].
    row_parts, col_parts: equal parts of the rows (columns) that are tiled each on their own (gate and up halves).
    scale_kind: "fp32" or "pow2"; a re-tiled copy takes its source's.
    one_scale_per_group: all 128-row blocks of an expert carry the expert's one scale.
    """

    codes: Tensor
    scale: Tensor
    format: Format
    tile: Tile
    shape: tuple[int, ...]
    scale_kind: str = "fp32"
    row_parts: int = 1
    col_parts: int = 1
    one_scale_per_group: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales as stored."""
        return self.codes.nbytes + self.scale.nbytes

    @property
    def constant_along_k(self) -> bool:
        """Whether no scale of it, as an operand [rows, K], changes along K. Where none of both does, they multiply the sum."""
        return self.tile.cols is None and self.col_parts == 1

    def decode(self) -> Tensor:
        """fp32(code * scale), [..., R, C]."""
        values = decode(self.codes, self.format)[..., : self.shape[-1]]
        return values * self.expanded_scale()

    def expanded_scale(self) -> Tensor:
        """The scale of every element, float32; broadcastable to [..., R, C]."""
        return expand_grid(self.expanded_rows(), -1, self.shape[-1], self.tile.cols, self.col_parts)

    def expanded_rows(self) -> Tensor:
        """The scale grid with one row per row of the matrix, [..., R, grid cols]."""
        return expand_grid(self.scale, -2, self.shape[-2], self.tile.rows, self.row_parts)

    def transposed(self) -> QuantizedTensor:
        """The same codes and scales seen as the transposed matrix (views, nothing moves)."""
        if self.format is E5M6:
            raise ValueError("packed E5M6 codes have no transposed view: re-tile them instead")
        *lead, rows, cols = self.shape
        return replace(
            self,
            codes=self.codes.transpose(-1, -2),
            scale=self.scale.transpose(-1, -2),
            tile=self.tile.transposed(),
            shape=(*lead, cols, rows),
            row_parts=self.col_parts,
            col_parts=self.row_parts,
        )

    def rows(self, start: int, stop: int) -> QuantizedTensor:
        """Rows start:stop of a matrix; start must fall on a tile border."""
        if self.tile.rows is None:
            scale = self.scale
        else:
            if start % self.tile.rows:
                raise ValueError(f"row {start} is inside a tile of {self.tile.rows} rows")
            scale = self.scale[start // self.tile.rows : ceil_div(stop, self.tile.rows)]
        return replace(self, codes=self.codes[start:stop], scale=scale, shape=(stop - start, self.shape[-1]))

    def __getitem__(self, index: int) -> QuantizedTensor:
        """One matrix of a stack."""
        return replace(self, codes=self.codes[index], scale=self.scale[index], shape=self.shape[1:])


def expand_grid(scale: Tensor, dim: int, length: int, tile: int | None, parts: int) -> Tensor:
    """One entry for each of `length` elements of a dimension, from one for each of its tiles; one alone where it serves all."""
    if tile == 1 or (tile is None and parts == 1):
        return scale
    part = length // parts
    if part == 0:
        return scale.narrow(dim, 0, 0)
    each = part if tile is None else tile
    expanded = scale.repeat_interleave(each, dim)
    if tile is None or part % tile == 0:
        return expanded
    # The tail tile of each part is cut: drop what stands beyond it.
    padded = ceil_div(part, tile) * tile
    kept = torch.arange(parts * padded, device=scale.device).view(parts, padded)[:, :part].reshape(-1)
    return expanded.index_select(dim, kept)


Operand = QuantizedTensor | Tensor
"""What a GEMM reads: codes with scales, or a plain tensor where a recipe does not quantize."""


def values_of(operand: Operand) -> Tensor:
    """The operand as plain values: decoded fp32, or the tensor itself."""
    return operand.decode() if isinstance(operand, QuantizedTensor) else operand
