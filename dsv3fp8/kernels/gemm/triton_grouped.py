"""The experts' FP8 GEMMs in one Triton launch, for the formats, tiles and promotions that the Gluon kernels do not take.

Every product is the one that kernels/gemm/triton.py makes of an expert's rows alone, bit for bit. Rows of an expert start at
multiples of 128 (ops/exchange.py's Plan), and nothing that is only known on the device decides the launch: no synchronization,
and a CUDA graph may hold it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv3fp8.kernels.gemm.triton import (
    NEVER,
    block_of,
    columns,
    how_scales_enter,
    products,
    row_major,
    scale_row,
    scale_strides,
)
from dsv3fp8.kernels.gemm.triton import reason_against as reason_against_one
from dsv3fp8.precision.tiles import QuantizedTensor, ceil_div

ROWS = 128  # of a block, which is one expert's


def reason_against_rows(a: QuantizedTensor, weights: QuantizedTensor, promote_every: int | str) -> str | None:
    """Why `grouped_rows` cannot compute this, or None when it can. Looks at formats and tiles, not at values."""
    if a.row_parts > 1:
        return "rows are tiled in parts, between which an expert's may lie"
    return reason_against_one(a, weights, promote_every)


def reason_against_wgrad(dy: QuantizedTensor, x: QuantizedTensor, promote_every: int | str) -> str | None:
    """Why `grouped_wgrad` cannot compute this, or None when it can. Looks at formats and tiles, not at values."""
    if dy.row_parts > 1 or x.row_parts > 1:
        return "tokens are tiled in parts, between which an expert's may lie"
    return reason_against_one(_along_tokens(dy), _along_tokens(x), promote_every)


def grouped_rows(
    a: QuantizedTensor, weights: QuantizedTensor, groups: Tensor, out_dtype: torch.dtype, promote_every: int | str = 128
) -> Tensor:
    """fprop and dgrad: a [rows, K] times the weights [E, N, K]^T of each row's expert -> [rows, N] in out_dtype.

    groups: int64 or int32 [rows / 128], the expert of each block of 128 rows; -1 for a block of none, which gets zeros.
    Formats, tiles and promotion as `triton.matmul_nt`; of a, also one scale for each block of 128 rows.
    """
    if (against := reason_against_rows(a, weights, promote_every)) is not None:
        raise ValueError(against)
    (rows, k), (experts, n, _) = a.shape, weights.shape
    if groups.numel() * ROWS != rows:
        raise ValueError(f"groups has {groups.numel()} blocks of {ROWS} rows, the operand {rows} rows")
    out = torch.empty(rows, n, dtype=out_dtype, device=a.codes.device)
    if out.numel() == 0 or k == 0:
        return out.zero_()
    scales, one_scale, parts = how_scales_enter(a, weights)
    codes = row_major(a.codes)
    stacked = row_major(weights.codes.contiguous().view(experts * n, -1))
    block_n = columns(scales, one_scale, promote_every, out_dtype)
    _grouped_rows_kernel[(rows // ROWS * ceil_div(n, block_n),)](
        codes,
        stacked,
        a.scale,
        weights.scale,
        out,
        groups,
        rows // ROWS,
        n,
        k // parts,
        parts,
        codes.stride(0),
        stacked.stride(0),
        *scale_strides(a),
        *scale_strides(weights),
        weights.scale.stride(0),
        n // weights.row_parts,
        A_TILE_ROWS=a.tile.rows or 0,
        B_TILE_ROWS=weights.tile.rows or 0,
        SCALES=scales,
        ONE_B_SCALE=one_scale,
        CHAIN=NEVER if promote_every == "never" else promote_every,
        WHOLE_BLOCKS=k // parts % 128 == 0,
        BLOCK_M=ROWS,
        BLOCK_N=block_n,
        BLOCK_K=128,
        **_OPTIONS,
    )
    return out


def grouped_wgrad(
    dy: QuantizedTensor, x: QuantizedTensor, starts: Tensor, promote_every: int | str = 128, into: Tensor | None = None
) -> Tensor:
    """wgrad: per expert dy [rows, N]^T times x [rows, K] over its rows -> fp32 [E, N, K]; zeros for an expert without rows.

    starts: int32 [E + 1], each expert's first block of 128 rows, and the end of the last (`Plan.blocks`).
    into: fp32 [E, N, K], contiguous, that the products are added to (one fp32 addition each; experts without rows are left
    alone) and that is returned. Tensor cores read both with the tokens contiguous: other codes are copied.
    """
    if (against := reason_against_wgrad(dy, x, promote_every)) is not None:
        raise ValueError(against)
    experts, n, k = starts.numel() - 1, dy.shape[1], x.shape[1]
    if into is not None and (into.dtype != torch.float32 or into.shape != (experts, n, k) or not into.is_contiguous()):
        raise ValueError(f"into must be a contiguous fp32 {[experts, n, k]}, not {into.dtype} {list(into.shape)}")
    out = into if into is not None else torch.empty(experts, n, k, dtype=torch.float32, device=dy.codes.device)
    if out.numel() == 0 or dy.shape[0] == 0:
        return out if into is not None else out.zero_()
    a, b = _along_tokens(dy), _along_tokens(x)
    scales, one_scale, _ = how_scales_enter(a, b)
    codes_a, codes_b = row_major(a.codes), row_major(b.codes)
    # Scales of single columns that change from block to block take registers: with 128 columns a program would run out of them.
    block_k = min(columns(scales, one_scale, promote_every, torch.float32), 128 if scales == "once" or one_scale else 64)
    n_tiles, k_tiles = ceil_div(n, 128), ceil_div(k, block_k)
    _grouped_wgrad_kernel[(experts * n_tiles * k_tiles,)](
        codes_a,
        codes_b,
        a.scale,
        b.scale,
        out,
        starts,
        n,
        k,
        codes_a.stride(0),
        codes_b.stride(0),
        *_strides_of_blocks(a),
        *_strides_of_blocks(b),
        n // a.row_parts,
        k // b.row_parts,
        ADD=into is not None,
        A_TILE_ROWS=a.tile.rows or 0,
        B_TILE_ROWS=b.tile.rows or 0,
        SCALES=scales,
        ONE_B_SCALE=one_scale,
        CHAIN=NEVER if promote_every == "never" else promote_every,
        BLOCK_M=128,
        BLOCK_N=block_k,
        BLOCK_K=128,
        **_OPTIONS,
    )
    return out


_OPTIONS = {"num_warps": 8, "num_stages": 4, "enable_fp_fusion": False}  # every fma is asked for by name


def _along_tokens(operand: QuantizedTensor) -> QuantizedTensor:
    """The transposed operand, whose K are the tokens: one scale along all of an expert's where its blocks share theirs."""
    seen = operand.transposed()
    if not operand.one_scale_per_group:
        return seen
    return replace(seen, tile=replace(seen.tile, cols=None))


