"""The output head and cross-entropy in FP32, in chunks of tokens, so that a long batch's logits never exist at once.

Backward recomputes each chunk's logits from the hidden states; the log-sum-exp is all that is kept besides. Any
gradient per token is right (weights, masks, an expanded scalar), because nothing is scaled in forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsv3fp8.kernels import outer
from dsv3fp8.kernels.cross_entropy.reference import IGNORED
from dsv3fp8.kernels.gemm.reference import matmul_nt, plain_matmul
from dsv3fp8.ops.stash import Stash, keep
from dsv3fp8.ops.weights import WeightCodes
from dsv3fp8.precision import ledger
from dsv3fp8.precision.tiles import ceil_div, values_of
from dsv3fp8.precision.widen import widened

__all__ = ["IGNORED", "cross_entropy", "head_logits"]

# Logits of one chunk, 64 MB in FP32, and on a GPU, which wants larger GEMMs and sums the head's gradient once a chunk.
CHUNK_VALUES, GPU_CHUNK_VALUES = 2**24, 2**27


def head_logits(hidden: Tensor, weight: Tensor, codes: WeightCodes) -> Tensor:
    """FP32 logits [T, V] of hidden [T, D]; weight: the head's master [V, D], codes: its cast to the compute dtype."""
    low = _low(codes, weight)
    return matmul_nt(hidden.to(low.dtype), low, widened(low.dtype))


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, edge: Tensor, weight: Tensor, hidden: Tensor, targets: Tensor, codes: WeightCodes, kept: Stash
    ) -> Tensor:
        low = _low(codes, weight)
        wide = widened(low.dtype)
        loss, lse = (torch.empty(hidden.shape[0], dtype=wide, device=hidden.device) for _ in range(2))
        for rows in _chunks(hidden, weight):
            loss[rows], lse[rows] = outer.cross_entropy_forward(matmul_nt(hidden[rows], low, wide), targets[rows])
        ctx.save_for_backward(weight, targets, lse, *kept.tensors)
        ctx.codes, ctx.restore = codes, kept.restore
        ctx.node = ledger.here("head")
        if ctx.node:
            keeps = {"y": kept.tensors, "targets": targets, "lse": lse}
            ctx.node.report("forward", low, {"y": hidden, "w_head": low}, {"loss": loss}, keeps)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        weight, targets, lse, *kept = ctx.saved_tensors
        hidden = values_of(ctx.restore(tuple(kept)))
        low = _low(ctx.codes, weight)
        wide = widened(low.dtype)
        dhidden, dweight = torch.empty_like(hidden), None
        for rows in _chunks(hidden, weight):
            logits = matmul_nt(hidden[rows], low, wide)
            dlogits = outer.cross_entropy_backward(logits, lse[rows], targets[rows], dloss[rows], low.dtype)
            with plain_matmul(hidden.device):
                torch.mm(dlogits, low, out=dhidden[rows])
            dweight = _add_product(dweight, dlogits, hidden[rows], weight.dtype)
        if dweight is None:  # no tokens
            dweight = torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
        if ctx.node:
            ctx.node.report("backward", low, {"dloss": dloss, "w_head": low}, {"dy": dhidden})
            ctx.node.report("wgrad", low, {"y": hidden}, {"dw_head": dweight})
        return dhidden, dweight, None, None, None, None


def _low(codes: WeightCodes, weight: Tensor) -> Tensor:
    """The head's weight in the compute dtype, cast once per optimizer step."""
    low = codes.fprop(weight)
    assert isinstance(low, Tensor), "the head is never quantized"
    return low


def _add_product(total: Tensor | None, dlogits: Tensor, hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """total (in dtype; None for nothing yet) + dlogits [T, V]^T @ hidden [T, D], one rounding of each chunk's product."""
    if total is not None and dlogits.is_cuda and dlogits.dtype == torch.bfloat16:
        with plain_matmul(dlogits.device):  # added as the product leaves the tensor cores
            return torch.addmm(total, dlogits.mT, hidden, out_dtype=dtype, out=total)
    product = matmul_nt(dlogits.mT, hidden.mT, dtype)
    return product if total is None else total.add_(product)


def _chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    """Slices of the tokens, as few as there can be, of nearly equal lengths."""
    tokens = hidden.shape[0]
    step = at_most = max(1, (GPU_CHUNK_VALUES if hidden.is_cuda else CHUNK_VALUES) // weight.shape[0])
    if hidden.is_cuda and tokens > at_most:
        step = min(at_most, 128 * ceil_div(ceil_div(tokens, ceil_div(tokens, at_most)), 128))
    return [slice(start, min(start + step, tokens)) for start in range(0, tokens, step)]


def cross_entropy(
    edge: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor, codes: WeightCodes, kept: Stash | None = None
) -> Tensor:
    """Loss of every token, fp32 [T], 0 where targets is IGNORED.

    hidden [T, D] in the compute dtype and the autograd edge its gradient leaves by (may be hidden itself);
    weight: the head's FP32 master [V, D]; targets: int64 [T]; codes: the master's cast to the compute dtype.
    kept: how backward gets hidden back; by default it is kept.
    """
    loss: Tensor = _CrossEntropy.apply(edge, weight, hidden.detach(), targets, codes, kept or keep(hidden.detach()))
    return loss
