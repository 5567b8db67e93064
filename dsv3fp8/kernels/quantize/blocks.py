"""128x128 tiles in Triton; of weights also the transposed codes, from the same read: dgrad's GEMM finds them contiguous.

Reads 4 bytes an element of an FP32 master and writes 1, or 2 with the transposed codes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv3fp8.kernels.quantize.device import block_tiles, cast_four, larger, largest_bits, limits, reciprocal, scale_of
from dsv3fp8.kernels.quantize.fours import largest_of_fours, load_fours, store_fours, store_rows
from dsv3fp8.kernels.quantize.source import Source, place
from dsv3fp8.precision.formats import Format
from dsv3fp8.precision.tiles import QuantizedTensor


def quantize_blocks(source: Source, fmt: Format, kind: str) -> QuantizedTensor:
    """`reference.quantize` (of codes: `retile`) with tile 128x128 to E4M3 or E5M2."""
    return _launch(source, fmt, kind, mirror=False)[0]


def quantize_mirrored(source: Source, fmt: Format, kind: str) -> tuple[QuantizedTensor, QuantizedTensor]:
    """The same, and its transpose: codes and scales stored as the transposed matrix."""
    return _launch(source, fmt, kind, mirror=True)


def _launch(source: Source, fmt: Format, kind: str, mirror: bool) -> tuple[QuantizedTensor, QuantizedTensor]:
    *lead, rows, cols = source.shape
    part_rows, part_cols = source.part
    cast = block_tiles(rows, cols, fmt, kind, source.device, source.col_parts, source.row_parts, tuple(lead))
    turned = cast
    if mirror:
        turned = block_tiles(cols, rows, fmt, kind, source.device, source.row_parts, source.col_parts, tuple(lead))
    if cast.codes.numel():
        codes, fours = turned.codes.view(torch.uint8), mirror and part_rows % 4 == 0
        _blocks_kernel[source.grid(128, 128)](
            source.values, source.scale, cast.codes, cast.scale, codes.view(torch.int32) if fours else codes, turned.scale,
            part_rows, part_cols, *source.strides(), SOURCE=source.kind, MIRROR=mirror, FOURS=fours,
            WHOLE=part_rows % 128 == 0 and part_cols % 128 == 0, POW2=kind == "pow2", ROW_PARTS=source.row_parts,
            COL_PARTS=source.col_parts, **limits(fmt), num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    return cast, turned


# Compiled as columns.py's is.
@triton.jit(do_not_specialize=["x_scale_stride_e", "x_scale_stride_c"], do_not_specialize_on_alignment=["x_stride_c"])
def _blocks_kernel(
    x, x_scale, codes, scale, codes_t, scale_t, part_rows, part_cols,
    x_stride_e, x_stride_r, x_stride_c, x_scale_stride_e, x_scale_stride_r, x_scale_stride_c,
    SOURCE: tl.constexpr, MIRROR: tl.constexpr, FOURS: tl.constexpr, WHOLE: tl.constexpr,
    LIMIT: tl.constexpr, LIMIT_BITS: tl.constexpr, POW2: tl.constexpr, ROW_PARTS: tl.constexpr, COL_PARTS: tl.constexpr,
):  # fmt: skip
    row, rows_left, row_tile = place(tl.program_id(1), part_rows, 128, ROW_PARTS)
    col, width, tile = place(tl.program_id(0), part_cols, 128, COL_PARTS)
    row_tiles, col_tiles = tl.num_programs(1), tl.num_programs(0)
    rows, cols = ROW_PARTS * part_rows, COL_PARTS * part_cols
    e = tl.program_id(2).to(tl.int64)
    a, b, c, d = load_fours(
        x + e * x_stride_e, x_scale + e * x_scale_stride_e, row, rows_left, col, width, tile,
        x_stride_r, x_stride_c, x_scale_stride_r, x_scale_stride_c, SOURCE, WHOLE, 128,
    )  # fmt: skip
    of_columns = tl.reduce(largest_of_fours(a, b, c, d), 0, larger)
    s = scale_of(largest_bits(of_columns, 0), LIMIT, LIMIT_BITS, POW2)
    tl.store(scale + ((e * row_tiles + row_tile) * col_tiles + tile), s)
    inverse = reciprocal(s)
    a, b, c, d = a * inverse, b * inverse, c * inverse, d * inverse
    first = codes + e * rows * cols
    store_rows(first, a, 0, row, rows_left, col, width, cols, WHOLE, 128)
    store_rows(first, b, 1, row, rows_left, col, width, cols, WHOLE, 128)
    store_rows(first, c, 2, row, rows_left, col, width, cols, WHOLE, 128)
    store_rows(first, d, 3, row, rows_left, col, width, cols, WHOLE, 128)
    if MIRROR:
        tl.store(scale_t + ((e * col_tiles + tile) * row_tiles + row_tile), s)
        first = codes_t + e * cols * (rows // 4 if FOURS else rows)
        words = cast_four(a, b, c, d, LIMIT != 448.0)
        store_fours(first, words, row, rows_left, col, width, rows, FOURS, WHOLE, 128)
