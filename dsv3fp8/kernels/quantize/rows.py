"""1x128 tiles in Triton: from floats, or from codes in 1x128 tiles of another format or scale kind; and decoding of codes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv3fp8.kernels.quantize.device import limits, row_tiles, scaled_along
from dsv3fp8.kernels.quantize.e5m6 import store_e5m6
from dsv3fp8.kernels.quantize.source import Source, load_values, place
from dsv3fp8.precision.formats import E5M6, Format
from dsv3fp8.precision.tiles import QuantizedTensor

_ROWS = 32  # of one tile each, that a program holds


def quantize_rows(source: Source, fmt: Format, kind: str) -> QuantizedTensor:
    """Codes row by row, scales with the rows contiguous."""
    *lead, rows, cols = source.shape
    cast = row_tiles(rows, cols, fmt, kind, source.device, source.col_parts, source.row_parts, tuple(lead))
    codes, into = cast.codes, "e5m6 bytes" if fmt is E5M6 else "codes"
    if fmt is E5M6 and source.part[1] % 8 == 0:
        codes, into = codes.view(torch.int32), "e5m6 words"
    if codes.numel():
        _rows_kernel[_grid(source)](
            source.values, source.scale, codes, cast.scale, *source.part, codes.shape[-1], *source.strides(),
            SOURCE=source.kind, INTO=into, WHOLE=_whole(source), POW2=kind == "pow2", ROW_PARTS=source.row_parts,
            COL_PARTS=source.col_parts, ROWS=_ROWS, **limits(fmt), num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return cast


def decode_rows(source: Source, dtype: torch.dtype) -> Tensor:
    """fp32(code * scale), rounded to dtype (bf16, fp16 or fp32)."""
    out = torch.empty(source.shape, dtype=dtype, device=source.device)
    if out.numel():
        _decode_kernel[_grid(source)](
            source.values, source.scale, out, *source.part, *source.strides(), SOURCE=source.kind, WHOLE=_whole(source),
            ROW_PARTS=source.row_parts, COL_PARTS=source.col_parts, ROWS=_ROWS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _grid(source: Source) -> tuple[int, int]:
    """Blocks in one dimension: the second takes 65,535 at most, of 32 rows each."""
    col_blocks, row_blocks, matrices = source.grid(_ROWS, 128)
    return col_blocks * row_blocks, matrices


def _whole(source: Source) -> bool:
    return source.part[0] % _ROWS == 0 and source.part[1] % 128 == 0


# Compiled for whole blocks, and for what makes loads and stores wide; other numbers of rows all run the same kernel.
_ANY = ["part_rows", "x_scale_stride_e", "x_scale_stride_r", "x_scale_stride_c"]


@triton.jit(do_not_specialize=_ANY, do_not_specialize_on_alignment=["x_stride_c"])
def _rows_kernel(
    x, x_scale, codes, scale, part_rows, part_cols, codes_width,
    x_stride_e, x_stride_r, x_stride_c, x_scale_stride_e, x_scale_stride_r, x_scale_stride_c,
    SOURCE: tl.constexpr, INTO: tl.constexpr, WHOLE: tl.constexpr,
    LIMIT: tl.constexpr, LIMIT_BITS: tl.constexpr, POW2: tl.constexpr,
    ROW_PARTS: tl.constexpr, COL_PARTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    col_tiles = COL_PARTS * tl.cdiv(part_cols, 128)
    row, rows_left, _ = place(tl.program_id(0) // col_tiles, part_rows, ROWS, ROW_PARTS)
    col, width, tile = place(tl.program_id(0) % col_tiles, part_cols, 128, COL_PARTS)
    e = tl.program_id(1).to(tl.int64)
    r = tl.arange(0, ROWS)
    there = r < rows_left
    values = load_values(
        x + e * x_stride_e, x_scale + e * x_scale_stride_e, row, r, rows_left, col, width, tile,
        x_stride_r, x_stride_c, x_scale_stride_r, x_scale_stride_c, SOURCE, WHOLE, 0, ROWS, 128,
    )  # fmt: skip
    scaled, s = scaled_along(values, 1, LIMIT, LIMIT_BITS, POW2)
    rows = ROW_PARTS * part_rows
    tl.store(scale + ((e * col_tiles + tile) * rows + row) + r, s, mask=None if WHOLE else there)
    codes += (e * rows + row) * codes_width
    start = r * codes_width
    if INTO == "codes":
        c = tl.arange(0, 128)
        mask = None if WHOLE else there[:, None] & (c < width)[None, :]
        tl.store(codes + col + (start[:, None] + c[None, :]), scaled.to(codes.dtype.element_ty), mask=mask)
    else:
        store_e5m6(codes, start, there, col, width, scaled, s != s, INTO == "e5m6 words", WHOLE, ROWS, 128)


@triton.jit(do_not_specialize=_ANY, do_not_specialize_on_alignment=["x_stride_c"])
def _decode_kernel(
    x, x_scale, out, part_rows, part_cols,
    x_stride_e, x_stride_r, x_stride_c, x_scale_stride_e, x_scale_stride_r, x_scale_stride_c,
    SOURCE: tl.constexpr, WHOLE: tl.constexpr, ROW_PARTS: tl.constexpr, COL_PARTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    col_tiles = COL_PARTS * tl.cdiv(part_cols, 128)
    row, rows_left, _ = place(tl.program_id(0) // col_tiles, part_rows, ROWS, ROW_PARTS)
    col, width, tile = place(tl.program_id(0) % col_tiles, part_cols, 128, COL_PARTS)
    e = tl.program_id(1).to(tl.int64)
    r = tl.arange(0, ROWS)
    there = r < rows_left
    values = load_values(
        x + e * x_stride_e, x_scale + e * x_scale_stride_e, row, r, rows_left, col, width, tile,
        x_stride_r, x_stride_c, x_scale_stride_r, x_scale_stride_c, SOURCE, WHOLE, 8, ROWS, 128,
    )  # fmt: skip
    c = tl.arange(0, 128)
    cols = COL_PARTS * part_cols
    out += (e * (ROW_PARTS * part_rows) + row) * cols + col
    mask = None if WHOLE else there[:, None] & (c < width)[None, :]
    tl.store(out + (r[:, None] * cols + c[None, :]), values.to(out.dtype.element_ty), mask=mask)
