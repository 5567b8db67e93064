"""Packed E5M6 in Triton: eight codes are three little-endian words, so that rows are read and written by words, not bytes.

An E5M6 code is the upper twelve bits of the half-precision number of the same value, subnormals, infinities and NaN too.
Where rows do not start at whole words, or a part of the columns ends inside one, the words are made of bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv3fp8.kernels.quantize.device import INTERPRETED


@triton.jit
def load_e5m6(x, row, there, first, width, WORDS: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """fp32 [ROWS, COLS] of the columns from `first`, a multiple of two (eight if WORDS); zero outside.

    x: words if WORDS, else bytes. row: int32 [ROWS], where each row starts, in those. there: whether it exists. width: columns
    there are, from the first. WHOLE: all are there.
    """
    # Groups of eight columns before rows: of two dimensions without contiguous elements Triton lays lanes along the first.
    group = tl.arange(0, COLS // 8)[:, None]
    x += first // 8 * 3 if WORDS else first // 2 * 3
    w0 = _load_word(x, row[None, :], there[None, :], group, 0, width, WORDS, WHOLE)
    w1 = _load_word(x, row[None, :], there[None, :], group, 1, width, WORDS, WHOLE)
    w2 = _load_word(x, row[None, :], there[None, :], group, 2, width, WORDS, WHOLE)
    # Bits 4 to 15 of a half hold a code; what stands in the others is cleared.
    even = tl.join(
        tl.join(_value(w0 << 4), _value(w1 >> 12)),
        tl.join(_value((w0 >> 20) & 0xFFF | w1 << 12), _value(w2 >> 4)),
    )
    odd = tl.join(
        tl.join(_value(w0 >> 8), _value((w1 >> 24) & 0xFF | w2 << 8)),
        tl.join(_value(w1), _value(w2 >> 16)),
    )
    return tl.reshape(tl.permute(tl.join(even, odd), (1, 0, 2, 3, 4)), (ROWS, COLS))


@triton.jit
def _load_word(x, row, there, group, INDEX: tl.constexpr, width, WORDS: tl.constexpr, WHOLE: tl.constexpr):
    if WORDS:
        at = x + (row + group * 3) + INDEX
        word = tl.load(at) if WHOLE else tl.load(at, mask=there & (group * 8 < width), other=0)
    else:
        word = tl.zeros((group.shape[0], row.shape[1]), tl.int32)
        for i in tl.static_range(4):
            byte = group * 12 + (4 * INDEX + i)
            value = tl.load(x + (row + byte), mask=there & (byte < (width + 1) // 2 * 3), other=0)
            word |= value.to(tl.int32) << 8 * i
    return word


@triton.jit
def _value(bits):
    return (bits & 0xFFF0).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def store_e5m6(
    x, row, there, first, width, scaled, poisoned,
    WORDS: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Codes of scaled fp32 [ROWS, COLS], no larger than the format's maximum; of NaN in poisoned rows [ROWS], nowhere else.

    Other arguments as in `load_e5m6`.
    """
    v0, v1, v2, v3, v4, v5, v6, v7 = _eighths(scaled, ROWS, COLS)
    nan, _, _, _, _, _, _, _ = _eighths(tl.broadcast_to(poisoned[:, None], (ROWS, COLS)).to(tl.int32), ROWS, COLS)
    p01, p23, p45, p67 = _codes(v0, v1, nan), _codes(v2, v3, nan), _codes(v4, v5, nan), _codes(v6, v7, nan)
    if not WORDS:  # a pair whose second column is not there
        left = width - tl.arange(0, COLS // 8)[None, :] * 8
        p01, p23 = tl.where(left > 1, p01, p01 & 0xFFF0), tl.where(left > 3, p23, p23 & 0xFFF0)
        p45, p67 = tl.where(left > 5, p45, p45 & 0xFFF0), tl.where(left > 7, p67, p67 & 0xFFF0)
    # Sums of what does not overlap, where a shift is a product: the units that add and multiply have less to do.
    w0 = (p01 >> 4) + p23 * 1048576
    w1 = (p23 >> 12) + p45 * 4096
    w2 = (p45 >> 20) + p67 * 16
    # In one tensor with every fourth left out, so that neighbouring lanes store neighbouring words. Transposed as in load_e5m6.
    words = tl.trans(tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w0)), (ROWS, COLS // 2)))
    i = tl.arange(0, COLS // 2)[:, None]
    word = i // 4 * 3 + i % 4
    if WORDS:
        mask = i % 4 < 3 if WHOLE else there[None, :] & (i % 4 < 3) & (i // 4 * 8 < width)
        tl.store(x + first // 8 * 3 + (row[None, :] + word), words, mask=mask)
    else:
        byte = word * 4
        at = x + first // 2 * 3 + (row[None, :] + byte)
        for k in tl.static_range(4):
            mask = there[None, :] & (i % 4 < 3) & (byte + k < (width + 1) // 2 * 3)
            tl.store(at + k, (words >> 8 * k & 0xFF).to(tl.uint8), mask=mask)


@triton.jit
def _eighths(x, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Columns 0, 8, 16 and so on, columns 1, 9, 17, and six more."""
    even, odd = tl.split(tl.reshape(x, (ROWS, COLS // 8, 2, 2, 2)))
    x04, x26 = tl.split(even)
    x15, x37 = tl.split(odd)
    x0, x4 = tl.split(x04)
    x2, x6 = tl.split(x26)
    x1, x5 = tl.split(x15)
    x3, x7 = tl.split(x37)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _codes(low, high, nan):
    """Two codes, in bits 4 to 27."""
    low, high = _rounded(low), _rounded(high)
    if INTERPRETED:
        halves = _half(low) | _half(high) << 16
    else:
        cast: tl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"
        halves = tl.inline_asm_elementwise(cast, "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1)
    halves = tl.where(nan != 0, 0x7E007E00, halves)
    upper = (halves.to(tl.uint32, bitcast=True) >> 16).to(tl.int32)
    return halves - upper * (65536 - 4096)  # the upper half four bits lower: the lower ends in four zeros


@triton.jit
def _half(x):
    return x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _rounded(x):
    """To nearest even at six fraction bits, and at steps of 2^-20 below 2^-14, where a half holds it without rounding again.

    Adding 1.5 * 2^(e + 17) to x of magnitude in [2^e, 2^(e + 1)) leaves steps of 2^(e - 6), so that the addition itself rounds;
    both products are exact. The sign is put back by its bit: zero has lost it.
    """
    power = (tl.maximum(tl.abs(x), 2.0**-14).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    up, down = tl.full(x.shape, 1.5 * 2.0**17, tl.float32), tl.full(x.shape, -1.5 * 2.0**17, tl.float32)
    rounded = tl.fma(power, down, tl.fma(power, up, x)).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return (rounded | x.to(tl.int32, bitcast=True) & -2147483648).to(tl.float32, bitcast=True)
