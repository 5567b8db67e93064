"""Causal attention's forward kernel, and what the backward kernels share with it: blocks of rows, and which documents meet.

A head's width is a power of two and a rest (192 = 128 + 64), each a tensor of its own: padded to 256, a third of every product
with q or k would be zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
_ABOVE_ALL = tl.constexpr(2**31 - 1)
_CHUNK = tl.constexpr(1024)  # tokens whose documents are looked at together


@triton.jit
def rows_of(
    base, stride, there, BLOCK: tl.constexpr, FROM: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, CUT: tl.constexpr
):
    """[BLOCK, PADDED] values from column FROM on, of which WIDTH exist; zeros elsewhere. there: rows that exist, where CUT.

    Offsets in a block are of 32 bits, those of blocks of 64.
    """
    r, c = tl.arange(0, BLOCK)[:, None], tl.arange(0, PADDED)[None, :]
    at = base + FROM + (r * stride + c)
    if CUT and WIDTH < PADDED:
        values = tl.load(at, mask=(r < there) & (c < WIDTH), other=0.0)
    elif CUT:
        values = tl.load(at, mask=r < there, other=0.0)
    elif WIDTH < PADDED:
        values = tl.load(at, mask=c < WIDTH, other=0.0)
    else:
        values = tl.load(at)
    return values


@triton.jit
def store_rows(base, stride, there, values, BLOCK: tl.constexpr, FROM: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """What `rows_of` reads, written; rows from `there` on are not."""
    r, c = tl.arange(0, BLOCK)[:, None], tl.arange(0, PADDED)[None, :]
    tl.store(base + FROM + (r * stride + c), values.to(base.dtype.element_ty), mask=(r < there) & (c < WIDTH))


@triton.jit
def documents_of(documents, BLOCK: tl.constexpr):
    """int32 [BLOCK]; -2 for padding, which meets neither another's -1 nor a document."""
    ids = tl.load(documents + tl.arange(0, BLOCK))
    return tl.where(ids < 0, -2, ids)


@triton.jit
def meeting(documents, mine, begin, end):
    """(first, end) of the tokens in [begin, end) that may be of a document of `mine`; (end, begin) where none is.

    documents: int32, of a sequence, in whatever order. Ids between the smallest and the largest of `mine` count as its own.
    """
    low = tl.min(tl.where(mine < 0, _ABOVE_ALL, mine), 0)
    high = tl.max(mine, 0)
    first, last = end, begin
    for start in range(begin, end, _CHUNK):
        i = start + tl.arange(0, _CHUNK)
        there = tl.load(documents + i, mask=i < end, other=-1)
        meets = (there >= low) & (there <= high)
        first = tl.minimum(first, tl.min(tl.where(meets, i, _ABOVE_ALL), 0))
        last = tl.maximum(last, tl.max(tl.where(meets, i + 1, 0), 0))
    return first, last


@triton.jit(do_not_specialize=["length", "padded"])
def _attention_forward_kernel(
    q, k, v, documents, out, lse, scale, length, padded, heads,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h,
    QK: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, V: tl.constexpr, V_2: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, ISOLATED: tl.constexpr,
):  # fmt: skip
    """A block of queries of one head, over the keys from the first that it sees to its own. Softmax in powers of two."""
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    which = b * heads + h
    begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES  # the longest first
    there = length - begin
    wide_begin = begin.to(tl.int64)
    q += b * q_b + h * q_h + wide_begin * q_s
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    documents += b * padded
    scale2 = scale * LOG2_E

    q_first = rows_of(q, q_s, there, QUERIES, 0, min(FIRST, QK), FIRST, True)
    if REST:
        q_rest = rows_of(q, q_s, there, QUERIES, FIRST, QK - FIRST, REST, True)
    row = begin + tl.arange(0, QUERIES)
    seen_from = begin * 0
    if ISOLATED:
        mine = documents_of(documents + begin, QUERIES)
        seen_from = meeting(documents, mine, 0, begin)[0] // KEYS * KEYS

    largest = tl.full([QUERIES], float("-inf"), tl.float32)  # of a row's scores so far, times log2(e)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, V_2], tl.float32)
    for ON_DIAGONAL in tl.static_range(2):
        if ON_DIAGONAL:
            origin, extent = begin, QUERIES
        else:
            origin, extent = seen_from, begin - seen_from
        k_at, v_at = k + origin.to(tl.int64) * k_s, v + origin.to(tl.int64) * v_s
        for done in range(0, extent, KEYS):
            start = origin + done
            left = length - start
            keys = rows_of(k_at, k_s, left, KEYS, 0, min(FIRST, QK), FIRST, ON_DIAGONAL)
            scores = tl.dot(q_first, keys.T)
            if REST:
                keys = rows_of(k_at, k_s, left, KEYS, FIRST, QK - FIRST, REST, ON_DIAGONAL)
                scores = tl.dot(q_rest, keys.T, scores)
            if ON_DIAGONAL:
                scores = tl.where(row[:, None] >= (start + tl.arange(0, KEYS))[None, :], scores, float("-inf"))
            if ISOLATED:
                theirs = tl.load(documents + start + tl.arange(0, KEYS))
                scores = tl.where(mine[:, None] == theirs[None, :], scores, float("-inf"))
            new = tl.maximum(largest, tl.max(scores, 1) * scale2)
            # A row that has seen nothing, or only scores below what fp32 holds: -inf less -inf is NaN.
            finite = tl.where(new == float("-inf"), 0.0, new)
            p = tl.exp2(scores * scale2 - finite[:, None])
            faded = tl.exp2(largest - finite)
            total = total * faded + tl.sum(p, 1)
            values = rows_of(v_at, v_s, left, KEYS, 0, V, V_2, ON_DIAGONAL)
            acc = tl.dot(p.to(v.dtype.element_ty), values, acc * faded[:, None])
            largest = new
            k_at += KEYS * k_s
            v_at += KEYS * v_s

    empty = total == 0
    total = tl.where(empty, 1.0, total)
    acc *= (1.0 / total)[:, None]
    store_rows(out + ((b * length + wide_begin) * heads + h) * V, heads * V, there, acc, QUERIES, 0, V, V_2)
    found = tl.where(empty, float("-inf"), (largest + tl.log2(total)) * LN_2)
    tl.store(lse + which * length + row, found, mask=row < length)
