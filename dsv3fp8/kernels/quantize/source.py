"""What a quantizing kernel reads: floats, or codes in 1x128 tiles, which it decodes. A stack [E, R, C], cut in parts."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv3fp8.kernels.quantize.e5m6 import load_e5m6
from dsv3fp8.precision.formats import E5M6
from dsv3fp8.precision.tiles import QuantizedTensor, ceil_div

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Source:
    """values: [E, R, C] floats or bytes of codes, or [E, R, words or bytes] of packed E5M6.

    scale: [E, R, tiles] of codes, values again of floats.

    kind: "float", "e4m3", "e5m2", "words" or "bytes", as the kernels' SOURCE.
    """

    values: Tensor
    scale: Tensor
    kind: str
    shape: tuple[int, ...]
    row_parts: int
    col_parts: int

    @staticmethod
    def of(x: Tensor, row_parts: int = 1, col_parts: int = 1) -> Source:
        """Floats of any strides; other dtypes than bf16, fp16 and fp32 are converted first."""
        values = _stack(x if x.dtype in _FLOATS else x.to(torch.float32))
        if max(values.stride()[1:]) * 128 >= 2**31:  # a block's places are counted in 32 bits
            values = values.contiguous()
        return Source(values, values, "float", tuple(x.shape), row_parts, col_parts)

    @staticmethod
    def of_codes(x: QuantizedTensor) -> Source:
        raw, scale = _stack(x.codes.view(torch.uint8)), _stack(x.scale)
        kind = x.format.name
        if x.format is E5M6:
            in_words = (x.shape[-1] // x.col_parts) % 8 == 0 and not any(
                n % 4 for n in (raw.data_ptr(), raw.stride(0), raw.stride(1))
            )
            kind, raw = ("words", raw.view(torch.int32)) if in_words else ("bytes", raw)
        return Source(raw, scale, kind, x.shape, x.row_parts, x.col_parts)

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def part(self) -> tuple[int, int]:
        """Rows and columns of a part."""
        return self.shape[-2] // self.row_parts, self.shape[-1] // self.col_parts

    def grid(self, block_rows: int, block_cols: int) -> tuple[int, int, int]:
        """A program for every block of every part: of columns, of rows, of matrices. Columns first, as rows lie in memory."""
        rows, cols = self.part
        return self.col_parts * ceil_div(cols, block_cols), self.row_parts * ceil_div(rows, block_rows), self.values.shape[0]

    def strides(self) -> tuple[int, ...]:
        """Of the values and of the scales: 0 where one scale serves all rows or columns."""
        scales = (
            self.scale.stride()
            if self.kind == "float"
            else (stride if size > 1 else 0 for stride, size in zip(self.scale.stride(), self.scale.shape, strict=True))
        )
        return *self.values.stride(), *scales


def _stack(x: Tensor) -> Tensor:
    return x.reshape(prod(x.shape[:-2]), *x.shape[-2:])  # a view unless leading dimensions cannot be joined


@triton.jit
def place(block, length, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """Where a block of rows or columns starts in the matrix, how many of its part are left from there, and its tile of 128."""
    if PARTS > 1:
        blocks = tl.cdiv(length, BLOCK)
        part = block // blocks
        inside = (block - part * blocks) * BLOCK
        first, left, tile = part * length + inside, length - inside, part * tl.cdiv(length, 128) + inside // 128
    else:  # not behind a return: what follows one is compiled all the same
        first = block * BLOCK
        left, tile = length - first, first // 128
    return first, left, tile


@triton.jit
def load_values(
    x, x_scale, row, r_in, rows_left, col, width, tile, stride_r, stride_c, scale_stride_r, scale_stride_c,
    SOURCE: tl.constexpr, WHOLE: tl.constexpr, VECTOR: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """fp32 [ROWS, COLS] of the rows `row` + r_in (int32 [ROWS]) and the columns from `col`; zero outside.

    rows_left, width: rows and columns there are from `row` and `col` on. tile: the source's tile of these columns. WHOLE: no
    row or column is outside. VECTOR: columns that a thread takes at most, 0 for as many as 16 bytes hold.
    """
    there = r_in < rows_left
    x += row.to(tl.int64) * stride_r  # in 64 bits; inside a block 32 are enough
    if SOURCE == "words" or SOURCE == "bytes":
        values = load_e5m6(x, r_in * stride_r, there, col, width, SOURCE == "words", WHOLE, ROWS, COLS)
    else:
        c_in = tl.arange(0, COLS)
        at = r_in[:, None] * stride_r + c_in[None, :] * stride_c
        if VECTOR:
            at = tl.max_contiguous(at, [1, VECTOR])
        at = x + col.to(tl.int64) * stride_c + at
        raw = tl.load(at) if WHOLE else tl.load(at, mask=there[:, None] & (c_in < width)[None, :], other=0)
        if SOURCE == "e4m3":
            raw = raw.to(tl.float8e4nv, bitcast=True)
        elif SOURCE == "e5m2":
            raw = raw.to(tl.float8e5, bitcast=True)
        values = raw.to(tl.float32)
    if SOURCE != "float":
        at = x_scale + (row.to(tl.int64) * scale_stride_r + tile.to(tl.int64) * scale_stride_c) + r_in * scale_stride_r
        s = tl.load(at) if WHOLE else tl.load(at, mask=there, other=0.0)
        values = values * s[:, None]
    return values
