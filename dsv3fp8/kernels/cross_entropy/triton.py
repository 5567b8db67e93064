"""Cross-entropy in Triton: the loss and the log-sum-exp in one read of the logits, their gradient in one read and one write.

Backward is the reference bit for bit (exp is CUDA's own, as torch's). Forward sums the exponentials in another order: every
lane of a block over the blocks of a row, then the lanes; what was summed is scaled down where a later block has a larger
maximum.

Passes (bytes per logit): forward reads 4; backward reads 4 and writes 2 in BF16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from dsv3fp8.kernels.cross_entropy import reference
from dsv3fp8.kernels.quantize.device import INTERPRETED
from dsv3fp8.precision.tiles import ceil_div

_EXACT = {"enable_fp_fusion": False, "enable_reflect_ftz": False}  # no operation but those written, subnormals kept
_IGNORED = tl.constexpr(reference.IGNORED)
_BLOCK = 4096  # logits of a row that a program holds: 16 in each thread of eight warps


def reason_against(dtype: torch.dtype) -> str | None:
    """Why these kernels cannot take logits of this dtype, or None when they can."""
    return None if dtype == torch.float32 else f"the Triton cross-entropy takes fp32, not {str(dtype).removeprefix('torch.')}"


def forward(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """`reference.forward` of fp32 logits, rows contiguous."""
    rows, cols = logits.shape
    loss, lse = torch.empty(2, rows, dtype=torch.float32, device=logits.device).unbind()
    if rows:
        block, warps = _block(cols)
        _loss_forward_kernel[(rows,)](
            logits, targets, loss, lse, cols, logits.stride(0), BLOCK=block, num_warps=warps, **_EXACT
        )
    return loss, lse


def backward(logits: Tensor, lse: Tensor, targets: Tensor, dloss: Tensor, dtype: torch.dtype) -> Tensor:
    """`reference.backward` of fp32 logits, rows contiguous."""
    rows, cols = logits.shape
    dlogits = torch.empty(rows, cols, dtype=dtype, device=logits.device)
    if rows:
        block, warps = _block(cols)
        _loss_backward_kernel[(rows * ceil_div(cols, block),)](
            logits, lse, targets, dloss, dlogits, cols, logits.stride(0), dloss.stride(0),
            BLOCK=block, num_warps=warps, **_EXACT,
        )  # fmt: skip
    return dlogits


def _block(cols: int) -> tuple[int, int]:
    """(logits, warps) of a program."""
    block = min(_BLOCK, max(128, triton.next_power_of_2(cols)))
    return block, max(1, block // 512)


@triton.jit
def _exp(x):
    return tl.exp(x) if INTERPRETED else libdevice.exp(x)


@triton.jit
def _log(x):
    return tl.log(x) if INTERPRETED else libdevice.log(x)


@triton.jit
def _finite(x):
    """What is taken off the logits: their maximum, 0 where that is infinite."""
    return tl.where(tl.abs(x) == float("inf"), 0.0, x)


@triton.jit
def _loss_forward_kernel(logits, targets, loss, lse, cols, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    top = -float("inf")  # a NaN is no maximum, but makes the sum NaN
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, cols, BLOCK):
        c = start + tl.arange(0, BLOCK)
        x = tl.load(base + c, mask=c < cols, other=-float("inf"))
        larger = tl.maximum(top, tl.max(x, 0))
        # Infinite maxima scale nothing: there is nothing yet, or the sum is infinite from now on.
        scale = tl.where((tl.abs(top) == float("inf")) | (larger == float("inf")), 1.0, _exp(top - _finite(larger)))
        sums = sums * scale + _exp(x - _finite(larger))
        top = larger
    total = _log(tl.sum(sums, 0)) + _finite(top)
    target = tl.load(targets + row)
    picked = tl.load(base + tl.maximum(target, 0))
    tl.store(lse + row, total)
    tl.store(loss + row, tl.where(target == _IGNORED, 0.0, total - picked))


@triton.jit
def _loss_backward_kernel(logits, lse, targets, dloss, dlogits, cols, stride, dloss_stride, BLOCK: tl.constexpr):
    blocks = tl.cdiv(cols, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    c = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = c < cols
    target = tl.load(targets + row)
    scale = tl.where(target == _IGNORED, 0.0, tl.load(dloss + row * dloss_stride))
    x = tl.load(logits + (row * stride + c), mask=inside, other=0.0)
    share = _exp(x - tl.load(lse + row))
    share = tl.where(c == tl.maximum(target, 0), share - 1.0, share)
    tl.store(dlogits + (row * cols + c), (share * scale).to(dlogits.dtype.element_ty), mask=inside)
