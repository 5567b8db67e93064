"""1x128 and 128x1 tiles from one read of floats: a matrix as dgrad reads it along its columns, and wgrad along its rows.

Reads 2 bytes an element of BF16 and writes 2 codes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv3fp8.kernels.quantize.device import (
    cast_four,
    column_tiles,
    largest_bits,
    limits,
    reciprocal,
    row_tiles,
    scale_of,
)
from dsv3fp8.kernels.quantize.fours import in_order, largest_of_columns, load_fours, store_fours, store_rows
from dsv3fp8.kernels.quantize.source import Source, place
from dsv3fp8.precision.formats import Format
from dsv3fp8.precision.tiles import QuantizedTensor


def quantize_both(source: Source, fmt: Format, kind: str) -> tuple[QuantizedTensor, QuantizedTensor]:
    """What `quantize_rows` and `quantize_columns` give of floats, to E4M3 or E5M2."""
    *lead, rows, cols = source.shape
    along_rows, along_columns = (
        make(rows, cols, fmt, kind, source.device, source.col_parts, source.row_parts, tuple(lead))
        for make in (row_tiles, column_tiles)
    )
    if along_rows.codes.numel():
        part_rows, part_cols = source.part
        codes, fours = along_columns.codes.mT.view(torch.uint8), part_rows % 4 == 0
        _both_kernel[source.grid(128, 128)](
            source.values, along_rows.codes, along_rows.scale, codes.view(torch.int32) if fours else codes,
            along_columns.scale, part_rows, part_cols, *source.values.stride(), FOURS=fours,
            WHOLE=part_rows % 128 == 0 and part_cols % 128 == 0, POW2=kind == "pow2", ROW_PARTS=source.row_parts,
            COL_PARTS=source.col_parts, **limits(fmt), num_warps=8, enable_fp_fusion=False,
            # Of two programs at a time: left to itself the compiler spares more, and waits for memory twice.
            maxnreg=128 if fours else None,
        )  # fmt: skip
    return along_rows, along_columns


# Compiled as columns.py's is.
@triton.jit(do_not_specialize_on_alignment=["x_stride_c"])
def _both_kernel(
    x, codes, scale, codes_t, scale_t, part_rows, part_cols, x_stride_e, x_stride_r, x_stride_c,
    FOURS: tl.constexpr, WHOLE: tl.constexpr, LIMIT: tl.constexpr, LIMIT_BITS: tl.constexpr, POW2: tl.constexpr,
    ROW_PARTS: tl.constexpr, COL_PARTS: tl.constexpr,
):  # fmt: skip
    row, rows_left, row_tile = place(tl.program_id(1), part_rows, 128, ROW_PARTS)
    col, width, tile = place(tl.program_id(0), part_cols, 128, COL_PARTS)
    rows, cols = ROW_PARTS * part_rows, COL_PARTS * part_cols
    e = tl.program_id(2).to(tl.int64)
    a, b, c, d = load_fours(
        x + e * x_stride_e, x, row, rows_left, col, width, 0, x_stride_r, x_stride_c, 0, 0, "float", WHOLE, 128
    )
    s0, s1, s2, s3 = (
        _scales_of_rows(a, LIMIT, LIMIT_BITS, POW2),
        _scales_of_rows(b, LIMIT, LIMIT_BITS, POW2),
        _scales_of_rows(c, LIMIT, LIMIT_BITS, POW2),
        _scales_of_rows(d, LIMIT, LIMIT_BITS, POW2),
    )
    s = scale_of(largest_of_columns(a, b, c, d, 128), LIMIT, LIMIT_BITS, POW2)

    first = codes + e * rows * cols
    store_rows(first, a * reciprocal(s0)[:, None], 0, row, rows_left, col, width, cols, WHOLE, 128)
    store_rows(first, b * reciprocal(s1)[:, None], 1, row, rows_left, col, width, cols, WHOLE, 128)
    store_rows(first, c * reciprocal(s2)[:, None], 2, row, rows_left, col, width, cols, WHOLE, 128)
    store_rows(first, d * reciprocal(s3)[:, None], 3, row, rows_left, col, width, cols, WHOLE, 128)
    i = tl.arange(0, 128)
    at = scale + ((e * tl.num_programs(0) + tile) * rows + row)
    tl.store(at + i, in_order(s0, s1, s2, s3), mask=None if WHOLE else i < rows_left)

    inverse = reciprocal(s)[None, :]
    words = cast_four(a * inverse, b * inverse, c * inverse, d * inverse, LIMIT != 448.0)
    first = codes_t + e * cols * (rows // 4 if FOURS else rows)
    store_fours(first, words, row, rows_left, col, width, rows, FOURS, WHOLE, 128)
    at = scale_t + ((e * tl.num_programs(1) + row_tile) * cols + col)
    tl.store(at + i, s, mask=None if WHOLE else i < width)


@triton.jit
def _scales_of_rows(values, LIMIT: tl.constexpr, LIMIT_BITS: tl.constexpr, POW2: tl.constexpr):
    return scale_of(largest_bits(tl.abs(values), 1), LIMIT, LIMIT_BITS, POW2)
