"""Quantize and re-tile in Triton: the reference's codes and scales, bit for bit, on a GPU.

One kernel: a program reads a block of at most 128x128 values (floats, or codes that it decodes), takes the largest
magnitude of each tile in it, and writes codes and scales. Magnitudes are compared as integers: the bits of |x| order as
|x| does, with inf above every number and NaN above inf, so that neither is dropped (tl.max drops NaN).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv3fp8.kernels.quantize.device import limits, magnitude_bits, reciprocal, scale_of
from dsv3fp8.precision import flush
from dsv3fp8.precision.formats import E5M6, Format
from dsv3fp8.precision.tiles import BLOCK_128, COLUMN_128, ROW_128, QuantizedTensor, Tile, ceil_div, grid_size

_BLOCKS = {ROW_128: (32, 128), COLUMN_128: (128, 64), BLOCK_128: (128, 128)}  # values that one program casts, by tile
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)

_INFINITY = tl.constexpr(0x7F800000)


def reason_against(
    fmt: Format, tile: Tile, cols: int, col_parts: int = 1, groups: Tensor | None = None, scale: Tensor | None = None
) -> str | None:
    """Why these kernels cannot quantize as asked, or None when they can. cols: width of the whole matrix."""
    if tile not in _BLOCKS:
        return f"no Triton kernel for tile {tile}"
    if groups is not None or scale is not None:
        return "no Triton kernel for given scales"
    if fmt is E5M6 and tile != ROW_128:
        return f"no Triton kernel for {fmt.name} with tile {tile}"
    if fmt is E5M6 and col_parts > 1 and (cols // col_parts) % 2:
        return "halves of odd width share the bytes of a packed pair"
    if flush.active_meter() is not None:
        return "flushed values are being counted"
    return None


def reason_against_source(source: QuantizedTensor) -> str | None:
    """Why these kernels cannot re-tile from this tensor, or None when they can."""
    if source.tile != ROW_128:
        return f"no Triton kernel re-tiles from {source.tile}"
    if source.codes.stride(-1) != 1:
        return "codes are not contiguous along the rows"
    return None


def quantize(
    x: Tensor, fmt: Format, tile: Tile, kind: str = "fp32", *, row_parts: int = 1, col_parts: int = 1
) -> QuantizedTensor:
    """`reference.quantize` for tiles 1x128, 128x1 and 128x128 (E5M6: 1x128).

    x: [..., R, C] bf16, fp16 or fp32 (others are converted first), any strides. Raises ValueError where `reason_against`
    gives a reason.
    """
    if x.dtype not in _FLOATS:
        x = x.to(torch.float32)
    return _launch(x, None, fmt, tile, kind, row_parts, col_parts)


def retile(source: QuantizedTensor, tile: Tile, kind: str | None = None, *, fmt: Format | None = None) -> QuantizedTensor:
    """`reference.retile` from 1x128 tiles: code -> fp32(code * scale) -> code, in one pass."""
    if (against := reason_against_source(source)) is not None:
        raise ValueError(against)
    return _launch(
        source.codes,
        source,
        fmt or source.format,
        tile,
        kind or source.scale_kind,
        source.row_parts,
        source.col_parts,
    )


def _launch(
    x: Tensor, source: QuantizedTensor | None, fmt: Format, tile: Tile, kind: str, row_parts: int, col_parts: int
) -> QuantizedTensor:
    shape = tuple(x.shape) if source is None else source.shape
    *lead, rows, cols = shape
    if (against := reason_against(fmt, tile, cols, col_parts)) is not None:
        raise ValueError(against)
    if kind not in ("fp32", "pow2"):
        raise ValueError(f"scale kind {kind!r}: fp32 or pow2")
    grid = (*lead, grid_size(rows, tile.rows, row_parts), grid_size(cols, tile.cols, col_parts))
    width = ceil_div(cols, 2) * 3 if fmt is E5M6 else cols
    codes = torch.empty(*lead, rows, width, dtype=torch.uint8, device=x.device).view(fmt.dtype)
    scale = torch.empty(grid, dtype=torch.float32, device=x.device)
    if codes.numel():
        x = x.reshape(-1, *x.shape[-2:])  # a view unless leading dimensions cannot be joined
        source_scale = x if source is None else source.scale.reshape(-1, *source.scale.shape[-2:])
        block_rows, block_cols = _BLOCKS[tile]
        part_rows, part_cols = rows // row_parts, cols // col_parts
        row_blocks, col_blocks = ceil_div(part_rows, block_rows), ceil_div(part_cols, block_cols)
        programs = x.shape[0] * row_parts * row_blocks * col_parts * col_blocks
        _quantize_kernel[(programs,)](
            x.view(torch.uint8) if source is not None and source.format is E5M6 else x,
            source_scale,
            codes,
            scale,
            part_rows,
            part_cols,
            row_parts,
            col_parts,
            *x.stride(),
            *source_scale.stride(),
            SOURCE="float" if source is None else "packed" if source.format is E5M6 else "codes",
            PACKED=fmt is E5M6,
            **limits(fmt),
            POW2=kind == "pow2",
            TILE_ROWS=tile.rows,
            TILE_COLS=tile.cols,
            BLOCK_ROWS=block_rows,
            BLOCK_COLS=block_cols,
            num_warps=4 if tile == ROW_128 else 8,
            enable_fp_fusion=False,
        )
    return QuantizedTensor(codes, scale, fmt, tile, tuple(shape), kind, row_parts, col_parts)


# Only what makes loads and stores wide is compiled for; every number of rows runs the same kernel.
@triton.jit(
    do_not_specialize_on_alignment=["x_stride_c"],
    do_not_specialize=[
        "part_rows", "row_parts", "col_parts", "x_scale_stride_e", "x_scale_stride_r", "x_scale_stride_c",
    ],
)  # fmt: skip
def _quantize_kernel(
    x,
    x_scale,
    codes,
    scale,
    part_rows,
    part_cols,
    row_parts,
    col_parts,
    x_stride_e,
    x_stride_r,
    x_stride_c,
    x_scale_stride_e,
    x_scale_stride_r,
    x_scale_stride_c,
    SOURCE: tl.constexpr,
    PACKED: tl.constexpr,
    LIMIT: tl.constexpr,
    LIMIT_BITS: tl.constexpr,
    POW2: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    row_blocks = tl.cdiv(part_rows, BLOCK_ROWS)
    col_blocks = tl.cdiv(part_cols, BLOCK_COLS)
    program = tl.program_id(0)
    col_block = program % (col_parts * col_blocks)
    row_block = program // (col_parts * col_blocks) % (row_parts * row_blocks)
    e = (program // (col_parts * col_blocks) // (row_parts * row_blocks)).to(tl.int64)
    # Rows and columns inside their part, then in the whole matrix: a block never reaches over the border of a part.
    r_in = row_block % row_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    c_in = col_block % col_blocks * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    r = (row_block // row_blocks * part_rows + r_in).to(tl.int64)
    c = (col_block // col_blocks * part_cols + c_in).to(tl.int64)
    inside = (r_in < part_rows)[:, None] & (c_in < part_cols)[None, :]
    rows = row_parts * part_rows
    cols = col_parts * part_cols

    source = x + e * x_stride_e
    if SOURCE == "packed":
        values = _load_e5m6(source + r[:, None] * x_stride_r, c[None, :], inside)
    else:
        values = tl.load(source + r[:, None] * x_stride_r + c[None, :] * x_stride_c, mask=inside).to(tl.float32)
    if SOURCE != "float":  # 1x128 tiles: one column of the source's grid for the whole block
        tile_c = col_block // col_blocks * tl.cdiv(part_cols, 128) + col_block % col_blocks * BLOCK_COLS // 128
        s = tl.load(x_scale + e * x_scale_stride_e + r * x_scale_stride_r + tile_c * x_scale_stride_c, mask=r_in < part_rows)
        values = values * s[:, None]
    values = tl.where(inside, values, 0.0)

    magnitude = magnitude_bits(values)
    if TILE_ROWS == 1:  # 1x128
        s = scale_of(tl.max(magnitude, 1), LIMIT, LIMIT_BITS, POW2)
        tl.store(scale + (e * rows + r) * (col_parts * col_blocks) + col_block, s, mask=r_in < part_rows)
        s = s[:, None]
    elif TILE_COLS == 1:  # 128x1
        s = scale_of(tl.max(magnitude, 0), LIMIT, LIMIT_BITS, POW2)
        tl.store(scale + (e * row_parts * row_blocks + row_block) * cols + c, s, mask=c_in < part_cols)
        s = s[None, :]
    else:  # 128x128
        s = scale_of(tl.max(tl.max(magnitude, 1), 0), LIMIT, LIMIT_BITS, POW2)
        tl.store(scale + (e * row_parts * row_blocks + row_block) * (col_parts * col_blocks) + col_block, s)
    scaled = values * reciprocal(s)
    scaled = tl.clamp(scaled, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)

    if PACKED:
        code = tl.where(inside, _encode_e5m6(scaled), 0)
        low, high = tl.split(tl.reshape(code, (BLOCK_ROWS, BLOCK_COLS // 2, 2)))
        pair_in = col_block % col_blocks * (BLOCK_COLS // 2) + tl.arange(0, BLOCK_COLS // 2)
        pair = (col_block // col_blocks * (part_cols // 2) + pair_in).to(tl.int64)
        there = (r_in < part_rows)[:, None] & (2 * pair_in < part_cols)[None, :]
        into = codes + (e * rows + r)[:, None] * ((cols + 1) // 2 * 3) + pair[None, :] * 3
        tl.store(into, (low & 0xFF).to(tl.uint8), mask=there)
        tl.store(into + 1, (low >> 8 | (high & 0xF) << 4).to(tl.uint8), mask=there)
        tl.store(into + 2, (high >> 4).to(tl.uint8), mask=there)
    else:
        into = codes + (e * rows + r)[:, None] * cols + c[None, :]
        tl.store(into, scaled.to(codes.dtype.element_ty), mask=inside)


@triton.jit
def _encode_e5m6(values):
    """`formats.encode_e5m6`: fp32, clamped or NaN, to 12-bit codes in int32."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0xFFFF + ((magnitude >> 17) & 1)) >> 17) - ((127 - 15) << 6)
    # Multiples of 2^-20: adding 2^23 leaves no fraction bits, so that the addition itself rounds to nearest even.
    steps = tl.where(magnitude < ((127 - 14) << 23), magnitude, 0).to(tl.float32, bitcast=True) * 1048576.0
    subnormal = (steps + 8388608.0).to(tl.int32, bitcast=True) & 0x7FFFFF
    code = tl.where(magnitude < ((127 - 14) << 23), subnormal, normal)
    code = code | (((bits >> 31) & 1) << 11)
    return tl.where(magnitude > _INFINITY, 0x7E0, code)


@triton.jit
def _load_e5m6(row, c, mask):
    """`formats.decode_e5m6` of column c of packed rows, fp32. Column c's 12 bits lie in the bytes 3c/2 and 3c/2 + 1."""
    first = row + c * 3 // 2
    word = tl.load(first, mask=mask).to(tl.int32) | tl.load(first + 1, mask=mask).to(tl.int32) << 8
    code = (word >> ((c & 1) * 4).to(tl.int32)) & 0xFFF
    exponent = (code >> 6) & 0x1F
    mantissa = code & 0x3F
    normal = ((exponent + (127 - 15)) << 23 | mantissa << 17).to(tl.float32, bitcast=True)
    special = (mantissa << 17 | _INFINITY).to(tl.float32, bitcast=True)
    value = tl.where(exponent == 31, special, normal)
    value = tl.where(exponent == 0, mantissa.to(tl.float32) * (1.0 / 1048576.0), value)
    # The sign by its bit: Triton's -value is 0 - value, which loses the sign of zero.
    return (value.to(tl.int32, bitcast=True) | code >> 11 << 31).to(tl.float32, bitcast=True)
