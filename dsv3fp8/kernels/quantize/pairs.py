"""BF16 values in pairs, two to a register, and casts of a 128x128 block of them along its rows and along its columns.

Kernels that make such a block hold it as `fours.py` has it, rows 4i and 4i + 1 in one int32 [32, 128], rows 4i + 2 and 4i + 3
in another: half of the registers that fp32 would take, and one comparison for two values. The rows are cast first, as soon as
they are there; the columns' cast unpacks the pairs by other instructions, because ptxas would otherwise keep what the rows'
cast unpacked, and spill it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv3fp8.kernels.quantize.device import INTERPRETED, cast_four, reciprocal, scale_of
from dsv3fp8.kernels.quantize.fours import VECTOR, store_fours, store_rows


@triton.jit
def pack(low, high):
    """Two fp32 numbers, rounded to BF16, in one int32."""
    if INTERPRETED:
        low_bits = low.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return low_bits | (high.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    cast: tl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    return tl.inline_asm_elementwise(cast, "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def low_of(pair):
    return (pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def high_of(pair):
    return (pair & -65536).to(tl.float32, bitcast=True)


@triton.jit
def low_of_again(pair):
    """`low_of`, by an instruction of its own."""
    if INTERPRETED:
        return low_of(pair)
    unpack: tl.constexpr = "prmt.b32 $0, $1, 0, 0x1044;"
    return tl.inline_asm_elementwise(unpack, "=f,r", [pair], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def high_of_again(pair):
    if INTERPRETED:
        return high_of(pair)
    unpack: tl.constexpr = "prmt.b32 $0, $1, 0, 0x3244;"
    return tl.inline_asm_elementwise(unpack, "=f,r", [pair], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _larger(a, b):
    """The larger magnitudes of two pairs, NaN where one is NaN; signs mean nothing."""
    if INTERPRETED:
        low, high = tl.maximum(a & 0x7FFF, b & 0x7FFF), tl.maximum(a & 0x7FFF0000, b & 0x7FFF0000)
        return low | high
    larger: tl.constexpr = "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;"
    return tl.inline_asm_elementwise(larger, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _largest_bits(pairs, AXIS: tl.constexpr):
    """The fp32 bits of the largest magnitudes along an axis: of the low halves, and of the high ones."""
    if INTERPRETED:
        return tl.max(pairs & 0x7FFF, AXIS) << 16, tl.max(pairs & 0x7FFF0000, AXIS)
    largest = tl.reduce(pairs, AXIS, _larger)
    return (largest << 16) & 0x7FFF0000, largest & 0x7FFF0000


@triton.jit
def store_of_rows(to, low, high, INDEX: tl.constexpr, rows_left, WHOLE: tl.constexpr):
    """Stores one number for each of the rows 4i + INDEX and 4i + INDEX + 1, [32] each. to: where the block's first goes."""
    i = tl.arange(0, 64)
    r = 4 * (i // 2) + i % 2 + INDEX
    tl.store(to + r, tl.reshape(tl.join(low, high), (64,)), mask=None if WHOLE else r < rows_left)


@triton.jit
def cast_rows(
    codes, scale, pair, INDEX: tl.constexpr, row, rows_left, col, width, cols,
    LIMIT: tl.constexpr, LIMIT_BITS: tl.constexpr, POW2: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Stores rows 4i + INDEX and 4i + INDEX + 1 of a block in codes [rows, cols]. scale: where the block's first goes."""
    low, high = _largest_bits(pair, 1)
    s_low, s_high = scale_of(low, LIMIT, LIMIT_BITS, POW2), scale_of(high, LIMIT, LIMIT_BITS, POW2)
    store_rows(codes, low_of(pair) * reciprocal(s_low)[:, None], INDEX, row, rows_left, col, width, cols, WHOLE, 128)
    store_rows(codes, high_of(pair) * reciprocal(s_high)[:, None], INDEX + 1, row, rows_left, col, width, cols, WHOLE, 128)
    store_of_rows(scale, s_low, s_high, INDEX, rows_left, WHOLE)


@triton.jit
def _renumbered(pairs):
    """[32, 128] with the columns in the order that `fours.largest_of_columns` says."""
    return tl.reshape(tl.permute(tl.reshape(pairs, (32, 128 // VECTOR, VECTOR)), (0, 2, 1)), (32, 128))


@triton.jit
def _scales_of_columns(pair01, pair23, LIMIT: tl.constexpr, LIMIT_BITS: tl.constexpr, POW2: tl.constexpr):
    low, high = _largest_bits(_larger(_renumbered(pair01), _renumbered(pair23)), 0)
    largest = tl.reshape(tl.trans(tl.reshape(tl.maximum(low, high), (VECTOR, 128 // VECTOR))), (128,))
    return scale_of(largest, LIMIT, LIMIT_BITS, POW2)


@triton.jit
def cast_columns(
    codes, scale, pair01, pair23, row, rows_left, col, width, rows, FOURS: tl.constexpr,
    LIMIT: tl.constexpr, LIMIT_BITS: tl.constexpr, POW2: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Stores a block's codes in codes [columns, rows] (words if FOURS) and its 128 scales. scale: where the first goes."""
    s = _scales_of_columns(pair01, pair23, LIMIT, LIMIT_BITS, POW2)
    c = tl.arange(0, 128)
    tl.store(scale + c, s, mask=None if WHOLE else c < width)
    q = reciprocal(s)[None, :]
    words = cast_four(
        low_of_again(pair01) * q, high_of_again(pair01) * q, low_of_again(pair23) * q, high_of_again(pair23) * q, LIMIT != 448.0
    )
    store_fours(codes, words, row, rows_left, col, width, rows, FOURS, WHOLE, 128)
