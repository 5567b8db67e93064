"""Causal attention's backward kernels: queries' gradients in one, keys' and values' in another, so that each has one writer.

A sum over blocks runs in their order in one program, and nothing is added in memory: the bits are the same in every run. Both
make the scores and the gradients of the probabilities, seven products where one kernel that adds atomically has five.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv3fp8.kernels.attention.triton_forward import LOG2_E, documents_of, meeting, rows_of, store_rows


@triton.jit(do_not_specialize=["length", "padded"])
def _attention_rows_kernel(
    dout, out, lse, shift, delta, length, padded, heads, dout_b, dout_s, dout_h, out_b, out_s, out_h,
    V: tl.constexpr, V_2: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """What a block of queries takes from its scores and from the gradients of its probabilities, fp32 [B, H, padded].

    shift: lse in powers of two; +inf, whose probabilities are 0, for queries that saw nothing or do not exist.
    delta: the sum of dout * out over a head's width.
    """
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    which = b * heads + h
    begin = tl.program_id(0).to(tl.int64) * QUERIES
    there = length - begin
    given = rows_of(dout + b * dout_b + h * dout_h + begin * dout_s, dout_s, there, QUERIES, 0, V, V_2, True)
    kept = rows_of(out + b * out_b + h * out_h + begin * out_s, out_s, there, QUERIES, 0, V, V_2, True)
    row = begin + tl.arange(0, QUERIES)
    tl.store(delta + which * padded + row, tl.sum(given.to(tl.float32) * kept.to(tl.float32), 1))
    row_lse = tl.load(lse + which * length + row, mask=row < length, other=float("-inf"))
    tl.store(shift + which * padded + row, tl.where(row_lse == float("-inf"), float("inf"), row_lse * LOG2_E))


@triton.jit(do_not_specialize=["length", "padded"])
def _attention_queries_kernel(
    dout, q, k, v, documents, shift, delta, dq, scale, length, padded, heads,
    dout_b, dout_s, dout_h, q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h,
    QK: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, V: tl.constexpr, V_2: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, ISOLATED: tl.constexpr,
):  # fmt: skip
    """dq of a block of queries of one head, over the keys that they see, in order."""
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    which = b * heads + h
    begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES  # the longest first
    there = length - begin
    wide_begin = begin.to(tl.int64)
    dout += b * dout_b + h * dout_h + wide_begin * dout_s
    q += b * q_b + h * q_h + wide_begin * q_s
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    documents += b * padded
    scale2 = scale * LOG2_E

    q_first = rows_of(q, q_s, there, QUERIES, 0, min(FIRST, QK), FIRST, True)
    dq_first = tl.zeros([QUERIES, FIRST], tl.float32)
    if REST:
        q_rest = rows_of(q, q_s, there, QUERIES, FIRST, QK - FIRST, REST, True)
        dq_rest = tl.zeros([QUERIES, REST], tl.float32)
    given = rows_of(dout, dout_s, there, QUERIES, 0, V, V_2, True)
    row = begin + tl.arange(0, QUERIES)
    row_shift, row_delta = tl.load(shift + which * padded + row), tl.load(delta + which * padded + row)
    seen_from = begin * 0
    if ISOLATED:
        mine = documents_of(documents + begin, QUERIES)
        seen_from = meeting(documents, mine, 0, begin)[0] // KEYS * KEYS

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
                keys_rest = rows_of(k_at, k_s, left, KEYS, FIRST, QK - FIRST, REST, ON_DIAGONAL)
                scores = tl.dot(q_rest, keys_rest.T, scores)
            if ON_DIAGONAL:
                scores = tl.where(row[:, None] >= (start + tl.arange(0, KEYS))[None, :], scores, float("-inf"))
            if ISOLATED:
                theirs = tl.load(documents + start + tl.arange(0, KEYS))
                scores = tl.where(mine[:, None] == theirs[None, :], scores, float("-inf"))
            # No probability is above 1. Where scores are beyond a million, lse's rounding alone would make some 2 or more.
            p = tl.exp2(tl.minimum(scores * scale2 - row_shift[:, None], 0.0))
            values = rows_of(v_at, v_s, left, KEYS, 0, V, V_2, ON_DIAGONAL)
            ds = (p * (tl.dot(given, values.T) - row_delta[:, None])).to(q.dtype.element_ty)
            dq_first = tl.dot(ds, keys, dq_first)
            if REST:
                dq_rest = tl.dot(ds, keys_rest, dq_rest)
            k_at += KEYS * k_s
            v_at += KEYS * v_s

    dq += ((b * length + wide_begin) * heads + h) * QK
    store_rows(dq, heads * QK, there, dq_first * scale, QUERIES, 0, min(FIRST, QK), FIRST)
    if REST:
        store_rows(dq, heads * QK, there, dq_rest * scale, QUERIES, FIRST, QK - FIRST, REST)


@triton.jit(do_not_specialize=["length", "padded"])
def _attention_keys_kernel(
    dout, q, k, v, documents, shift, delta, dk, dv, scale, length, padded, heads,
    dout_b, dout_s, dout_h, q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h,
    QK: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, V: tl.constexpr, V_2: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, ISOLATED: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys of one head, over the queries that see them, in order. Scores lie [KEYS, QUERIES].

    CUT: whether the sequence ends inside a block of keys.
    """
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    which = b * heads + h
    begin = tl.program_id(0) * KEYS  # the longest first
    there = length - begin
    wide_begin = begin.to(tl.int64)
    dout += b * dout_b + h * dout_h
    q += b * q_b + h * q_h
    k += b * k_b + h * k_h + wide_begin * k_s
    v += b * v_b + h * v_h + wide_begin * v_s
    documents += b * padded
    shift += which * padded
    delta += which * padded
    scale2 = scale * LOG2_E

    k_first = rows_of(k, k_s, there, KEYS, 0, min(FIRST, QK), FIRST, True)
    dk_first = tl.zeros([KEYS, FIRST], tl.float32)
    if REST:
        k_rest = rows_of(k, k_s, there, KEYS, FIRST, QK - FIRST, REST, True)
        dk_rest = tl.zeros([KEYS, REST], tl.float32)
    values = rows_of(v, v_s, there, KEYS, 0, V, V_2, True)
    dvalues = tl.zeros([KEYS, V_2], tl.float32)
    key = begin + tl.arange(0, KEYS)
    seen_to = length
    if ISOLATED:
        mine = documents_of(documents + begin, KEYS)
        seen_to = meeting(documents, mine, begin + KEYS, length)[1]

    for OFF_DIAGONAL in tl.static_range(2):
        # On the diagonal always so many queries, should the sequence end before: a loop that may be empty costs registers.
        if OFF_DIAGONAL:
            origin, extent = begin + KEYS, seen_to - begin - KEYS
        else:
            origin, extent = begin, KEYS
        q_at, dout_at = q + origin.to(tl.int64) * q_s, dout + origin.to(tl.int64) * dout_s
        for done in range(0, extent, QUERIES):
            start = origin + done
            left = length - start
            q_first = rows_of(q_at, q_s, left, QUERIES, 0, min(FIRST, QK), FIRST, CUT)
            scores = tl.dot(k_first, q_first.T)
            if REST:
                q_rest = rows_of(q_at, q_s, left, QUERIES, FIRST, QK - FIRST, REST, CUT)
                scores = tl.dot(k_rest, q_rest.T, scores)
            row = start + tl.arange(0, QUERIES)
            if not OFF_DIAGONAL:
                scores = tl.where(row[None, :] >= key[:, None], scores, float("-inf"))
            if ISOLATED:
                theirs = tl.load(documents + row)
                scores = tl.where(mine[:, None] == theirs[None, :], scores, float("-inf"))
            p = tl.exp2(tl.minimum(scores * scale2 - tl.load(shift + row)[None, :], 0.0))
            given = rows_of(dout_at, dout_s, left, QUERIES, 0, V, V_2, CUT)
            dp = tl.dot(values, given.T)  # before the product for dv: the other way round a few registers spill
            dvalues = tl.dot(p.to(v.dtype.element_ty), given, dvalues)
            ds = (p * (dp - tl.load(delta + row)[None, :])).to(q.dtype.element_ty)
            dk_first = tl.dot(ds, q_first, dk_first)
            if REST:
                dk_rest = tl.dot(ds, q_rest, dk_rest)
            q_at += QUERIES * q_s
            dout_at += QUERIES * dout_s

    token = (b * length + wide_begin) * heads + h
    store_rows(dk + token * QK, heads * QK, there, dk_first * scale, KEYS, 0, min(FIRST, QK), FIRST)
    if REST:
        store_rows(dk + token * QK, heads * QK, there, dk_rest * scale, KEYS, FIRST, QK - FIRST, REST)
    store_rows(dv + token * V, heads * V, there, dvalues, KEYS, 0, V, V_2)
