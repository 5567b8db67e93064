"""SwiGLU in Triton, plain or with its casts: the quantize box before it, the down projection's operand, dh both ways.

Bit for bit the reference: every operation is elementwise and rounds where the reference rounds (exp is CUDA's own, as
torch's). Only the gate weights' gradient is a sum, over tiles of 128 columns in order, in fp32.

Passes (bytes per element of the output): forward reads 4 of h in BF16, writes 2 of cache and 1 of codes; again, from the
cache, it reads 2 and writes 1; backward reads 2 of cache and 2 of dout, writes 2 in each orientation. Without casts forward
reads 4 (of h, or 2 of cache) and writes 2; backward reads 2 more, of dout, and writes 4.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv3fp8.kernels.quantize.device import (
    INTERPRETED,
    column_tiles,
    limits,
    reciprocal,
    rounded_to_bf16,
    row_tiles,
    scaled_along,
)
from dsv3fp8.kernels.quantize.fours import VECTOR
from dsv3fp8.kernels.quantize.pairs import cast_columns, cast_rows, pack, store_of_rows
from dsv3fp8.kernels.swiglu import reference
from dsv3fp8.precision.formats import E4M3, E5M6, Format
from dsv3fp8.precision.tiles import ROW_128, Operand, QuantizedTensor, ceil_div

_EXACT = {"enable_fp_fusion": False, "enable_reflect_ftz": False}  # no operation but those written, subnormals kept
LOWEST_GATE = tl.constexpr(reference.LOWEST_GATE)
_ROWS = 16  # rows of one tile of gate and one of up that a program of the row kernels holds


def reason_against(h: Operand, fmt: Format | None = None, dtype: torch.dtype = torch.bfloat16) -> str | None:
    """Why these kernels cannot take SwiGLU of this input, rounded to dtype, or None when they can."""
    if dtype != torch.bfloat16:
        return f"the Triton SwiGLU rounds to bf16, not {str(dtype).removeprefix('torch.')}"
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
    rows, cols = h.shape
    cache = row_tiles(rows, cols, E4M3, cache_kind, h.device, col_parts=2)
    out = row_tiles(rows, cols // 2, fmt, kind, h.device)
    _launch_forward(h, cache, through_cache, weight, out, fmt, kind)
    return cache, out


def forward_again(cache: Operand, dtype: torch.dtype, weight: Tensor | None, fmt: Format, kind: str) -> QuantizedTensor:
    """`reference.forward_again` to bf16, from codes or from bf16."""
    _refuse(reason_against(cache, fmt, dtype))
    out = row_tiles(cache.shape[0], cache.shape[1] // 2, fmt, kind, _source(cache)[0].device)
    _launch_forward(cache, None, False, weight, out, fmt, kind)
    return out


def forward(h: Operand, dtype: torch.dtype, weight: Tensor | None = None) -> Tensor:
    """`reference.forward` to bf16, of bf16 or of codes."""
    _refuse(reason_against(h, dtype=dtype))
    out = torch.empty(h.shape[0], h.shape[1] // 2, dtype=dtype, device=_source(h)[0].device)
    _launch_forward(h, None, False, weight, out, E4M3, "fp32")
    return out


def backward(h: Operand, dout: Tensor, dtype: torch.dtype, weight: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """`reference.backward` to bf16, of bf16 or of codes."""
    _refuse(reason_against(h, dtype=dtype) or reason_against(dout))
    values, scale, strides = _source(h)
    rows, cols = h.shape[0], h.shape[1] // 2
    dout, dh = _dense_rows(dout), torch.empty(rows, 2 * cols, dtype=dtype, device=dout.device)
    tiles = ceil_div(cols, 128)
    partial = torch.empty(tiles, rows, dtype=torch.float32, device=dout.device) if weight is not None else None
    if dh.numel():
        _swiglu_backward_kernel[(ceil_div(rows, _ROWS) * tiles,)](
            values, values if scale is None else scale, dout, dout if weight is None else weight, dh,
            dout if partial is None else partial, rows, cols, *strides, dout.stride(0),
            CODES=scale is not None, WEIGHT=weight is not None, ROWS=_ROWS, num_warps=2, **_EXACT,
        )  # fmt: skip
    return dh, None if partial is None else partial.sum(0)


def backward_cast(
    cache: Operand, dout: Tensor, weight: Tensor | None, fmt: Format, kind: str
) -> tuple[QuantizedTensor, QuantizedTensor, Tensor | None]:
    """`reference.backward_cast` of bf16 dout. Codes in 128x1 tiles are stored with the tokens contiguous."""
    _refuse(reason_against(cache, fmt) or reason_against(dout))
    h, scale, (h_stride, *scale_strides) = _source(cache)
    rows, cols = cache.shape
    dout = _dense_rows(dout)
    by_row, by_column = (make(rows, cols, fmt, kind, h.device, col_parts=2) for make in (row_tiles, column_tiles))
    tiles = ceil_div(cols // 2, 128)
    partial = torch.empty(tiles, rows, dtype=torch.float32, device=h.device) if weight is not None else None
    if h.numel():
        codes, fours = by_column.codes.mT.view(torch.uint8), rows % 4 == 0
        _swiglu_backward_cast_kernel[(ceil_div(rows, 128) * tiles,)](
            h, by_row.scale if scale is None else scale, dout, by_row.scale if weight is None else weight,
            by_row.codes, by_row.scale, codes.view(torch.int32) if fours else codes, by_column.scale,
            by_row.scale if partial is None else partial, rows, *scale_strides,
            H_STRIDE=h_stride, DOUT_STRIDE=dout.stride(0), COLS=cols // 2, CODES=scale is not None, WEIGHT=weight is not None,
            FOURS=fours, WHOLE=rows % 128 == 0 and cols % 256 == 0, POW2=kind == "pow2", **limits(fmt),
            num_warps=8, maxnreg=128, **_EXACT,
        )  # fmt: skip
    return by_row, by_column, None if partial is None else partial.sum(0)


def _launch_forward(
    source: Operand, cache: QuantizedTensor | None, through_cache: bool, weight: Tensor | None,
    out: QuantizedTensor | Tensor, fmt: Format, kind: str,
) -> None:  # fmt: skip
    h, scale, strides = _source(source)
    rows, cols = source.shape[0], source.shape[1] // 2
    if h.numel():
        codes, scales = (out.codes, out.scale) if isinstance(out, QuantizedTensor) else (out, out)
        kept, kept_scale = (cache.codes, cache.scale) if cache is not None else (codes, scales)
        of_cache = limits(E4M3)
        _swiglu_forward_kernel[(ceil_div(rows, _ROWS) * ceil_div(cols, 128),)](
            h, scales if scale is None else scale, scales if weight is None else weight, kept, kept_scale, codes, scales,
            rows, cols, *strides, CODES=scale is not None, CACHE=cache is not None, THROUGH=through_cache,
            WEIGHT=weight is not None, CAST=isinstance(out, QuantizedTensor), CACHE_LIMIT=of_cache["LIMIT"],
            CACHE_LIMIT_BITS=of_cache["LIMIT_BITS"], CACHE_POW2=cache is not None and cache.scale_kind == "pow2",
            POW2=kind == "pow2", ROWS=_ROWS, **limits(fmt), num_warps=2, **_EXACT,
        )  # fmt: skip


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
def _one_plus_exp_of_minus(x):
    """1 + exp(-x) for x from LOWEST_GATE: CUDA's exp, whose last product, by a power of two, is exact and joins the sum."""
    if INTERPRETED:
        return 1.0 + tl.exp(-x)
    expf: tl.constexpr = (
        "{ .reg .f32 minus, power, rest; neg.f32 minus, $1; fma.rn.sat.f32 power, minus, 0f3BBB989D, 0f3F000000; "
        "fma.rm.f32 power, power, 0f437C0000, 0f4B400001; add.rn.f32 rest, power, 0fCB40007F; neg.f32 rest, rest; "
        "fma.rn.f32 rest, minus, 0f3FB8AA3B, rest; fma.rn.f32 rest, minus, 0f32A57060, rest; shl.b32 power, power, 23; "
        "ex2.approx.ftz.f32 rest, rest; fma.rn.f32 $0, rest, power, 0f3F800000; }"
    )
    return tl.inline_asm_elementwise(expf, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _sigmoid(x):
    """torch's, of the argument that the reference gives it."""
    return reciprocal(_one_plus_exp_of_minus(tl.maximum(x, LOWEST_GATE, propagate_nan=tl.PropagateNan.ALL)))


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
def _swiglu_forward_kernel(
    h, h_scale, weight, cache, cache_scale, out, out_scale, rows, cols, h_stride, scale_stride_r, scale_stride_c,
    CODES: tl.constexpr, CACHE: tl.constexpr, THROUGH: tl.constexpr, WEIGHT: tl.constexpr, CAST: tl.constexpr,
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
        kept_gate = _cast_half(gate, cache, cache_scale, into, inside, first, there, CACHE_LIMIT, CACHE_LIMIT_BITS, CACHE_POW2)
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
    at = r[:, None] * cols + c[None, :]
    if CAST:
        _cast_half(rounded, out, out_scale, at, inside, tile * rows + r, there, LIMIT, LIMIT_BITS, POW2)
    else:
        tl.store(out + at, rounded.to(tl.bfloat16), mask=inside)


@triton.jit
def _gradient(gate, up, grad):
    """(gradient of gate, of up) of SwiGLU without a weight."""
    sigmoid = _sigmoid(gate)
    silu = gate * sigmoid
    return grad * up * (sigmoid + silu * (1.0 - sigmoid)), grad * silu


@triton.jit(do_not_specialize=["rows", "scale_stride_r", "scale_stride_c"])
def _swiglu_backward_kernel(
    h, h_scale, dout, weight, dh, partial, rows, cols, h_stride, scale_stride_r, scale_stride_c, dout_stride,
    CODES: tl.constexpr, WEIGHT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dh in BF16 of some rows and 128 columns of either half."""
    tiles = tl.cdiv(cols, 128)
    tile_in = tl.program_id(0) % tiles
    r_in = tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)
    c = tile_in * 128 + tl.arange(0, 128)
    r, tile = r_in.to(tl.int64), tile_in.to(tl.int64)
    there = r_in < rows
    inside = there[:, None] & (c < cols)[None, :]
    at = r[:, None] * h_stride + c[None, :]
    scale_at = r * scale_stride_r + tile * scale_stride_c
    gate = _load(h, at, inside, h_scale, scale_at, there, CODES)
    up = _load(h, at + cols, inside, h_scale, scale_at + tiles.to(tl.int64) * scale_stride_c, there, CODES)
    grad = tl.load(dout + (r[:, None] * dout_stride + c[None, :]), mask=inside, other=0.0).to(tl.float32)
    dgate, dup = _gradient(gate, up, grad)
    if WEIGHT:
        tl.store(partial + tile * rows + r, tl.sum(dup * up, 1), mask=there)
        w = tl.load(weight + r, mask=there, other=0.0)[:, None]
        dgate = dgate * w
        dup = dup * w
    into = dh + (r[:, None] * (2 * cols) + c[None, :])
    tl.store(into, rounded_to_bf16(dgate).to(tl.bfloat16), mask=inside)
    tl.store(into + cols, rounded_to_bf16(dup).to(tl.bfloat16), mask=inside)


@triton.jit
def _gradient_of_rows(
    h, h_scale, dout, weight, INDEX: tl.constexpr, rows_left, width, scale_stride_r, up_scale,
    H_STRIDE: tl.constexpr, DOUT_STRIDE: tl.constexpr, COLS: tl.constexpr,
    CODES: tl.constexpr, WEIGHT: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """(gradients of gate and of up, fp32 [32, 128], sums of gradient times up, [32]) of rows 4i + INDEX of a block.

    Pointers are to the block's first element; up_scale: from the scales of gate to those of up.
    """
    r, c = 4 * tl.arange(0, 32) + INDEX, tl.arange(0, 128)
    there = None if WHOLE else r < rows_left
    inside = None if WHOLE else (r < rows_left)[:, None] & (c < width)[None, :]
    at = h + tl.max_contiguous(r[:, None] * H_STRIDE + c[None, :], [1, VECTOR])
    gate, up = tl.load(at, mask=inside), tl.load(at + COLS, mask=inside)
    grad = tl.load(dout + (r[:, None] * DOUT_STRIDE + c[None, :]), mask=inside).to(tl.float32)
    if CODES:
        scales = h_scale + r * scale_stride_r
        gate = gate.to(tl.float8e4nv, bitcast=True).to(tl.float32) * tl.load(scales, mask=there)[:, None]
        up = up.to(tl.float8e4nv, bitcast=True).to(tl.float32) * tl.load(scales + up_scale, mask=there)[:, None]
    else:
        gate, up = gate.to(tl.float32), up.to(tl.float32)
    dgate, dup = _gradient(gate, up, grad)
    product = tl.zeros((32,), tl.float32)
    if WEIGHT:
        product = tl.sum(dup * up, 1)
        w = tl.load(weight + r, mask=there)[:, None]
        dgate = dgate * w
        dup = dup * w
    return dgate, dup, product


# Compiled for strides of scales that are multiples of 16, as with the experts' numbers of rows, and for all others.
@triton.jit(do_not_specialize=["scale_stride_c"])
def _swiglu_backward_cast_kernel(
    h, h_scale, dout, weight, codes, scale, codes_t, scale_t, partial, rows, scale_stride_r, scale_stride_c,
    H_STRIDE: tl.constexpr, DOUT_STRIDE: tl.constexpr, COLS: tl.constexpr, CODES: tl.constexpr, WEIGHT: tl.constexpr,
    FOURS: tl.constexpr, WHOLE: tl.constexpr, LIMIT: tl.constexpr, LIMIT_BITS: tl.constexpr, POW2: tl.constexpr,
):  # fmt: skip
    """dh of 128 rows and 128 columns of either half, cast along the rows and along the columns."""
    tiles: tl.constexpr = (COLS + 127) // 128
    tile, tile_r = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    row, col = tile_r * 128, tile * 128
    rows_left, width = rows - row, COLS - col
    r, t = row.to(tl.int64), tile.to(tl.int64)
    h += r * H_STRIDE + col
    dout += r * DOUT_STRIDE + col
    h_scale += r * scale_stride_r + t * scale_stride_c
    up_scale = tiles * scale_stride_c.to(tl.int64)
    scale += t * rows + r
    above = scale + tiles * rows.to(tl.int64)  # scales of up, which lie behind those of gate
    partial += t * rows + r
    weight += r
    up_codes, up_codes_t = codes + COLS, codes_t + COLS * (rows // 4 if FOURS else rows).to(tl.int64)
    scale_t += tile_r.to(tl.int64) * (2 * COLS) + col

    dgate, dup, sum0 = _gradient_of_rows(
        h, h_scale, dout, weight, 0, rows_left, width, scale_stride_r, up_scale, H_STRIDE, DOUT_STRIDE, COLS,
        CODES, WEIGHT, WHOLE,
    )  # fmt: skip
    next_dgate, next_dup, sum1 = _gradient_of_rows(
        h, h_scale, dout, weight, 1, rows_left, width, scale_stride_r, up_scale, H_STRIDE, DOUT_STRIDE, COLS,
        CODES, WEIGHT, WHOLE,
    )  # fmt: skip
    if WEIGHT:
        store_of_rows(partial, sum0, sum1, 0, rows_left, WHOLE)
    gate01, up01 = pack(dgate, next_dgate), pack(dup, next_dup)
    cast_rows(codes, scale, gate01, 0, row, rows_left, col, width, 2 * COLS, LIMIT, LIMIT_BITS, POW2, WHOLE)
    cast_rows(up_codes, above, up01, 0, row, rows_left, col, width, 2 * COLS, LIMIT, LIMIT_BITS, POW2, WHOLE)
    dgate, dup, sum2 = _gradient_of_rows(
        h, h_scale, dout, weight, 2, rows_left, width, scale_stride_r, up_scale, H_STRIDE, DOUT_STRIDE, COLS,
        CODES, WEIGHT, WHOLE,
    )  # fmt: skip
    next_dgate, next_dup, sum3 = _gradient_of_rows(
        h, h_scale, dout, weight, 3, rows_left, width, scale_stride_r, up_scale, H_STRIDE, DOUT_STRIDE, COLS,
        CODES, WEIGHT, WHOLE,
    )  # fmt: skip
    if WEIGHT:
        store_of_rows(partial, sum2, sum3, 2, rows_left, WHOLE)
    gate23, up23 = pack(dgate, next_dgate), pack(dup, next_dup)
    cast_rows(codes, scale, gate23, 2, row, rows_left, col, width, 2 * COLS, LIMIT, LIMIT_BITS, POW2, WHOLE)
    cast_rows(up_codes, above, up23, 2, row, rows_left, col, width, 2 * COLS, LIMIT, LIMIT_BITS, POW2, WHOLE)
    cast_columns(
        up_codes_t, scale_t + COLS, up01, up23, row, rows_left, col, width, rows, FOURS, LIMIT, LIMIT_BITS, POW2, WHOLE
    )
    cast_columns(codes_t, scale_t, gate01, gate23, row, rows_left, col, width, rows, FOURS, LIMIT, LIMIT_BITS, POW2, WHOLE)
