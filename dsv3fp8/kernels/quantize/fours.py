"""128 rows as four blocks of 32: rows 0, 4, 8 and so on, rows 1, 5, 9, and two more.

A thread that holds four rows of a column casts them into one word, so that a block is stored transposed by words: a quarter of
the traffic between threads that single codes would make. A block of FP8 is never transposed itself beside its own store, which
was reported to corrupt the copy on Hopper (triton#11111).
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv3fp8.kernels.quantize.device import larger, largest_bits
from dsv3fp8.kernels.quantize.source import load_values

VECTOR = tl.constexpr(8)  # neighbouring columns that a thread holds


@triton.jit
def load_fours(
    x, x_scale, row, rows_left, col, width, tile, stride_r, stride_c, scale_stride_r, scale_stride_c,
    SOURCE: tl.constexpr, WHOLE: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Four fp32 [32, COLS] of the rows from `row` (rows_left there are) and the columns from `col` (width); zero outside."""
    r_in = 4 * tl.arange(0, 32)
    a = load_values(
        x, x_scale, row, r_in, rows_left, col, width, tile, stride_r, stride_c, scale_stride_r, scale_stride_c,
        SOURCE, WHOLE, VECTOR, 32, COLS,
    )  # fmt: skip
    b = load_values(
        x, x_scale, row, r_in + 1, rows_left, col, width, tile, stride_r, stride_c, scale_stride_r, scale_stride_c,
        SOURCE, WHOLE, VECTOR, 32, COLS,
    )  # fmt: skip
    c = load_values(
        x, x_scale, row, r_in + 2, rows_left, col, width, tile, stride_r, stride_c, scale_stride_r, scale_stride_c,
        SOURCE, WHOLE, VECTOR, 32, COLS,
    )  # fmt: skip
    d = load_values(
        x, x_scale, row, r_in + 3, rows_left, col, width, tile, stride_r, stride_c, scale_stride_r, scale_stride_c,
        SOURCE, WHOLE, VECTOR, 32, COLS,
    )  # fmt: skip
    return a, b, c, d


@triton.jit
def largest_of_fours(a, b, c, d):
    """The largest magnitudes of each four rows, [32, COLS]."""
    return larger(larger(tl.abs(a), tl.abs(b)), larger(tl.abs(c), tl.abs(d)))


@triton.jit
def largest_of_columns(a, b, c, d, COLS: tl.constexpr):
    """The bits of the largest magnitude of each column's 128 rows, [COLS].

    Warps meet in shared memory, where neighbouring lanes lie in neighbouring banks only if they hold neighbouring columns. A
    lane holds VECTOR neighbours itself: so the columns are renumbered on the way, which moves nothing.
    """
    each: tl.constexpr = COLS // VECTOR
    largest = tl.reshape(largest_of_fours(a, b, c, d), (32, each, VECTOR))
    largest = largest_bits(tl.reshape(tl.permute(largest, (0, 2, 1)), (32, COLS)), 0)
    return tl.reshape(tl.trans(tl.reshape(largest, (VECTOR, each))), (COLS,))


@triton.jit
def in_order(a, b, c, d):
    """What belongs to the rows of the four blocks, [32] each, in the order of the rows, [128]."""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (128,))


@triton.jit
def store_fours(
    codes, words, row, rows_left, col, width, rows, FOURS: tl.constexpr, WHOLE: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """Stores words [32, COLS] of four rows' codes each as codes [columns, rows]: words if FOURS, else bytes."""
    four, c_in = tl.arange(0, 32), tl.arange(0, COLS)
    if FOURS:
        at = codes + (col.to(tl.int64) * (rows // 4) + row // 4) + (c_in[None, :] * (rows // 4) + four[:, None])
        tl.store(at, words, mask=None if WHOLE else (four < rows_left // 4)[:, None] & (c_in < width)[None, :])
    else:
        at = codes + (col.to(tl.int64) * rows + row) + (c_in[None, :] * rows + 4 * four[:, None])
        for i in tl.static_range(4):
            mask = (4 * four + i < rows_left)[:, None] & (c_in < width)[None, :]
            tl.store(at + i, (words >> 8 * i & 0xFF).to(tl.uint8), mask=mask)


@triton.jit
def store_rows(
    codes, scaled, INDEX: tl.constexpr, row, rows_left, col, width, cols, WHOLE: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """Stores one of four blocks, of rows INDEX, INDEX + 4 and so on, as codes [rows, columns]."""
    r_in, c_in = 4 * tl.arange(0, 32) + INDEX, tl.arange(0, COLS)
    at = tl.max_contiguous(r_in[:, None] * cols + c_in[None, :], [1, VECTOR])  # as loaded: nothing moves between threads
    mask = None if WHOLE else (r_in < rows_left)[:, None] & (c_in < width)[None, :]
    tl.store(codes + (row.to(tl.int64) * cols + col) + at, scaled.to(codes.dtype.element_ty), mask=mask)