def _strides_of_blocks(operand: QuantizedTensor) -> tuple[int, int]:
    """Strides of the scale grid along rows and blocks of tokens; an expert's one scale is found at its first block."""
    rows, blocks = operand.scale.stride()
    return (0 if operand.tile.rows is None else rows), (blocks if operand.scale.shape[1] > 1 else 0)


@triton.jit(do_not_specialize=["blocks_m", "parts", "a_scale_stride", "b_scale_stride", "b_scale_stride_e", "b_part_rows"])
def _grouped_rows_kernel(
    a,
    b,
    a_scale,
    b_scale,
    out,
    groups,
    blocks_m,
    n,
    part_k,
    parts,
    a_stride,
    b_stride,
    a_scale_stride,
    a_scale_stride_k,
    b_scale_stride,
    b_scale_stride_k,
    b_scale_stride_e,
    b_part_rows,
    A_TILE_ROWS: tl.constexpr,
    B_TILE_ROWS: tl.constexpr,
    SCALES: tl.constexpr,
    ONE_B_SCALE: tl.constexpr,
    CHAIN: tl.constexpr,
    WHOLE_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    block_m, block_n = block_of(tl.program_id(0), blocks_m, tl.cdiv(n, BLOCK_N))
    expert = tl.load(groups + block_m).to(tl.int64)
    rows = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    at, inside = out + rows.to(tl.int64)[:, None] * n + cols[None, :], (cols < n)[None, :]
    if expert < 0:
        tl.store(at, tl.zeros((BLOCK_M, BLOCK_N), out.dtype.element_ty), mask=inside)
    else:
        safe_cols = tl.minimum(cols, n - 1)  # columns beyond the edge read the last one again; they are not stored
        first_col = block_n * BLOCK_N if ONE_B_SCALE else safe_cols
        acc = products(
            a + rows.to(tl.int64) * a_stride,
            b + (expert * n + safe_cols) * b_stride,
            a_scale + scale_row(rows, blocks_m * BLOCK_M, A_TILE_ROWS) * a_scale_stride,
            b_scale + expert * b_scale_stride_e + scale_row(first_col, b_part_rows, B_TILE_ROWS) * b_scale_stride,
            a_scale_stride_k,
            b_scale_stride_k,
            part_k,
            parts,
            SCALES,
            ONE_B_SCALE,
            CHAIN,
            WHOLE_BLOCKS,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )
        tl.store(at, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["a_scale_stride", "b_scale_stride", "a_part_rows", "b_part_rows"])
def _grouped_wgrad_kernel(
    a,
    b,
    a_scale,
    b_scale,
    out,
    starts,
    m,
    n,
    a_stride,
    b_stride,
    a_scale_stride,
    a_scale_stride_k,
    b_scale_stride,
    b_scale_stride_k,
    a_part_rows,
    b_part_rows,
    ADD: tl.constexpr,
    A_TILE_ROWS: tl.constexpr,
    B_TILE_ROWS: tl.constexpr,
    SCALES: tl.constexpr,
    ONE_B_SCALE: tl.constexpr,
    CHAIN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    blocks_n = tl.cdiv(n, BLOCK_N)
    tiles = tl.cdiv(m, BLOCK_M) * blocks_n
    expert, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    begin, end = tl.load(starts + expert), tl.load(starts + expert + 1)
    rows = tile // blocks_n * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile % blocks_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if end > begin:
        safe_rows, safe_cols = tl.minimum(rows, m - 1), tl.minimum(cols, n - 1)
        first_col = tile % blocks_n * BLOCK_N if ONE_B_SCALE else safe_cols
        first = begin.to(tl.int64)
        acc = products(
            (a + first * BLOCK_K) + safe_rows.to(tl.int64) * a_stride,
            (b + first * BLOCK_K) + safe_cols.to(tl.int64) * b_stride,
            (a_scale + first * a_scale_stride_k) + scale_row(safe_rows, a_part_rows, A_TILE_ROWS) * a_scale_stride,
            (b_scale + first * b_scale_stride_k) + scale_row(first_col, b_part_rows, B_TILE_ROWS) * b_scale_stride,
            a_scale_stride_k,
            b_scale_stride_k,
            (end - begin) * BLOCK_K,
            1,
            SCALES,
            ONE_B_SCALE,
            CHAIN,
            True,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )
        at = (out + expert.to(tl.int64) * m * n) + (rows[:, None] * n + cols[None, :])
        inside = (rows < m)[:, None] & (cols < n)[None, :]
        if ADD:
            acc = tl.load(at, mask=inside, other=0.0) + acc
        tl.store(at, acc, mask=inside)
    elif not ADD:
        at = (out + expert.to(tl.int64) * m * n) + (rows[:, None] * n + cols[None, :])
        inside = (rows < m)[:, None] & (cols < n)[None, :]
        tl.store(at, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), mask=inside)
