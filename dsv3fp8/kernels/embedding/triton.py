"""Embedding lookup in Triton: gather and cast in one kernel; backward without atomics, so that two runs give equal bits.

Forward is the reference bit for bit. Backward sorts the ids, so that the rows of each lie behind one another in the order of
the tokens, and sums them in FP32, 16 at a time. Pieces of 64 rows that are one word's are summed before, all at once: a word
may be a third of a text.

Passes (bytes per element): forward reads 4 and writes 2; backward reads 2 of dx in BF16 and writes 4 of the whole weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv3fp8.precision.tiles import ceil_div

_COLS = 1024  # columns of a row that a program of the lookup copies
_ROWS, _TILE = 16, 128  # rows of the gradient that a program sums at once, and their columns
_PIECE = 64  # rows that are summed before, where they are one word's


def reason_against(dtype: torch.dtype) -> str | None:
    """Why these kernels cannot round to this dtype, or None when they can."""
    if dtype in (torch.bfloat16, torch.float32):
        return None
    return f"the Triton embedding gives bf16 or fp32, not {str(dtype).removeprefix('torch.')}"


def forward(ids: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`reference.forward` of an fp32 weight, rows contiguous."""
    ids, cols = ids.contiguous(), weight.shape[1]
    out = torch.empty(ids.numel(), cols, dtype=dtype, device=weight.device)
    if out.numel():
        grid = (ids.numel() * ceil_div(cols, _COLS),)
        _embedding_forward_kernel[grid](ids, weight, out, cols, weight.stride(0), BLOCK=_COLS, num_warps=4)
    return out


def backward(ids: Tensor, dx: Tensor, vocabulary: int) -> Tensor:
    """`reference.backward` of bf16 or fp32 dx."""
    dx, cols = dx.contiguous(), dx.shape[1]
    dweight = torch.empty(vocabulary, cols, dtype=torch.float32, device=dx.device)
    if not dx.numel():
        return dweight.zero_()
    # Four bytes are sorted in half the passes of eight.
    found, order = torch.sort(ids.to(torch.int32), stable=True)
    words = torch.arange(vocabulary + 1, dtype=torch.int32, device=ids.device)
    first = torch.searchsorted(found, words, out_int32=True)
    tiles, pieces = ceil_div(cols, _TILE), ids.numel() // _PIECE
    sums = torch.empty(pieces, cols, dtype=torch.float32, device=dx.device)
    options = {"ROWS": _ROWS, "PIECE": _PIECE, "COLS": _TILE, "num_warps": 2}
    if pieces:
        _embedding_piece_kernel[(pieces * tiles,)](dx, found, order, sums, cols, **options)
    _embedding_backward_kernel[(vocabulary * tiles,)](dx, order, first, sums, dweight, cols, **options)
    return dweight


@triton.jit
def _embedding_forward_kernel(ids, weight, out, cols, stride, BLOCK: tl.constexpr):
    blocks = tl.cdiv(cols, BLOCK)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    c = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(weight + (tl.load(ids + token) * stride + c), mask=c < cols, other=0.0)
    tl.store(out + (token * cols + c), row.to(out.dtype.element_ty), mask=c < cols)


@triton.jit
def _sum(dx, order, begin, end, c, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The sum of the rows order[begin:end] of dx."""
    total = tl.zeros([COLS], tl.float32)
    for start in range(begin, end, ROWS):
        r = start + tl.arange(0, ROWS)
        token = tl.load(order + r, mask=r < end, other=0)
        inside = (r < end)[:, None] & (c < cols)[None, :]
        total += tl.sum(tl.load(dx + (token[:, None] * cols + c[None, :]), mask=inside, other=0.0).to(tl.float32), 0)
    return total


@triton.jit
def _embedding_piece_kernel(dx, found, order, sums, cols, ROWS: tl.constexpr, PIECE: tl.constexpr, COLS: tl.constexpr):
    """The sum of each piece that is one word's; others are not read."""
    blocks = tl.cdiv(cols, COLS)
    piece = tl.program_id(0) // blocks
    begin = piece * PIECE
    if tl.load(found + begin) == tl.load(found + begin + PIECE - 1):
        c = tl.program_id(0) % blocks * COLS + tl.arange(0, COLS)
        total = _sum(dx, order, begin, begin + PIECE, c, cols, ROWS, COLS)
        tl.store(sums + (piece.to(tl.int64) * cols + c), total, mask=c < cols)


@triton.jit
def _embedding_backward_kernel(
    dx, order, first, sums, dweight, cols, ROWS: tl.constexpr, PIECE: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    blocks = tl.cdiv(cols, COLS)
    word = tl.program_id(0) // blocks
    c = tl.program_id(0) % blocks * COLS + tl.arange(0, COLS)
    begin, end = tl.load(first + word), tl.load(first + word + 1)
    piece, last = tl.cdiv(begin, PIECE), end // PIECE  # pieces of this word alone
    total = _sum(dx, order, begin, tl.where(piece < last, piece * PIECE, end), c, cols, ROWS, COLS)
    if piece < last:
        for start in range(piece, last, ROWS):
            r = start + tl.arange(0, ROWS)
            inside = (r < last)[:, None] & (c < cols)[None, :]
            total += tl.sum(tl.load(sums + (r.to(tl.int64)[:, None] * cols + c[None, :]), mask=inside, other=0.0), 0)
        total += _sum(dx, order, last * PIECE, end, c, cols, ROWS, COLS)
    tl.store(dweight + (word.to(tl.int64) * cols + c), total, mask=c < cols)
