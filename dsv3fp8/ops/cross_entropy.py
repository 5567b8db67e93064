"""The output head and cross-entropy in FP32, in chunks of tokens, so that a long batch's logits never exist at once.

Backward recomputes each chunk's logits from the hidden states; the log-sum-exp is all that is kept besides. Any
gradient per token is right (weights, masks, an expanded scalar), because nothing is scaled in forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsv3fp8.kernels.gemm.reference import matmul_nt
from dsv3fp8.ops.stash import Stash, keep
from dsv3fp8.ops.weights import compute_dtype
from dsv3fp8.precision import ledger
from dsv3fp8.precision.tiles import values_of
from dsv3fp8.precision.widen import widened

IGNORED = -100
CHUNK_VALUES = 2**24  # logits of one chunk: 64 MB in fp32


def chunk_rows(vocabulary: int) -> int:
    return max(1, CHUNK_VALUES // vocabulary)


def head_logits(hidden: Tensor, weight: Tensor, compute: str) -> Tensor:
    """FP32 logits [T, V] of hidden [T, D], from the head's master weight [V, D] cast to the compute dtype."""
    dtype = compute_dtype(compute, weight)
    return matmul_nt(hidden.to(dtype), weight.detach().to(dtype), widened(dtype))


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, edge: Tensor, weight: Tensor, hidden: Tensor, targets: Tensor, compute: str, kept: Stash) -> Tensor:
        dtype = compute_dtype(compute, weight)
        low = weight.detach().to(dtype)
        wide = widened(dtype)
        loss, lse = (torch.zeros(hidden.shape[0], dtype=wide, device=hidden.device) for _ in range(2))
        for rows in _chunks(hidden, weight):
            logits = matmul_nt(hidden[rows], low, wide)
            lse[rows] = torch.logsumexp(logits, -1)
            picked = logits.gather(1, targets[rows].clamp(min=0)[:, None])[:, 0]
            loss[rows] = torch.where(targets[rows] == IGNORED, 0.0, lse[rows] - picked)
        ctx.save_for_backward(weight, targets, lse, *kept.tensors)
        ctx.compute, ctx.restore = compute, kept.restore
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
        dtype = compute_dtype(ctx.compute, weight)
        low = weight.to(dtype)
        low_t = low.mT.contiguous()
        wide = widened(dtype)
        dhidden, dweight = torch.empty_like(hidden), torch.zeros_like(weight)
        for rows in _chunks(hidden, weight):
            dlogits = torch.exp(matmul_nt(hidden[rows], low, wide) - lse[rows][:, None])
            index = targets[rows].clamp(min=0)[:, None]
            dlogits.scatter_add_(1, index, torch.full_like(index, -1, dtype=wide))
            scale = torch.where(targets[rows] == IGNORED, 0.0, dloss[rows])
            dlogits = (dlogits * scale[:, None]).to(dtype)
            dhidden[rows] = matmul_nt(dlogits, low_t, hidden.dtype)
            dweight += matmul_nt(dlogits.mT, hidden[rows].mT, dweight.dtype)
        if ctx.node:
            ctx.node.report("backward", low, {"dloss": dloss, "w_head": low}, {"dy": dhidden})
            ctx.node.report("wgrad", low, {"y": hidden}, {"dw_head": dweight})
        return dhidden, dweight, None, None, None, None


def _chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    step = chunk_rows(weight.shape[0])
    return [slice(start, min(start + step, hidden.shape[0])) for start in range(0, hidden.shape[0], step)]


def cross_entropy(
    edge: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor, compute: str, kept: Stash | None = None
) -> Tensor:
    """Loss of every token, fp32 [T], 0 where targets is IGNORED.

    hidden [T, D] in the compute dtype and the autograd edge its gradient leaves by (may be hidden itself);
    weight: the head's FP32 master [V, D]; targets: int64 [T]; compute: the recipe's.
    kept: how backward gets hidden back; by default it is kept.
    """
    loss: Tensor = _CrossEntropy.apply(edge, weight, hidden.detach(), targets, compute, kept or keep(hidden.detach()))
    return loss
