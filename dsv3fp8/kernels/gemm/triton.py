"""Block-scaled FP8 GEMM in Triton whose every bit is defined: the Hopper tensor core's own sums, promoted as asked.

One chain of the tensor core's accumulator (13 fraction bits) takes `promote_every` products; what is added outside it is
fp32, in the order of K. The scales enter as cuBLASLt's do:
  block  b's scale covers 128 rows:     acc = fma(p, fp32(s_a * s_b), acc) per K block of 128
  row    b has one scale a row (wgrad): acc = fma(fp32(p * s_a), s_b, acc)
  once   scales constant along K:       the finished sum times fp32(s_a * s_b)
with p the block's sum: of one chain, or of the fp32 sum of the chains of 32 or 64 in it. K blocks end where tiles end,
also inside K (halves of dgrad's K that are no multiple of 128). There is no split along K.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from dsv3fp8.precision.formats import E4M3, E5M2
from dsv3fp8.precision.tiles import QuantizedTensor, ceil_div

_TURNED = 128  # bytes along both sides of what a program transposes
NEVER = 0  # chain length that stands for "never"


def reason_against(a: QuantizedTensor, b: QuantizedTensor, promote_every: int | str) -> str | None:
    """Why this kernel cannot compute a @ b^T as asked, or None when it can. Looks at formats and tiles, not at values."""
    for operand in (a, b):
        if (against := reason_against_format(operand)) is not None:
            return against
        if operand.tile.cols not in (None, 128) or operand.tile.rows not in (None, 1, 128):
            return f"no tensor core sum for tile {operand.tile}"
    if a.constant_along_k and b.constant_along_k:
        whole = promote_every in (32, 64, "never") or (isinstance(promote_every, int) and promote_every % 128 == 0)
        return None if whole else f"promote_every={promote_every} ends inside a block of 128"
    if promote_every not in (32, 64, 128):
        return f"promote_every={promote_every} needs scales that are constant along K"
    if len({parts_of_k(operand) for operand in (a, b) if operand.tile.cols is not None}) > 1:
        return "the tiles of the two operands end at different places along K"
    return None


def reason_against_format(operand: QuantizedTensor) -> str | None:
    """Why the tensor core cannot read these codes, or None when it can."""
    return None if operand.format in (E4M3, E5M2) else f"the tensor core has no {operand.format.name}"


def matmul_nt(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, promote_every: int | str = 128) -> Tensor:
    """a [M, K] @ b [N, K]^T -> [M, N] in out_dtype (bf16 or fp32), one rounding from the fp32 sum.

    a, b: E4M3 or E5M2, also mixed; tiles 1x128, 128x128, row or tensor along K. promote_every: 32, 64, 128; with scales
    constant along K also any multiple of 128 or "never". Raises ValueError where `reason_against` gives a reason.
    """
    if (against := reason_against(a, b, promote_every)) is not None:
        raise ValueError(against)
    (m, k), n = a.shape, b.shape[0]
    out = torch.empty(m, n, dtype=out_dtype, device=a.codes.device)
    if m == 0 or n == 0 or k == 0:
        return out.zero_()
    scales, one_b_scale, parts = how_scales_enter(a, b)
    codes_a, codes_b = row_major(a.codes), row_major(b.codes)
    block_m, block_n, block_k = 128, columns(scales, one_b_scale, promote_every, out_dtype), 128
    _gemm_kernel[(ceil_div(m, block_m) * ceil_div(n, block_n),)](
        codes_a,
        codes_b,
        a.scale,
        b.scale,
        out,
        m,
        n,
        k // parts,
        parts,
        codes_a.stride(0),
        codes_b.stride(0),
        *scale_strides(a),
        *scale_strides(b),
        m // a.row_parts,
        n // b.row_parts,
        A_TILE_ROWS=a.tile.rows or 0,
        B_TILE_ROWS=b.tile.rows or 0,
        SCALES=scales,
        ONE_B_SCALE=one_b_scale,
        CHAIN=NEVER if promote_every == "never" else promote_every,
        WHOLE_BLOCKS=k // parts % block_k == 0,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=8,
        num_stages=4,
        enable_fp_fusion=False,  # every fma here is asked for by name
    )
    return out


def columns(scales: str, one_b_scale: bool, promote_every: int | str, out_dtype: torch.dtype) -> int:
    """Columns of a program's block: fewer where 128 would run out of registers.

    Scales of single columns take some, a change of layout before narrow stores too, and each chain of a block has an
    accumulator of its own.
    """
    if scales == "once" or (promote_every == 128 and (one_b_scale or (scales == "row" and out_dtype == torch.float32))):
        return 128
    return 32 if scales == "row" and promote_every == 32 else 64


def how_scales_enter(a: QuantizedTensor, b: QuantizedTensor) -> tuple[str, bool, int]:
    """(as the module's text has it; whether b has one for all columns of a block; parts of K that are tiled each on their own).

    b: a matrix, or a stack of them. One for all columns: tiles of 128 rows that start where blocks do.
    """
    rows, parts = b.tile.rows, b.row_parts
    one_b_scale = rows is None or (rows == 128 and (parts == 1 or b.shape[-2] // parts % 128 == 0))
    if a.constant_along_k and b.constant_along_k:
        return "once", one_b_scale, 1
    return "row" if rows == 1 else "block", one_b_scale, max(parts_of_k(a), parts_of_k(b))


def parts_of_k(operand: QuantizedTensor) -> int:
    """Parts of K at whose ends a tile ends, one where all tiles but the last are whole."""
    cut = operand.tile.cols is not None and operand.shape[-1] // operand.col_parts % 128 != 0
    return operand.col_parts if cut else 1


def row_major(codes: Tensor) -> Tensor:
    """Codes [R, K] with K contiguous and rows that start at multiples of 16 bytes, so that loads are wide."""
    if codes.stride(1) != 1 and codes.stride(0) == 1 and codes.numel():
        return _turned(codes.mT.view(torch.uint8)).view(codes.dtype)
    raw = codes.view(torch.uint8) if codes.stride(-1) == 1 else codes.contiguous().view(torch.uint8)
    if raw.stride(0) % 16 or raw.data_ptr() % 16:
        raw = F.pad(raw, (0, -raw.shape[1] % 16)).contiguous()
    return raw.view(codes.dtype)


def _turned(raw: Tensor) -> Tensor:
    """The transpose [C, R] of bytes [R, C] whose rows lie contiguous, its rows at multiples of 16 bytes."""
    rows, cols = raw.shape
    out = torch.empty(cols, ceil_div(rows, 16) * 16, dtype=torch.uint8, device=raw.device)
    grid = ceil_div(cols, _TURNED), ceil_div(rows, _TURNED)
    _turn_kernel[grid](raw, out, rows, cols, raw.stride(0), out.stride(0), BLOCK=_TURNED, num_warps=4)
    return out[:, :rows]


def scale_strides(operand: QuantizedTensor) -> tuple[int, int]:
    """Strides of the scale grid along rows and K blocks, 0 where one scale serves all of them."""
    rows, blocks = operand.scale.stride()[-2:]
    return (0 if operand.tile.rows is None else rows), (0 if operand.tile.cols is None else blocks)


# Only what makes loads and stores wide is compiled for; every number of rows runs the same kernel.
@triton.jit(do_not_specialize=["m", "parts", "a_scale_stride", "b_scale_stride", "a_part_rows", "b_part_rows"])
def _gemm_kernel(
    a,
    b,
    a_scale,
    b_scale,
    out,
    m,
    n,
    part_k,
    parts,
    a_stride,
    b_stride,
    a_scale_stride,
    a_scale_stride_k,
    b_scale_stride,
    b_scale_stride_k,
    a_part_rows,
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
    block_m, block_n = block_of(tl.program_id(0), tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N))
    rows = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows and columns beyond the edge read the last one again; they are not stored.
    safe_rows, safe_cols = tl.minimum(rows, m - 1), tl.minimum(cols, n - 1)
    a_scales = a_scale + scale_row(safe_rows, a_part_rows, A_TILE_ROWS) * a_scale_stride
    first_col = block_n * BLOCK_N if ONE_B_SCALE else safe_cols
    b_scales = b_scale + scale_row(first_col, b_part_rows, B_TILE_ROWS) * b_scale_stride
    acc = products(
        a + safe_rows.to(tl.int64) * a_stride,
        b + safe_cols.to(tl.int64) * b_stride,
        a_scales,
        b_scales,
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
    inside = (rows < m)[:, None] & (cols < n)[None, :]
    tl.store(out + rows.to(tl.int64)[:, None] * n + cols[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def products(
    a_rows,
    b_cols,
    a_scales,
    b_scales,
    a_scale_stride_k,
    b_scale_stride_k,
    part_k,
    parts,
    SCALES: tl.constexpr,
    ONE_B_SCALE: tl.constexpr,
    CHAIN: tl.constexpr,
    WHOLE_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The fp32 sums of one block, scales included.

    a_rows [M], b_cols [N], a_scales [M], b_scales [N] or one: where each begins.
    """
    ks = tl.arange(0, BLOCK_K)
    a_ptrs, b_ptrs = a_rows[:, None] + ks[None, :], b_cols[None, :] + ks[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if SCALES == "once" and CHAIN > BLOCK_K:
        for start in range(0, part_k, CHAIN):
            p = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for k in range(start, tl.minimum(start + CHAIN, part_k), BLOCK_K):
                x = _load(a_ptrs, ks[None, :], k, part_k, WHOLE_BLOCKS)
                y = _load(b_ptrs, ks[:, None], k, part_k, WHOLE_BLOCKS)
                p = tl.dot(x, y, p)
            acc += p
    elif SCALES == "once":
        for k in range(0, part_k, BLOCK_K):
            x = _load(a_ptrs, ks[None, :], k, part_k, WHOLE_BLOCKS)
            y = _load(b_ptrs, ks[:, None], k, part_k, WHOLE_BLOCKS)
            acc = tl.dot(x, y, acc) if CHAIN == 0 else tl.dot(x, y, acc, max_num_imprecise_acc=CHAIN)
    else:
        for part in range(parts):
            for k in range(0, part_k, BLOCK_K):
                x = _load(a_ptrs + part * part_k, ks[None, :], k, part_k, WHOLE_BLOCKS)
                y = _load(b_ptrs + part * part_k, ks[:, None], k, part_k, WHOLE_BLOCKS)
                block = part * tl.cdiv(part_k, BLOCK_K) + k // BLOCK_K
                s_a = tl.load(a_scales + block * a_scale_stride_k)
                s_b = tl.load(b_scales + block * b_scale_stride_k)
                p = tl.dot(x, y) if CHAIN == BLOCK_K else tl.dot(x, y, max_num_imprecise_acc=CHAIN)
                if SCALES == "row":
                    acc = tl.fma(p * s_a[:, None], tl.broadcast_to(s_b[None, :], p.shape), acc)
                else:
                    acc = tl.fma(p, _product(s_a, s_b, ONE_B_SCALE, p.shape), acc)
    if SCALES == "once":
        acc = acc * _product(tl.load(a_scales), tl.load(b_scales), ONE_B_SCALE, acc.shape)
    return acc


@triton.jit
def block_of(program, blocks_m, blocks_n):
    """Blocks in bands of eight rows, so that programs that run together share operands in the L2 cache."""
    band = program // (8 * blocks_n)
    height = tl.minimum(blocks_m - band * 8, 8)
    within = program % (8 * blocks_n)
    return band * 8 + within % height, within // height


@triton.jit
def scale_row(row, part_rows, TILE_ROWS: tl.constexpr):
    """The row of the scale grid that a row of the matrix reads; parts are tiled each on their own."""
    if TILE_ROWS > 1:
        part = row // part_rows
        row = part * tl.cdiv(part_rows, TILE_ROWS) + (row - part * part_rows) // TILE_ROWS
    return row  # one scale for all rows has stride 0


@triton.jit
def _load(ptrs, ks, k, end, WHOLE_BLOCKS: tl.constexpr):
    return tl.load(ptrs + k) if WHOLE_BLOCKS else tl.load(ptrs + k, mask=k + ks < end, other=0.0)


@triton.jit
def _product(s_a, s_b, ONE_B_SCALE: tl.constexpr, shape: tl.constexpr):
    """fp32(s_a * s_b) of every element; rounded once a row where b has one scale."""
    return tl.broadcast_to((s_a * s_b)[:, None], shape) if ONE_B_SCALE else s_a[:, None] * s_b[None, :]


@triton.jit(do_not_specialize=["rows"])
def _turn_kernel(x, out, rows, cols, stride, out_stride, BLOCK: tl.constexpr):
    col, row = tl.program_id(0) * BLOCK, tl.program_id(1).to(tl.int64) * BLOCK
    i = tl.arange(0, BLOCK)
    there = (row + i < rows)[:, None] & (col + i < cols)[None, :]
    tile = tl.load(x + row * stride + col + (i[:, None] * stride + i[None, :]), mask=there, other=0)
    there = (col + i < cols)[:, None] & (row + i < out_stride)[None, :]  # zeros behind the last row
    at = out + col.to(tl.int64) * out_stride + row + (i[:, None] * out_stride + i[None, :])
    tl.store(at, tile.T, mask=there)
