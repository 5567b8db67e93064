"""SwiGLU in Triton with its casts: the quantize box before it, the down projection's operand, dh in both orientations.

Bit for bit the reference: every operation is elementwise and rounds where the reference rounds (exp is CUDA's own, as
torch's). Only the gate weights' gradient is a sum, over tiles of 128 columns in order, in fp32.

Passes (bytes per element of the output): forward reads 4 of h in BF16, writes 2 of cache and 1 of codes; again, from the
cache, it reads 2 and writes 1; backward reads 2 of cache and 2 of dout, writes 2 in each orientation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from dsv3fp8.kernels.quantize.device import (
    INTERPRETED,
    column_tiles,
    limits,
    reciprocal,
    rounded_to_bf16,
    row_tiles,
    scale_of,
    scaled_along,
)
from dsv3fp8.kernels.swiglu import reference
from dsv3fp8.precision.formats import E4M3, E5M6, Format
from dsv3fp8.precision.tiles import ROW_128, Operand, QuantizedTensor, ceil_div

_EXACT = {"enable_fp_fusion": False, "enable_reflect_ftz": False}  # no operation but those written, subnormals kept
LOWEST_GATE = tl.constexpr(reference.LOWEST_GATE)
_ROWS = 32  # rows of one tile of gate and one of up that a program of the row kernel holds


def reason_against(h: Tensor | QuantizedTensor, fmt: Format | None = None) -> str | None:
    """Why these kernels cannot take SwiGLU of this input, or None when they can."""
    if isinstance(h, QuantizedTensor):
        if h.format is not E4M3 or h.tile != ROW_128 or h.col_parts != 2:
            return f"the Triton SwiGLU reads E4M3 in 1x128 tiles, halves on their own, not {h.format.name} {h.tile}"
    elif h.dtype != torch.bfloat16:
        return f"the Triton SwiGLU takes bf16, not {str(h.dtype).removeprefix('torch.')}"
    if fmt is E5M6:
        return f"no Triton SwiGLU casts to {fmt.name}"
    return None


def forward_cast(
    h: Tensor, weight: Tensor | None, cache_kind: str, through_cache: bool, fmt: Format, kind: str
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """`reference.forward_cast`; h bf16."""
    _refuse(reason_against(h, fmt))
    cache = row_tiles(h.shape[0], h.shape[1], E4M3, cache_kind, h.device, col_parts=2)
    return cache, _launch_forward(h, cache, through_cache, weight, fmt, kind)


def forward_again(cache: Operand, dtype: torch.dtype, weight: Tensor | None, fmt: Format, kind: str) -> QuantizedTensor:
    """`reference.forward_again` to bf16, from codes or from bf16."""
    _refuse(reason_against(cache, fmt) if dtype == torch.bfloat16 else f"the Triton SwiGLU rounds to bf16, not {dtype}")
    return _launch_forward(cache, None, False, weight, fmt, kind)


def backward_cast(
    cache: Operand, dout: Tensor, weight: Tensor | None, fmt: Format, kind: str
) -> tuple[QuantizedTensor, QuantizedTensor, Tensor | None]:
    """`reference.backward_cast` of bf16 dout. Codes in 128x1 tiles are stored with the tokens contiguous."""
    _refuse(reason_against(cache, fmt) or reason_against(dout))
    h, scale, strides = _source(cache)
    rows, cols = cache.shape
    dout = _dense_rows(dout)
    by_row, by_column = (make(rows, cols, fmt, kind, h.device, col_parts=2) for make in (row_tiles, column_tiles))
    col_blocks = ceil_div(cols // 2, 128)
    partial = torch.empty(col_blocks, rows, dtype=torch.float32, device=h.device) if weight is not None else None
    if h.numel():
        _backward_kernel[(ceil_div(rows, 128) * col_blocks,)](
            h, by_row.scale if scale is None else scale, dout, by_row.scale if weight is None else weight,
            by_row.codes, by_row.scale, by_column.codes, by_column.scale, by_row.scale if partial is None else partial,
            rows, cols // 2, *strides, dout.stride(0), CODES=scale is not None, WEIGHT=weight is not None,
            POW2=kind == "pow2", **limits(fmt), num_warps=8, **_EXACT,
        )  # fmt: skip
    return by_row, by_column, None if partial is None else partial.sum(0)


def _launch_forward(
    source: Operand, cache: QuantizedTensor | None, through_cache: bool, weight: Tensor | None, fmt: Format, kind: str
) -> QuantizedTensor:
    h, scale, strides = _source(source)
    rows, cols = source.shape[0], source.shape[1] // 2
    out = row_tiles(rows, cols, fmt, kind, h.device)
    if h.numel():
        into = cache or out
        of_cache = limits(E4M3)
        _forward_kernel[(ceil_div(rows, _ROWS) * ceil_div(cols, 128),)](
            h, out.scale if scale is None else scale, out.scale if weight is None else weight,
            into.codes, into.scale, out.codes, out.scale, rows, cols, *strides,
            CODES=scale is not None, CACHE=cache is not None, THROUGH=through_cache, WEIGHT=weight is not None,
            CACHE_LIMIT=of_cache["LIMIT"], CACHE_LIMIT_BITS=of_cache["LIMIT_BITS"], CACHE_POW2=into.scale_kind == "pow2",
            POW2=kind == "pow2", ROWS=_ROWS, **limits(fmt), num_warps=4, **_EXACT,
        )  # fmt: skip
    return out


def _source(h: Operand) -> tuple[Tensor, Tensor | None, tuple[int, int, int]]:
    """(bf16 values or codes, their scales, strides: of rows, of the scales' rows and columns)."""
    if not isinstance(h, QuantizedTensor):
        h = _dense_rows(h)
        return h, None, (h.stride(0), 0, 0)
    codes = _dense_rows(h.codes).view(torch.uint8)
    return codes, h.scale, (codes.stride(0), h.scale.stride(0), h.scale.stride(1))


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise ValueError(reason)


@triton.jit
def _sigmoid(x):
    """torch's, of the argument that the reference gives it."""
    x = tl.maximum(x, LOWEST_GATE, propagate_nan=tl.PropagateNan.ALL)
    if INTERPRETED:
        return reciprocal(1.0 + tl.exp(-x))
    return reciprocal(1.0 + libdevice.exp(-x))


@triton.jit
def _load(h, at, mask, scale, scale_at, scale_mask, CODES: tl.constexpr):
    """A block of one half of h, fp32, decoded where it is codes; zero outside."""
    if CODES:
        codes = tl.load(h + at, mask=mask, other=0).to(tl.float8e4nv, bitcast=True)
        return codes.to(tl.float32) * tl.load(scale + scale_at, mask=scale_mask, other=0.0)[:, None]
    return tl.load(h + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _cast_half(
    values, codes, scale, at, inside, scale_at, inside_r,
    LIMIT: tl.constexpr, LIMIT_BITS: tl.constexpr, POW2: tl.constexpr,
):  # fmt: skip
    """Stores a block in 1x128 tiles and gives back what was stored, decoded."""
    scaled, s = scaled_along(values, 1, LIMIT, LIMIT_BITS, POW2)
    code = scaled.to(codes.dtype.element_ty)
    tl.store(codes + at, code, mask=inside)
    tl.store(scale + scale_at, s, mask=inside_r)
    return code.to(tl.float32) * s[:, None]


@triton.jit(do_not_specialize=["rows", "scale_stride_r", "scale_stride_c"])
def _forward_kernel(
    h, h_scale, weight, cache, cache_scale, out, out_scale, rows, cols, h_stride, scale_stride_r, scale_stride_c,
    CODES: tl.constexpr, CACHE: tl.constexpr, THROUGH: tl.constexpr, WEIGHT: tl.constexpr,
    CACHE_LIMIT: tl.constexpr, CACHE_LIMIT_BITS: tl.constexpr, CACHE_POW2: tl.constexpr,
    LIMIT: tl.constexpr, LIMIT_BITS: tl.constexpr, POW2: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    col_blocks = tl.cdiv(cols, 128)
    tile_in = tl.program_id(0) % col_blocks
    r_in = tl.program_id(0) // col_blocks * ROWS + tl.arange(0, ROWS)
    c = tile_in * 128 + tl.arange(0, 128)
    r, tile = r_in.to(tl.int64), tile_in.to(tl.int64)
    there = r_in < rows
    inside = there[:, None] & (c < cols)[None, :]
    at = r[:, None] * h_stride + c[None, :]
    scale_at = r * scale_stride_r + tile * scale_stride_c
    gate = _load(h, at, inside, h_scale, scale_at, there, CODES)
    up = _load(h, at + cols, inside, h_scale, scale_at + col_blocks.to(tl.int64) * scale_stride_c, there, CODES)
    if CACHE:
        into = r[:, None] * (2 * cols) + c[None, :]
        first = tile * rows + r
        kept_gate = _cast_half(
            gate, cache, cache_scale, into, inside, first, there, CACHE_LIMIT, CACHE_LIMIT_BITS, CACHE_POW2
        )
        kept_up = _cast_half(
            up, cache, cache_scale, into + cols, inside, first + col_blocks.to(tl.int64) * rows, there,
            CACHE_LIMIT, CACHE_LIMIT_BITS, CACHE_POW2,
        )  # fmt: skip
        if THROUGH:
            gate, up = kept_gate, kept_up
    act = gate * _sigmoid(gate) * up
    if WEIGHT:
        act = act * tl.load(weight + r, mask=there, other=0.0)[:, None]
    rounded = rounded_to_bf16(act)
    _cast_half(rounded, out, out_scale, r[:, None] * cols + c[None, :], inside, tile * rows + r, there, LIMIT, LIMIT_BITS, POW2)


@triton.jit
def _pack(low, high):
    """Two fp32 numbers, rounded to BF16, in one register: half of the registers that they would be held in otherwise."""
    if INTERPRETED:
        low_bits = low.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return low_bits | (high.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    cast: tl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    return tl.inline_asm_elementwise(cast, "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _low(pair):
    return (pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(pair):
    return (pair & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _larger_pair(a, b):
    return tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _scales(pair, AXIS: tl.constexpr, LIMIT: tl.constexpr, LIMIT_BITS: tl.constexpr, POW2: tl.constexpr):
    """Scales of both halves of a block along an axis; BF16 magnitudes compare as 16-bit integers, two in one instruction."""
    magnitudes = pair & 0x7FFF7FFF
    if INTERPRETED:
        largest = tl.max(magnitudes & 0xFFFF, AXIS) | tl.max(magnitudes & -65536, AXIS)
    else:
        largest = tl.reduce(magnitudes, AXIS, _larger_pair)
    return scale_of(largest << 16, LIMIT, LIMIT_BITS, POW2), scale_of(largest & -65536, LIMIT, LIMIT_BITS, POW2)


@triton.jit
def _store_scaled(values, s, AXIS: tl.constexpr, codes, scale, at, inside, scale_at, inside_scale):
    scaled = values * tl.expand_dims(reciprocal(s), AXIS)
    tl.store(codes + at, scaled.to(codes.dtype.element_ty), mask=inside)
    tl.store(scale + scale_at, s, mask=inside_scale)


# Compiled for numbers of rows that are multiples of 16, as the experts' are, and for all others.
@triton.jit(do_not_specialize=["scale_stride_r", "scale_stride_c"])
def _backward_kernel(
    h, h_scale, dout, weight, codes, scale, codes_t, scale_t, partial, rows, cols,
    h_stride, scale_stride_r, scale_stride_c, dout_stride,
    CODES: tl.constexpr, WEIGHT: tl.constexpr, LIMIT: tl.constexpr, LIMIT_BITS: tl.constexpr, POW2: tl.constexpr,
):  # fmt: skip
    """dh of 128 rows and 128 columns of either half, cast along the rows and along the columns."""
    col_blocks = tl.cdiv(cols, 128)
    tile_in = tl.program_id(0) % col_blocks
    tile, tile_r = tile_in.to(tl.int64), (tl.program_id(0) // col_blocks).to(tl.int64)
    r_in = tl.program_id(0) // col_blocks * 128 + tl.arange(0, 128)
    c_in = tile_in * 128 + tl.arange(0, 128)
    r, c = r_in.to(tl.int64), c_in.to(tl.int64)
    there, exists = r_in < rows, c_in < cols
    inside = there[:, None] & exists[None, :]
    at = r[:, None] * h_stride + c[None, :]
    scale_at = r * scale_stride_r + tile * scale_stride_c
    gate = _load(h, at, inside, h_scale, scale_at, there, CODES)
    up = _load(h, at + cols, inside, h_scale, scale_at + col_blocks.to(tl.int64) * scale_stride_c, there, CODES)
    grad = tl.load(dout + (r[:, None] * dout_stride + c[None, :]), mask=inside, other=0.0).to(tl.float32)
    sigmoid = _sigmoid(gate)
    silu = gate * sigmoid
    dgate = grad * up * (sigmoid + silu * (1.0 - sigmoid))
    dup = grad * silu
    if WEIGHT:
        tl.store(partial + tile * rows + r, tl.sum(dup * up, 1), mask=there)
        w = tl.load(weight + r, mask=there, other=0.0)[:, None]
        dgate = dgate * w
        dup = dup * w
    pair = _pack(dgate, dup)

    into = r[:, None] * (2 * cols) + c[None, :]
    first = tile * rows + r
    s_gate, s_up = _scales(pair, 1, LIMIT, LIMIT_BITS, POW2)
    _store_scaled(_low(pair), s_gate, 1, codes, scale, into, inside, first, there)
    _store_scaled(_high(pair), s_up, 1, codes, scale, into + cols, inside, first + col_blocks.to(tl.int64) * rows, there)
    into = r[:, None] + c[None, :] * rows
    first = tile_r * (2 * cols) + c
    s_gate, s_up = _scales(pair, 0, LIMIT, LIMIT_BITS, POW2)
    _store_scaled(_low(pair), s_gate, 0, codes_t, scale_t, into, inside, first, exists)
    _store_scaled(_high(pair), s_up, 0, codes_t, scale_t, into + tl.cast(cols, tl.int64) * rows, inside, first + cols, exists)
