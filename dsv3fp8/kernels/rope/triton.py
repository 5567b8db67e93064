"""MLA's RoPE in Triton: q, k, v laid out for attention; backward in BF16, or cast in both orientations for q_b and kv_b.

Bit for bit the reference, but for k_rope's gradient, whose sum over heads runs in another order (the same in every run).

Passes: forward reads q, kv and k_rope and writes q, k and v. Backward reads dq, dk and dv, each element once, and writes BF16,
or a code an element in each orientation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv3fp8.kernels.quantize.device import column_tiles, limits, rounded_to_bf16, row_tiles
from dsv3fp8.kernels.quantize.pairs import cast_columns, cast_rows, high_of, low_of, pack
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
    if fmt is not None and x.shape[-1] % 2:
        return "the Triton RoPE casts pairs of columns: heads of even width"
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
        _rope_forward_kernel[(batch * length * ceil_div(heads, _HEADS),)](
            q, kv, k_rope, cos, sin, out_q, out_k, out_v, length, heads,
            *q.stride()[:3], *kv.stride()[:3], *k_rope.stride()[:2], *_angle_strides(cos),
            NOPE=nope, ROPE=rope, V=v_width, HEADS=_HEADS, NOPE_2=_power(nope), ROPE_2=_power(rope), V_2=_power(v_width),
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out_q, out_k, out_v


def backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.backward` in bf16."""
    _refuse(reason_against(dq))
    dq, dk, dv, cos, sin = map(_dense, (dq, dk, dv, cos, sin))
    batch, length, heads, width = dq.shape
    rope, v_width = 2 * cos.shape[-1], dv.shape[-1]
    nope = width - rope
    out_q, out_kv = dq.new_empty(dq.shape), dq.new_empty(batch, length, heads, nope + v_width)
    if dq.numel():
        _rope_backward_kernel[(batch * length * ceil_div(heads, _HEADS),)](
            dq, dk, dv, cos, sin, out_q, out_kv, length, heads,
            *dq.stride()[:3], *dk.stride()[:3], *dv.stride()[:3], *_angle_strides(cos),
            NOPE=nope, ROPE=rope, V=v_width, HEADS=_HEADS, NOPE_2=_power(nope), ROPE_2=_power(rope), V_2=_power(v_width),
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out_q, out_kv, _shared(dk, cos, sin)


def backward_cast(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, q_cast: Cast, kv_cast: Cast
) -> tuple[Both, Both, Tensor]:
    """`reference.backward_cast` in bf16. Codes in 128x1 tiles are stored with the tokens contiguous."""
    _refuse(reason_against(dq, q_cast[0]) or reason_against(dk, kv_cast[0]))
    dq, dk, dv, cos, sin = map(_dense, (dq, dk, dv, cos, sin))
    if dq.data_ptr() % 4 or any(n % 2 for n in dq.stride()[:3]):
        dq = dq.contiguous()  # it is read in pairs
    batch, length, heads, width = dq.shape
    rope = 2 * cos.shape[-1]
    nope, v_width = width - rope, dv.shape[-1]
    both = []
    for (fmt, kind), first, second, second_width, rotated in (
        (q_cast, dq, dq, rope, True),
        (kv_cast, dk, dv, v_width, False),
    ):
        rows, cols = batch * length, heads * (nope + second_width)
        by_row, by_column = (make(rows, cols, fmt, kind, dq.device) for make in (row_tiles, column_tiles))
        if rows and cols:
            codes, fours = by_column.codes.mT.view(torch.uint8), rows % 4 == 0
            _rope_backward_cast_kernel[(ceil_div(rows, 128) * ceil_div(cols, 128),)](
                first, second, cos, sin, by_row.codes, by_row.scale, codes.view(torch.int32) if fours else codes,
                by_column.scale, rows, length, *(n // 2 if rotated else n for n in first.stride()[:3]), *second.stride()[:3],
                *_angle_strides(cos), FIRST=nope, SECOND=second_width, COLS=cols, ROTATE=rotated,
                ONE_WINDOW=length % 128 == 0, FOURS=fours, WHOLE=rows % 128 == 0 and cols % 128 == 0,
                POW2=kind == "pow2", **limits(fmt), num_warps=8, maxnreg=80, enable_fp_fusion=False,
            )  # fmt: skip
        both.append((by_row, by_column))
    return both[0], both[1], _shared(dk, cos, sin)


def _shared(dk: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """k_rope's gradient [B, S, rope]."""
    batch, length, heads, width = dk.shape
    rope = 2 * cos.shape[-1]
    dk_rope = dk.new_empty(batch, length, rope)
    if dk_rope.numel():
        some = min(_power(heads), 16)
        tokens = max(4096 // (some * _power(rope)), 1)
        _rope_shared_kernel[(ceil_div(batch * length, tokens),)](
            dk, cos, sin, dk_rope, batch * length, length, heads, *dk.stride()[:3], *_angle_strides(cos),
            NOPE=width - rope, ROPE=rope, ROPE_2=_power(rope), TOKENS=tokens, HEADS=some, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return dk_rope


def _angle_strides(cos: Tensor) -> tuple[int, int]:
    """Of a table for all windows or for each."""
    return cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1)


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
def _rope_forward_kernel(
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
def _rope_backward_kernel(
    dq, dk, dv, cos, sin, out_q, out_kv, length, heads,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, cos_b, cos_s,
    NOPE: tl.constexpr, ROPE: tl.constexpr, V: tl.constexpr, HEADS: tl.constexpr,
    NOPE_2: tl.constexpr, ROPE_2: tl.constexpr, V_2: tl.constexpr,
):  # fmt: skip
    """Some heads of one token: q's rope part turned back, and [k's nope part | v]."""
    groups = tl.cdiv(heads, HEADS)
    token = (tl.program_id(0) // groups).to(tl.int64)
    b, s = token // length, token % length
    h = tl.program_id(0) % groups * HEADS + tl.arange(0, HEADS)
    there = (h < heads)[:, None]
    dq += b * q_b + s * q_s
    dk += b * k_b + s * k_s
    dv += b * v_b + s * v_s
    out = (token * heads + h)[:, None]

    c = tl.arange(0, NOPE_2)[None, :]
    part = there & (c < NOPE)
    tl.store(out_q + out * (NOPE + ROPE) + c, tl.load(dq + h[:, None] * q_h + c, mask=part), mask=part)
    tl.store(out_kv + out * (NOPE + V) + c, tl.load(dk + h[:, None] * k_h + c, mask=part), mask=part)
    c = tl.arange(0, V_2)[None, :]
    part = there & (c < V)
    tl.store(out_kv + out * (NOPE + V) + (NOPE + c), tl.load(dv + h[:, None] * v_h + c, mask=part), mask=part)

    i = tl.arange(0, ROPE_2 // 2)
    angle = b * cos_b + s * cos_s + i
    cosine = tl.load(cos + angle, mask=i < ROPE // 2, other=0.0)[None, :]
    sine = tl.load(sin + angle, mask=i < ROPE // 2, other=0.0)[None, :]
    c = tl.arange(0, ROPE_2)[None, :]
    part = there & (c < ROPE)
    x = tl.load(dq + h[:, None] * q_h + (NOPE + c), mask=part, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, (HEADS, ROPE_2 // 2, 2)))
    even, odd = _turned(even, odd, cosine, -sine)
    turned = tl.reshape(tl.join(even, odd), (HEADS, ROPE_2)).to(tl.bfloat16)
    tl.store(out_q + out * (NOPE + ROPE) + (NOPE + c), turned, mask=part)


@triton.jit
def _rotated_rows(
    words, cos, sin, there, b, s, col, word_b, word_s, word_h, cos_b, cos_s,
    NOPE: tl.constexpr, ROPE: tl.constexpr, COLS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """fp32 [32, 128] of some tokens: the columns from `col` of all heads, turned back. words: two neighbours in each."""
    i = col // 2 + tl.arange(0, 64)
    head, d = i // ((NOPE + ROPE) // 2), i % ((NOPE + ROPE) // 2)
    inside = None if WHOLE else there[:, None] & (i < COLS // 2)[None, :]
    at = (b * word_b + s * word_s)[:, None] + (head * word_h + d)[None, :]
    pair = tl.load(words + at, mask=inside)
    even, odd = low_of(pair), high_of(pair)
    turns = (d >= NOPE // 2)[None, :] if WHOLE else inside & (d >= NOPE // 2)[None, :]
    at = (b * cos_b + s * cos_s)[:, None] + (d - NOPE // 2)[None, :]
    cosine, sine = tl.load(cos + at, mask=turns, other=0.0), tl.load(sin + at, mask=turns, other=0.0)
    back, back_odd = even * cosine - odd * -sine, even * -sine + odd * cosine
    even, odd = tl.where(turns, back, even), tl.where(turns, back_odd, odd)
    if not WHOLE:
        even, odd = tl.where(inside, even, 0.0), tl.where(inside, odd, 0.0)
    return tl.reshape(tl.join(even, odd), (32, 128))


@triton.jit
def _joined_rows(
    first, second, there, b, s, col, first_b, first_s, first_h, second_b, second_s, second_h,
    FIRST: tl.constexpr, SECOND: tl.constexpr, COLS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """fp32 [32, 128] of some tokens: the columns from `col` of [FIRST columns of first | SECOND of second] of all heads."""
    if FIRST % 128 == 0 and SECOND % 128 == 0:  # the columns are of one head, and all of one part
        head, begin = col // (FIRST + SECOND), tl.multiple_of(col % (FIRST + SECOND), 128)
        d = begin + tl.arange(0, 128)
        of_first, of_second = tl.broadcast_to(begin < FIRST, (1, 128)), tl.broadcast_to(begin >= FIRST, (1, 128))
    else:
        c = col + tl.arange(0, 128)
        head, d = c // (FIRST + SECOND), c % (FIRST + SECOND)
        of_first, of_second = (d < FIRST)[None, :], (d >= FIRST)[None, :]
    if not WHOLE:
        inside = there[:, None] & (col + tl.arange(0, 128) < COLS)[None, :]
        of_first, of_second = of_first & inside, of_second & inside
    at = (b * first_b + s * first_s)[:, None] + (head * first_h + d)[None, :]
    values = tl.load(first + at, mask=of_first, other=0.0)
    at = (b * second_b + s * second_s)[:, None] + (head * second_h + (d - FIRST))[None, :]
    return tl.load(second + at, mask=of_second, other=values).to(tl.float32)


@triton.jit
def _two_rows(
    first, second, cos, sin, INDEX: tl.constexpr, row, rows_left, length, col,
    first_b, first_s, first_h, second_b, second_s, second_h, cos_b, cos_s,
    FIRST: tl.constexpr, SECOND: tl.constexpr, COLS: tl.constexpr, ROTATE: tl.constexpr, WHOLE: tl.constexpr,
    ONE_WINDOW: tl.constexpr,
):  # fmt: skip
    """Rows 4i + INDEX and 4i + INDEX + 1 of a block of 128, as pairs.py packs them."""
    r_in = 4 * tl.arange(0, 32) + INDEX
    r = row + r_in
    b = ((row if ONE_WINDOW else r) // length).to(tl.int64)
    b_next = ((row if ONE_WINDOW else r + 1) // length).to(tl.int64)
    s, s_next = r - b * length, r + 1 - b_next * length
    there, there_next = r_in < rows_left, r_in + 1 < rows_left
    if ROTATE:
        words = first.to(tl.pointer_type(tl.int32))
        low = _rotated_rows(
            words, cos, sin, there, b, s, col, first_b, first_s, first_h, cos_b, cos_s, FIRST, SECOND, COLS, WHOLE
        )
        high = _rotated_rows(
            words, cos, sin, there_next, b_next, s_next, col, first_b, first_s, first_h, cos_b, cos_s,
            FIRST, SECOND, COLS, WHOLE,
        )  # fmt: skip
    else:
        low = _joined_rows(
            first, second, there, b, s, col, first_b, first_s, first_h, second_b, second_s, second_h,
            FIRST, SECOND, COLS, WHOLE,
        )  # fmt: skip
        high = _joined_rows(
            first, second, there_next, b_next, s_next, col, first_b, first_s, first_h, second_b, second_s, second_h,
            FIRST, SECOND, COLS, WHOLE,
        )  # fmt: skip
    return pack(low, high)


@triton.jit(do_not_specialize=["length"])
def _rope_backward_cast_kernel(
    first, second, cos, sin, codes, scale, codes_t, scale_t, rows, length,
    first_b, first_s, first_h, second_b, second_s, second_h, cos_b, cos_s,
    FIRST: tl.constexpr, SECOND: tl.constexpr, COLS: tl.constexpr, ROTATE: tl.constexpr, ONE_WINDOW: tl.constexpr,
    FOURS: tl.constexpr, WHOLE: tl.constexpr, LIMIT: tl.constexpr, LIMIT_BITS: tl.constexpr, POW2: tl.constexpr,
):  # fmt: skip
    """128 tokens and 128 columns of [FIRST columns of first | SECOND columns of second] of all heads, cast both ways.

    ROTATE: the second columns are those behind first's FIRST, turned back, and strides of first count pairs of columns.
    WHOLE: no token or column is outside. ONE_WINDOW: no block has tokens of two windows.
    """
    col_blocks: tl.constexpr = (COLS + 127) // 128
    tile, tile_r = tl.program_id(0) % col_blocks, tl.program_id(0) // col_blocks
    row, col = tile_r * 128, tile * 128
    rows_left, width = rows - row, COLS - col
    scale += tile.to(tl.int64) * rows + row
    scale_t += tile_r.to(tl.int64) * COLS + col
    pair01 = _two_rows(
        first, second, cos, sin, 0, row, rows_left, length, col, first_b, first_s, first_h, second_b, second_s, second_h,
        cos_b, cos_s, FIRST, SECOND, COLS, ROTATE, WHOLE, ONE_WINDOW,
    )  # fmt: skip
    cast_rows(codes, scale, pair01, 0, row, rows_left, col, width, COLS, LIMIT, LIMIT_BITS, POW2, WHOLE)
    pair23 = _two_rows(
        first, second, cos, sin, 2, row, rows_left, length, col, first_b, first_s, first_h, second_b, second_s, second_h,
        cos_b, cos_s, FIRST, SECOND, COLS, ROTATE, WHOLE, ONE_WINDOW,
    )  # fmt: skip
    cast_rows(codes, scale, pair23, 2, row, rows_left, col, width, COLS, LIMIT, LIMIT_BITS, POW2, WHOLE)
    cast_columns(codes_t, scale_t, pair01, pair23, row, rows_left, col, width, rows, FOURS, LIMIT, LIMIT_BITS, POW2, WHOLE)


@triton.jit(do_not_specialize=["rows", "length"])
def _rope_shared_kernel(
    dk, cos, sin, out, rows, length, heads, dk_b, dk_s, dk_h, cos_b, cos_s,
    NOPE: tl.constexpr, ROPE: tl.constexpr, ROPE_2: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """k_rope's gradient of some tokens: summed over heads in fp32, turned back, rounded once."""
    r_in = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    there = r_in < rows
    r = r_in.to(tl.int64)
    b, s = r // length, r % length
    of_token = (b * dk_b + s * dk_s)[:, None, None]
    c = tl.arange(0, ROPE_2)[None, None, :]
    inside = there[:, None, None] & (c < ROPE)
    total = tl.zeros((TOKENS, HEADS, ROPE_2), tl.float32)
    for first in tl.range(0, heads, HEADS):
        h = first + tl.arange(0, HEADS)[None, :, None]
        total += tl.load(dk + (of_token + h * dk_h + (NOPE + c)), mask=inside & (h < heads), other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(tl.sum(total, 1), (TOKENS, ROPE_2 // 2, 2)))
    i = tl.arange(0, ROPE_2 // 2)[None, :]
    angle = (b * cos_b + s * cos_s)[:, None] + i
    known = there[:, None] & (i < ROPE // 2)
    cosine, sine = tl.load(cos + angle, mask=known, other=0.0), tl.load(sin + angle, mask=known, other=0.0)
    even, odd = _turned(even, odd, cosine, -sine)
    c = tl.arange(0, ROPE_2)[None, :]
    turned = tl.reshape(tl.join(even, odd), (TOKENS, ROPE_2)).to(tl.bfloat16)
    tl.store(out + (r[:, None] * ROPE + c), turned, mask=there[:, None] & (c < ROPE))
