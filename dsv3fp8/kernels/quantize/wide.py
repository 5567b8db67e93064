"""One scale for a whole row, column, matrix or expert in Triton: a pass for the largest magnitudes, and one for the cast.

The first keeps them by atomic maxima of their bits, whose order does not matter. Each reads 2 bytes an element of BF16, 4 of
an FP32 master; the second writes 1. Codes of one scale a column are stored with the rows contiguous, as wgrad reads
them, and so are codes that are re-tiled expert by expert, which wgrad alone reads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv3fp8.kernels.quantize.device import cast_four, largest_bits, limits, reciprocal, scale_of
from dsv3fp8.kernels.quantize.fours import (
    in_order,
    largest_of_columns,
    largest_of_fours,
    load_fours,
    store_fours,
    store_rows,
)
from dsv3fp8.kernels.quantize.source import Source, place
from dsv3fp8.precision.formats import Format
from dsv3fp8.precision.tiles import QuantizedTensor, Tile

OF = {Tile(1, None): "row", Tile(None, 1): "column", Tile(None, None): "matrix"}


def quantize_wide(
    source: Source, fmt: Format, tile: Tile, kind: str, groups: Tensor | None = None, scale: Tensor | None = None
) -> QuantizedTensor:
    """`reference.quantize` with tile 1xall, allx1 or allxall to E4M3 or E5M2. scale: given ones, where a matrix has one."""
    *lead, rows, cols = source.shape
    of, grouped = OF[tile], tile.rows is None and groups is not None
    turned = of == "column" or (grouped and source.kind != "float")
    shape = (*lead, cols, rows) if turned else source.shape
    stored = torch.empty(shape, dtype=torch.uint8, device=source.device)
    grid = (*lead, rows // 128 if grouped else rows if of == "row" else 1, cols if of == "column" else 1)
    out = torch.ones(grid, dtype=torch.float32, device=source.device)
    if stored.numel():
        amax = torch.zeros(grid, dtype=torch.int32, device=source.device)
        slots = _slots(groups) if grouped else amax
        given = out if scale is None else scale.expand(grid).contiguous()
        part_rows, part_cols = source.part
        fours = turned and part_rows % 4 == 0
        codes = stored.view(torch.int32) if fours else stored if turned else stored.view(fmt.dtype)
        read = (source.values, source.scale, slots, amax)
        options = {
            "SOURCE": source.kind,
            "OF": of,
            "GROUPED": grouped,
            "WHOLE": part_rows % 128 == 0 and part_cols % 128 == 0,
            "ROW_PARTS": source.row_parts,
            "COL_PARTS": source.col_parts,
            "num_warps": 8,
            "enable_fp_fusion": False,
        }
        _amax_kernel[source.grid(128, 128)](*read, part_rows, part_cols, *source.strides(), **options)
        _wide_cast_kernel[source.grid(128, 128)](
            *read, given, codes, out, part_rows, part_cols, *source.strides(),
            FOURS=fours, TURNED=turned, GIVEN=scale is not None, POW2=kind == "pow2", **limits(fmt), **options,
        )  # fmt: skip
    codes = stored.view(fmt.dtype)
    return QuantizedTensor(
        codes.mT if turned else codes,
        out,
        fmt,
        Tile(128, tile.cols) if grouped else tile,
        source.shape,
        kind,
        1 if tile.rows is None else source.row_parts,
        1 if tile.cols is None else source.col_parts,
        one_scale_per_group=grouped and stored.numel() > 0,
    )


def _slots(groups: Tensor | None) -> Tensor:
    """A place below R / 128 for the expert of each block of 128 rows. Blocks of none (-1) are zeros: expert 0 takes them in."""
    assert groups is not None
    experts = groups.clamp(min=0)
    return torch.searchsorted(experts.sort().values, experts)


_STRIDES = ["x_scale_stride_e", "x_scale_stride_r", "x_scale_stride_c"]


@triton.jit
def _slot(slots, row_tile, e, GROUPED: tl.constexpr):
    """Where the matrix's, or the expert's, largest magnitudes are kept."""
    return tl.load(slots + row_tile) if GROUPED else e


@triton.jit(do_not_specialize=_STRIDES, do_not_specialize_on_alignment=["x_stride_c"])
def _amax_kernel(
    x, x_scale, slots, amax, part_rows, part_cols,
    x_stride_e, x_stride_r, x_stride_c, x_scale_stride_e, x_scale_stride_r, x_scale_stride_c,
    SOURCE: tl.constexpr, OF: tl.constexpr, GROUPED: tl.constexpr, WHOLE: tl.constexpr,
    ROW_PARTS: tl.constexpr, COL_PARTS: tl.constexpr,
):  # fmt: skip
    row, rows_left, row_tile = place(tl.program_id(1), part_rows, 128, ROW_PARTS)
    col, width, tile = place(tl.program_id(0), part_cols, 128, COL_PARTS)
    rows, cols = ROW_PARTS * part_rows, COL_PARTS * part_cols
    e = tl.program_id(2).to(tl.int64)
    a, b, c, d = load_fours(
        x + e * x_stride_e, x_scale + e * x_scale_stride_e, row, rows_left, col, width, tile,
        x_stride_r, x_stride_c, x_scale_stride_r, x_scale_stride_c, SOURCE, WHOLE, 128,
    )  # fmt: skip
    i = tl.arange(0, 128)
    if OF == "row":
        largest = in_order(
            largest_bits(tl.abs(a), 1), largest_bits(tl.abs(b), 1), largest_bits(tl.abs(c), 1), largest_bits(tl.abs(d), 1)
        )
        tl.atomic_max(amax + (e * rows + row) + i, largest, mask=i < rows_left, sem="relaxed")
    elif OF == "column":
        at = amax + (_slot(slots, row_tile, e, GROUPED) * cols + col)
        tl.atomic_max(at + i, largest_of_columns(a, b, c, d, 128), mask=i < width, sem="relaxed")
    else:
        of_rows = largest_bits(largest_of_fours(a, b, c, d), 1)
        tl.atomic_max(amax + _slot(slots, row_tile, e, GROUPED), tl.max(of_rows, 0), sem="relaxed")


@triton.jit(do_not_specialize=_STRIDES, do_not_specialize_on_alignment=["x_stride_c"])
def _wide_cast_kernel(
    x, x_scale, slots, amax, given, codes, scale, part_rows, part_cols,
    x_stride_e, x_stride_r, x_stride_c, x_scale_stride_e, x_scale_stride_r, x_scale_stride_c,
    SOURCE: tl.constexpr, OF: tl.constexpr, GROUPED: tl.constexpr, WHOLE: tl.constexpr,
    ROW_PARTS: tl.constexpr, COL_PARTS: tl.constexpr,
    FOURS: tl.constexpr, TURNED: tl.constexpr, GIVEN: tl.constexpr,
    LIMIT: tl.constexpr, LIMIT_BITS: tl.constexpr, POW2: tl.constexpr,
):  # fmt: skip
    row, rows_left, row_tile = place(tl.program_id(1), part_rows, 128, ROW_PARTS)
    col, width, tile = place(tl.program_id(0), part_cols, 128, COL_PARTS)
    rows, cols = ROW_PARTS * part_rows, COL_PARTS * part_cols
    e = tl.program_id(2).to(tl.int64)
    a, b, c, d = load_fours(
        x + e * x_stride_e, x_scale + e * x_scale_stride_e, row, rows_left, col, width, tile,
        x_stride_r, x_stride_c, x_scale_stride_r, x_scale_stride_c, SOURCE, WHOLE, 128,
    )  # fmt: skip
    grid_row = row_tile if GROUPED else e
    if OF == "row":
        first = e * rows + row
        a = _scaled_rows(a, 0, amax, scale, first, rows_left, LIMIT, LIMIT_BITS, POW2)
        b = _scaled_rows(b, 1, amax, scale, first, rows_left, LIMIT, LIMIT_BITS, POW2)
        c = _scaled_rows(c, 2, amax, scale, first, rows_left, LIMIT, LIMIT_BITS, POW2)
        d = _scaled_rows(d, 3, amax, scale, first, rows_left, LIMIT, LIMIT_BITS, POW2)
    else:
        if OF == "column":
            i = tl.arange(0, 128)
            largest = tl.load(amax + (_slot(slots, row_tile, e, GROUPED) * cols + col) + i, mask=i < width, other=0)
            s = scale_of(largest, LIMIT, LIMIT_BITS, POW2)
            tl.store(scale + (grid_row * cols + col) + i, s, mask=(i < width) & (GROUPED | (tl.program_id(1) == 0)))
            inverse = reciprocal(s)[None, :]
        else:
            largest = tl.load(amax + _slot(slots, row_tile, e, GROUPED))
            s = scale_of(largest, LIMIT, LIMIT_BITS, POW2)
            if GIVEN:
                s = tl.where(largest < 0x7F800000, tl.load(given + grid_row), s)  # poisoned all the same
            tl.store(scale + grid_row, s, mask=(tl.program_id(0) == 0) & (GROUPED | (tl.program_id(1) == 0)))
            inverse = reciprocal(s)
        a, b, c, d = a * inverse, b * inverse, c * inverse, d * inverse
    if TURNED:
        first = codes + e * cols * (rows // 4 if FOURS else rows)
        words = cast_four(a, b, c, d, LIMIT != 448.0)
        store_fours(first, words, row, rows_left, col, width, rows, FOURS, WHOLE, 128)
    else:
        first = codes + e * rows * cols
        store_rows(first, a, 0, row, rows_left, col, width, cols, WHOLE, 128)
        store_rows(first, b, 1, row, rows_left, col, width, cols, WHOLE, 128)
        store_rows(first, c, 2, row, rows_left, col, width, cols, WHOLE, 128)
        store_rows(first, d, 3, row, rows_left, col, width, cols, WHOLE, 128)


@triton.jit
def _scaled_rows(
    values, INDEX: tl.constexpr, amax, scale, first, rows_left, LIMIT: tl.constexpr, LIMIT_BITS: tl.constexpr,
    POW2: tl.constexpr,
):  # fmt: skip
    r_in = 4 * tl.arange(0, 32) + INDEX
    s = scale_of(tl.load(amax + first + r_in, mask=r_in < rows_left, other=0), LIMIT, LIMIT_BITS, POW2)
    tl.store(scale + first + r_in, s, mask=(r_in < rows_left) & (tl.program_id(0) == 0))
    return values * reciprocal(s)[:, None]
