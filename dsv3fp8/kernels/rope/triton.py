"""MLA's RoPE in Triton: q, k, v laid out for attention; backward cast in both orientations for q_b and kv_b.

Bit for bit the reference, but for k_rope's gradient, whose sum over heads runs in another order (the same in every run).

Passes: forward reads q, kv and k_rope and writes q, k and v. Backward reads dq, dk and dv and writes a code an element in each
orientation; k_rope's gradient reads the rope part of dk once more.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv3fp8.kernels.quantize.device import (
    column_tiles,
    limits,
    magnitude_bits,
    reciprocal,
    rounded_to_bf16,
    row_tiles,
    scale_of,
)
from dsv3fp8.kernels.rope.reference import Both, Cast
from dsv3fp8.precision.formats import E5M6, Format
from dsv3fp8.precision.tiles import ceil_div

_HEADS = 8  # heads of one token that a program lays out at a time


def reason_against(x: Tensor, fmt: Format | None = None) -> str | None:
    """Why these kernels cannot take q (or its gradient) [B, S, H, D], or None when they can."""
    if x.dtype != torch.bfloat16:
        return f"the Triton RoPE takes bf16, not {str(x.dtype).removeprefix('torch.')}"
    if fmt is E5M6:
        return f"no Triton RoPE casts to {fmt.name}"
    return None


def forward(q: Tensor, kv: Tensor, k_rope: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.forward` in bf16."""
    _refuse(reason_against(q))
    q, kv, k_rope, cos, sin = map(_dense, (q, kv, k_rope, cos, sin))
    batch, length, heads, width = q.shape
    rope = k_rope.shape[-1]
    nope, v_width = width - rope, kv.shape[-1] - (width - rope)
    out_q, out_k = q.new_empty(q.shape), q.new_empty(q.shape)
    out_v = q.new_empty(batch, length, heads, v_width)
    if q.numel():
        _forward_kernel[(batch * length * ceil_div(heads, _HEADS),)](
            q, kv, k_rope, cos, sin, out_q, out_k, out_v, length, heads,
            *q.stride()[:3], *kv.stride()[:3], *k_rope.stride()[:2], cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1),
            NOPE=nope, ROPE=rope, V=v_width, HEADS=_HEADS, NOPE_2=_power(nope), ROPE_2=_power(rope), V_2=_power(v_width),
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out_q, out_k, out_v


