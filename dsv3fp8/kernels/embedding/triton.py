"""Embedding lookup in Triton: gather and cast in one kernel; backward without atomics, so that two runs give equal bits.

Forward is the reference bit for bit. Backward sorts the ids and sums the rows of each in FP32, a few at a time in the order
of the tokens: the sum depends on how often an id occurs and on nothing else.

Passes (bytes per element): forward reads 4 and writes 2; backward reads 2 of dx in BF16 and writes 4 of the whole weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv3fp8.precision.tiles import ceil_div

_COLS = 1024  # columns of a row that a program of the lookup copies
_TILE = 256  # columns of a row of the gradient that a program sums


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
    found, order = torch.sort(ids, stable=True)
    first = torch.searchsorted(found, torch.arange(vocabulary + 1, device=ids.device))
    _embedding_backward_kernel[(vocabulary * ceil_div(cols, _TILE),)](dx, order, first, dweight, cols, COLS=_TILE, num_warps=4)
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
    """The sum of the rows order[begin:end] of dx, ROWS of them at a time."""
    total = tl.zeros([COLS], tl.float32)
    for start in range(begin, end, ROWS):
        r = start + tl.arange(0, ROWS)
        token = tl.load(order + r, mask=r < end, other=0)
        inside = (r < end)[:, None] & (c < cols)[None, :]
        total += tl.sum(tl.load(dx + (token[:, None] * cols + c[None, :]), mask=inside, other=0.0).to(tl.float32), 0)
    return total


@triton.jit
def _embedding_backward_kernel(dx, order, first, dweight, cols, COLS: tl.constexpr):
    blocks = tl.cdiv(cols, COLS)
    word = (tl.program_id(0) // blocks).to(tl.int64)
    c = tl.program_id(0) % blocks * COLS + tl.arange(0, COLS)
    begin, end = tl.load(first + word), tl.load(first + word + 1)
    at = dweight + (word * cols + c)
    if end - begin > 8:  # a frequent word: as many rows on their way at once as there is room for
        tl.store(at, _sum(dx, order, begin, end, c, cols, 32, COLS), mask=c < cols)
    else:
        tl.store(at, _sum(dx, order, begin, end, c, cols, 4, COLS), mask=c < cols)
