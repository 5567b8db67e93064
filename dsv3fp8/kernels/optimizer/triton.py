"""AdamW in Triton: all tensors in one launch, each read and written once; clipping and skipping are decided on the device.

Bit for bit what torch's CUDA kernels give for the reference's operations: lerp, addcmul and addcdiv each end in one fma,
and a division by a number is a product with its reciprocal.

Passes (bytes per parameter): reads 4 of the weight, 4 of its gradient and the two moments; writes weight and moments.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv3fp8.precision.tiles import ceil_div

_EXACT = {"enable_fp_fusion": False}  # fma only where it is written
_BLOCK = 512  # parameters of a program: four in each thread of four warps, so that many programs wait for memory at once
_ALIGNED = 16  # bytes that a thread reads at once


def reason_against(moments: torch.dtype) -> str | None:
    """Why the kernel cannot keep moments in this dtype, or None when it can."""
    if moments in (torch.float32, torch.bfloat16):
        return None
    return f"the Triton AdamW keeps fp32 or bf16 moments, not {str(moments).removeprefix('torch.')}"


class Tensors:
    """Where the tensors of an optimizer lie, for one launch over all of them.

    sizes: elements of each. decayed: whether weight decay takes from it. addresses: those that the last launch was to use.
    """

    def __init__(self, sizes: Sequence[int], decayed: Sequence[bool], device: torch.device) -> None:
        blocks = [ceil_div(size, _BLOCK) for size in sizes]
        self.programs = sum(blocks)
        # Of every program: its tensor, and its block there.
        owner = np.repeat(np.arange(len(sizes), dtype=np.int64), blocks)
        block = np.arange(self.programs) - np.repeat(np.cumsum([0, *blocks[:-1]]), blocks)
        self.where = torch.from_numpy(np.stack((owner, block), 1)).to(device)
        self.about = torch.tensor(list(zip(sizes, decayed, strict=True)), dtype=torch.int64).to(device)
        self.pointers = torch.zeros(len(sizes), 4, dtype=torch.int64, device=device)
        self.addresses = self._there = (0,) * self.pointers.numel()

    def point(self, addresses: tuple[int, ...]) -> None:
        """Let the next launch use these: of weight, gradient, first and second moment of each tensor in turn.

        While a CUDA graph records, they are only remembered: whoever replays it calls this before.
        """
        self.addresses = addresses
        recording = self.pointers.is_cuda and torch.cuda.is_current_stream_capturing()
        if addresses != self._there and not recording:
            table = torch.tensor(addresses, dtype=torch.int64).view_as(self.pointers)
            table = table.pin_memory() if self.pointers.is_cuda else table
            self.pointers.copy_(table, non_blocking=True)
            self._there = addresses


def update(
    tensors: Tensors,
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    scalars: Tensor,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """`reference.update` where scalars say so, on the device.

    scalars: fp32 [applied, factor on the gradients, factor on decayed weights, 1 / root of the second bias correction, step];
    where applied is 0 nothing is written.
    """
    gradients = [_aligned(each) for each in gradients]
    tensors.point(tuple(t.data_ptr() for each in zip(weights, gradients, first, second, strict=True) for t in each))
    if tensors.programs:
        beta1, beta2 = betas
        rest = np.float32(1 - beta1)
        _update_kernel[(tensors.programs,)](
            tensors.where, tensors.about, tensors.pointers, scalars, beta2, float(rest), float(np.float32(1) - rest), 1 - beta2,
            eps, BF16=first[0].dtype == torch.bfloat16, SMALL=bool(rest < 0.5), BLOCK=_BLOCK, num_warps=4, **_EXACT,
        )  # fmt: skip
    torch.autograd.graph.increment_version(weights)  # as torch's own operations do


def _aligned(gradient: Tensor) -> Tensor:
    """The gradient as the kernel reads it: dense, from a multiple of 16 bytes."""
    gradient = gradient.contiguous()
    return gradient if gradient.data_ptr() % _ALIGNED == 0 else gradient.clone()


@triton.jit
def _update_block(
    w_at, g_at, m_at, v_at, offsets, mask, factor, keep, inverse, size, beta2, rest1, beta1, rest2, eps, SMALL: tl.constexpr
):  # fmt: skip
    w = tl.load(w_at + offsets, mask=mask) * keep
    g = tl.load(g_at + offsets, mask=mask) * factor
    m = tl.load(m_at + offsets, mask=mask).to(tl.float32)
    v = tl.load(v_at + offsets, mask=mask).to(tl.float32)
    zero = tl.zeros_like(g)
    m = tl.fma(zero + rest1, g - m, m) if SMALL else tl.fma(m - g, zero + beta1, g)  # lerp, from the nearer end
    v = tl.fma(zero + rest2, g * g, v * beta2)
    denominator = tl.sqrt_rn(v) * inverse + eps
    w = tl.fma(zero + size, tl.div_rn(m, denominator), w)
    tl.store(w_at + offsets, w, mask=mask)
    tl.store(m_at + offsets, m.to(m_at.dtype.element_ty), mask=mask)
    tl.store(v_at + offsets, v.to(v_at.dtype.element_ty), mask=mask)


@triton.jit
def _update_kernel(
    where, about, pointers, scalars, beta2, rest1, beta1, rest2, eps,
    BF16: tl.constexpr, SMALL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(scalars) != 0:
        tensor = tl.load(where + 2 * tl.program_id(0))
        start = tl.load(where + 2 * tl.program_id(0) + 1) * BLOCK
        elements, decayed = tl.load(about + 2 * tensor), tl.load(about + 2 * tensor + 1)
        MOMENT: tl.constexpr = tl.bfloat16 if BF16 else tl.float32
        w_at = _pointer(pointers, 4 * tensor, tl.float32)
        g_at = _pointer(pointers, 4 * tensor + 1, tl.float32)
        m_at = _pointer(pointers, 4 * tensor + 2, MOMENT)
        v_at = _pointer(pointers, 4 * tensor + 3, MOMENT)
        factor, inverse, size = tl.load(scalars + 1), tl.load(scalars + 3), tl.load(scalars + 4)
        keep = tl.where(decayed != 0, tl.load(scalars + 2), 1.0)
        offsets = start + tl.arange(0, BLOCK)
        # Without a mask, where there need be none: a mask of any length would take the vectors out of the loads.
        if start + BLOCK <= elements:
            _update_block(
                w_at, g_at, m_at, v_at, offsets, None, factor, keep, inverse, size, beta2, rest1, beta1, rest2, eps, SMALL
            )  # fmt: skip
        else:
            _update_block(
                w_at, g_at, m_at, v_at, offsets, offsets < elements, factor, keep, inverse, size, beta2, rest1, beta1, rest2,
                eps, SMALL,
            )  # fmt: skip


@triton.jit
def _pointer(pointers, at, TYPE: tl.constexpr):
    return tl.multiple_of(tl.load(pointers + at).to(tl.pointer_type(TYPE)), 16)