def backward_cast(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, q_cast: Cast, kv_cast: Cast
) -> tuple[Both, Both, Tensor]:
    """`reference.backward_cast` in bf16. Codes in 128x1 tiles are stored with the tokens contiguous."""
    _refuse(reason_against(dq, q_cast[0]) or reason_against(dk, kv_cast[0]))
    dq, dk, dv, cos, sin = map(_dense, (dq, dk, dv, cos, sin))
    batch, length, heads, width = dq.shape
    rope = 2 * cos.shape[-1]
    nope, v_width = width - rope, dv.shape[-1]
    cos_strides = (cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1))
    both = []
    for (fmt, kind), first, second, second_width, rotated in (
        (q_cast, dq, dq, rope, True),
        (kv_cast, dk, dv, v_width, False),
    ):
        rows, cols = batch * length, heads * (nope + second_width)
        by_row, by_column = (make(rows, cols, fmt, kind, dq.device) for make in (row_tiles, column_tiles))
        if rows and cols:
            _cast_kernel[(ceil_div(rows, 128) * ceil_div(cols, 128),)](
                first, second, cos, sin, by_row.codes, by_row.scale, by_column.codes, by_column.scale, rows, length,
                *first.stride()[:3], *second.stride()[:3], *cos_strides,
                NOPE=nope, SECOND=second_width, COLS=cols, ROTATE=rotated, POW2=kind == "pow2", **limits(fmt), num_warps=8,
                enable_fp_fusion=False,
            )  # fmt: skip
        both.append((by_row, by_column))
    dk_rope = dk.new_empty(batch, length, rope)
    if dk_rope.numel():
        _shared_kernel[(batch * length,)](
            dk, cos, sin, dk_rope, length, heads, *dk.stride()[:3], *cos_strides,
            NOPE=nope, ROPE=rope, ROPE_2=_power(rope), HEADS=16, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return both[0], both[1], dk_rope


def _dense(x: Tensor) -> Tensor:
    """x with its last dimension contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _power(size: int) -> int:
    return triton.next_power_of_2(max(size, 1))


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise ValueError(reason)


@triton.jit
def _turned(even, odd, cos, sin):
    """(even, odd) of pairs turned by an angle, rounded once."""
    return rounded_to_bf16(even * cos - odd * sin), rounded_to_bf16(even * sin + odd * cos)


@triton.jit(do_not_specialize=["length"])
def _forward_kernel(
    q, kv, k_rope, cos, sin, out_q, out_k, out_v, length, heads,
    q_b, q_s, q_h, kv_b, kv_s, kv_h, rope_b, rope_s, cos_b, cos_s,
    NOPE: tl.constexpr, ROPE: tl.constexpr, V: tl.constexpr, HEADS: tl.constexpr,
    NOPE_2: tl.constexpr, ROPE_2: tl.constexpr, V_2: tl.constexpr,
):  # fmt: skip
    """Some heads of one token."""
    groups = tl.cdiv(heads, HEADS)
    token = (tl.program_id(0) // groups).to(tl.int64)
    b, s = token // length, token % length
    h = tl.program_id(0) % groups * HEADS + tl.arange(0, HEADS)
    there = (h < heads)[:, None]
    q += b * q_b + s * q_s
    kv += b * kv_b + s * kv_s
    out = (token * heads + h)[:, None]

    c = tl.arange(0, NOPE_2)[None, :]
    part = there & (c < NOPE)
    tl.store(out_q + out * (NOPE + ROPE) + c, tl.load(q + h[:, None] * q_h + c, mask=part), mask=part)
    tl.store(out_k + out * (NOPE + ROPE) + c, tl.load(kv + h[:, None] * kv_h + c, mask=part), mask=part)
    c = tl.arange(0, V_2)[None, :]
    part = there & (c < V)
    tl.store(out_v + out * V + c, tl.load(kv + h[:, None] * kv_h + (NOPE + c), mask=part), mask=part)

    i = tl.arange(0, ROPE_2 // 2)
    angle = b * cos_b + s * cos_s + i
    cosine = tl.load(cos + angle, mask=i < ROPE // 2, other=0.0)[None, :]
    sine = tl.load(sin + angle, mask=i < ROPE // 2, other=0.0)[None, :]
    c = tl.arange(0, ROPE_2)[None, :]
    part = there & (c < ROPE)
    x = tl.load(q + h[:, None] * q_h + (NOPE + c), mask=part, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, (HEADS, ROPE_2 // 2, 2)))
    even, odd = _turned(even, odd, cosine, sine)
    turned = tl.reshape(tl.join(even, odd), (HEADS, ROPE_2)).to(tl.bfloat16)
    tl.store(out_q + out * (NOPE + ROPE) + (NOPE + c), turned, mask=part)
    x = tl.load(k_rope + b * rope_b + s * rope_s + c, mask=c < ROPE, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, (1, ROPE_2 // 2, 2)))
    even, odd = _turned(even, odd, cosine, sine)
    shared = tl.reshape(tl.join(even, odd), (1, ROPE_2)).to(tl.bfloat16)
    tl.store(out_k + out * (NOPE + ROPE) + (NOPE + c), tl.broadcast_to(shared, (HEADS, ROPE_2)), mask=part)


@triton.jit(do_not_specialize=["length"])
def _cast_kernel(
    first, second, cos, sin, codes, scale, codes_t, scale_t, rows, length,
    first_b, first_s, first_h, second_b, second_s, second_h, cos_b, cos_s,
    NOPE: tl.constexpr, SECOND: tl.constexpr, COLS: tl.constexpr, ROTATE: tl.constexpr,
    LIMIT: tl.constexpr, LIMIT_BITS: tl.constexpr, POW2: tl.constexpr,
):  # fmt: skip
    """128 tokens and 128 columns of [first's NOPE columns | SECOND columns] of all heads, cast both ways.

    ROTATE: the second columns are those behind first's NOPE, turned back; else the columns of `second` from its start.
    """
    col_blocks: tl.constexpr = (COLS + 127) // 128
    tile_c, tile_r = tl.program_id(0) % col_blocks, tl.program_id(0) // col_blocks
    r_in, c_in = tile_r * 128 + tl.arange(0, 128), tile_c * 128 + tl.arange(0, 128)
    there, exists = r_in < rows, c_in < COLS
    inside = there[:, None] & exists[None, :]
    b, s = (r_in // length).to(tl.int64), (r_in % length).to(tl.int64)
    head, d = c_in // (NOPE + SECOND), c_in % (NOPE + SECOND)
    from_first = b * first_b + s * first_s
    if ROTATE:
        at = from_first[:, None] + (head * first_h + d)[None, :]
        values = tl.load(first + at, mask=inside, other=0.0).to(tl.float32)
        i = tile_c * 128 + 2 * tl.arange(0, 64)  # the even column of every pair
        turned = (i % (NOPE + SECOND) >= NOPE) & (i < COLS)
        angle = (b * cos_b + s * cos_s)[:, None] + ((i % (NOPE + SECOND) - NOPE) // 2)[None, :]
        turns = there[:, None] & turned[None, :]
        cosine, sine = tl.load(cos + angle, mask=turns, other=0.0), tl.load(sin + angle, mask=turns, other=0.0)
        even, odd = tl.split(tl.reshape(values, (128, 64, 2)))
        even_back, odd_back = _turned(even, odd, cosine, -sine)
        even, odd = tl.where(turns, even_back, even), tl.where(turns, odd_back, odd)
        values = tl.reshape(tl.join(even, odd), (128, 128))
    else:
        nope = (d < NOPE)[None, :]
        at = from_first[:, None] + (head * first_h + d)[None, :]
        values = tl.load(first + at, mask=inside & nope, other=0.0)
        at = (b * second_b + s * second_s)[:, None] + (head * second_h + (d - NOPE))[None, :]
        values = tl.where(nope, values, tl.load(second + at, mask=inside & (d >= NOPE)[None, :], other=0.0)).to(tl.float32)

    r, c = r_in.to(tl.int64), c_in.to(tl.int64)
    magnitude = magnitude_bits(values)
    of_rows = scale_of(tl.max(magnitude, 1), LIMIT, LIMIT_BITS, POW2)
    along = (values * reciprocal(of_rows)[:, None]).to(codes.dtype.element_ty)
    tl.store(codes + (r[:, None] * COLS + c[None, :]), along, mask=inside)
    tl.store(scale + (tile_c.to(tl.int64) * rows + r), of_rows, mask=there)
    of_cols = scale_of(tl.max(magnitude, 0), LIMIT, LIMIT_BITS, POW2)
    down = (values * reciprocal(of_cols)[None, :]).to(codes.dtype.element_ty)
    tl.store(codes_t + (r[:, None] + c[None, :] * rows), down, mask=inside)
    tl.store(scale_t + (tile_r.to(tl.int64) * COLS + c), of_cols, mask=exists)


@triton.jit(do_not_specialize=["length"])
def _shared_kernel(
    dk, cos, sin, out, length, heads, dk_b, dk_s, dk_h, cos_b, cos_s,
    NOPE: tl.constexpr, ROPE: tl.constexpr, ROPE_2: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """k_rope's gradient of one token: summed over heads in fp32, turned back, rounded once."""
    token = tl.program_id(0).to(tl.int64)
    b, s = token // length, token % length
    c = tl.arange(0, ROPE_2)[None, :]
    total = tl.zeros((HEADS, ROPE_2), tl.float32)
    for first in tl.range(0, heads, HEADS):
        h = first + tl.arange(0, HEADS)[:, None]
        at = b * dk_b + s * dk_s + h * dk_h + (NOPE + c)
        total += tl.load(dk + at, mask=(h < heads) & (c < ROPE), other=0.0).to(tl.float32)
    summed = tl.sum(total, 0)
    even, odd = tl.split(tl.reshape(summed, (ROPE_2 // 2, 2)))
    i = tl.arange(0, ROPE_2 // 2)
    angle = b * cos_b + s * cos_s + i
    cosine = tl.load(cos + angle, mask=i < ROPE // 2, other=0.0)
    sine = tl.load(sin + angle, mask=i < ROPE // 2, other=0.0)
    even, odd = _turned(even, odd, cosine, -sine)
    c = tl.arange(0, ROPE_2)
    tl.store(out + token * ROPE + c, tl.reshape(tl.join(even, odd), (ROPE_2,)).to(tl.bfloat16), mask=c < ROPE)
