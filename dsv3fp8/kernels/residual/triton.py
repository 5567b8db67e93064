"""The residual sum in Triton: one pass that reads every branch once and writes their sum. Bit for bit the reference."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv3fp8.precision.tiles import ceil_div

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_MOST_BRANCHES = 2
_BLOCK = 2048


def reason_against(*given: Tensor) -> str | None:
    """Why this kernel cannot sum these, or None when it can."""
    if len(given) > 1 + _MOST_BRANCHES:
        return f"the Triton residual sum takes {_MOST_BRANCHES} branches, not {len(given) - 1}"
    others = [str(t.dtype).removeprefix("torch.") for t in given if t.dtype not in _FLOATS]
    return f"the Triton residual sum takes bf16, fp16 or fp32, not {others[0]}" if others else None


def forward(x: Tensor, *branches: Tensor) -> Tensor:
    """`reference.forward`."""
    reason = reason_against(x, *branches)
    if reason is not None:
        raise ValueError(reason)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        given = [t.contiguous() for t in (x, *branches, *[x] * (_MOST_BRANCHES - len(branches)))]
        grid = (ceil_div(out.numel(), _BLOCK),)
        _sum_kernel[grid](*given, out, out.numel(), BRANCHES=len(branches), BLOCK=_BLOCK, num_warps=4)
    return out


# Compiled for numbers of values that are multiples of 16, as whole rows have, and for all others.
@triton.jit
def _sum_kernel(x, first, second, out, count, BRANCHES: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = i < count
    total = tl.load(x + i, mask=there, other=0.0).to(tl.float32)
    if BRANCHES > 0:
        total += tl.load(first + i, mask=there, other=0.0).to(tl.float32)
    if BRANCHES > 1:
        total += tl.load(second + i, mask=there, other=0.0).to(tl.float32)
    tl.store(out + i, total.to(out.dtype.element_ty), mask=there)
