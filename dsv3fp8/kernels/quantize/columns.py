"""128x1 tiles for wgrad in Triton, stored with the rows (tokens) contiguous, as its tensor cores read both operands.

Reads 2 bytes an element of BF16, or 1 or 1.5 of codes, and writes 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv3fp8.kernels.quantize.device import cast_four, column_tiles, limits, reciprocal, scale_of
from dsv3fp8.kernels.quantize.fours import largest_of_columns, load_fours, store_fours
from dsv3fp8.kernels.quantize.source import Source, place
from dsv3fp8.precision.formats import Format
from dsv3fp8.precision.tiles import QuantizedTensor

_COLS = 64  # of one tile each, that a program holds


def quantize_columns(x: Tensor | Source, fmt: Format, kind: str) -> QuantizedTensor:
    """`reference.quantize` (of codes: `retile`) with tile 128x1 to E4M3 or E5M2; codes.mT is contiguous."""
    source = x if isinstance(x, Source) else Source.of(x)
    *lead, rows, cols = source.shape
    cast = column_tiles(rows, cols, fmt, kind, source.device, source.col_parts, source.row_parts, tuple(lead))
    if cast.codes.numel():
        part_rows, part_cols = source.part
        codes, fours = cast.codes.mT.view(torch.uint8), part_rows % 4 == 0
        _columns_kernel[source.grid(128, _COLS)](
            source.values, source.scale, codes.view(torch.int32) if fours else codes, cast.scale, part_rows, part_cols,
            *source.strides(), SOURCE=source.kind, FOURS=fours, WHOLE=part_rows % 128 == 0 and part_cols % _COLS == 0,
            POW2=kind == "pow2", ROW_PARTS=source.row_parts, COL_PARTS=source.col_parts, COLS=_COLS,
            **limits(fmt), num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return cast


# Compiled for whole tiles, for numbers of rows that are multiples of 16 or of 4, and for all others.
@triton.jit(do_not_specialize=["x_scale_stride_e", "x_scale_stride_c"], do_not_specialize_on_alignment=["x_stride_c"])
def _columns_kernel(
    x, x_scale, codes, scale, part_rows, part_cols,
    x_stride_e, x_stride_r, x_stride_c, x_scale_stride_e, x_scale_stride_r, x_scale_stride_c,
    SOURCE: tl.constexpr, FOURS: tl.constexpr, WHOLE: tl.constexpr,
    LIMIT: tl.constexpr, LIMIT_BITS: tl.constexpr, POW2: tl.constexpr,
    ROW_PARTS: tl.constexpr, COL_PARTS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row, rows_left, row_tile = place(tl.program_id(1), part_rows, 128, ROW_PARTS)
    col, width, tile = place(tl.program_id(0), part_cols, COLS, COL_PARTS)
    rows, cols = ROW_PARTS * part_rows, COL_PARTS * part_cols
    e = tl.program_id(2).to(tl.int64)
    a, b, c, d = load_fours(
        x + e * x_stride_e, x_scale + e * x_scale_stride_e, row, rows_left, col, width, tile,
        x_stride_r, x_stride_c, x_scale_stride_r, x_scale_stride_c, SOURCE, WHOLE, COLS,
    )  # fmt: skip
    s = scale_of(largest_of_columns(a, b, c, d, COLS), LIMIT, LIMIT_BITS, POW2)
    c_in = tl.arange(0, COLS)
    at = scale + ((e * tl.num_programs(1) + row_tile) * cols + col)
    tl.store(at + c_in, s, mask=None if WHOLE else c_in < width)
    inverse = reciprocal(s)[None, :]
    words = cast_four(a * inverse, b * inverse, c * inverse, d * inverse, LIMIT != 448.0)
    first = codes + e * cols * (rows // 4 if FOURS else rows)
    store_fours(first, words, row, rows_left, col, width, rows, FOURS, WHOLE, COLS)
