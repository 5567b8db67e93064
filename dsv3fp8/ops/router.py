"""The router box, FP32 throughout: logits, scores, group-limited selection, gate weights.

FP32 holds under autocast and whatever the rest of the model computes in; no TF32. The router reads the unquantized norm
output widened to fp32, and does not keep it: backward recomputes it from the norm's input, which the norm keeps anyway.
Ties go to the lowest index, on every device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsv3fp8.kernels.elementwise import norm_forward
from dsv3fp8.kernels.gemm.reference import plain_matmul
from dsv3fp8.precision import ledger
from dsv3fp8.precision.widen import wide


class Routing(NamedTuple):
    """ids int64 [T, K], ascending by rank; weights fp32 [T, K]; scores fp32 [T, E], before the bias."""

    ids: Tensor
    weights: Tensor
    scores: Tensor


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, edge: Tensor, weight: Tensor, y: Tensor, x: Tensor, gamma: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(weight, x, gamma)
        ctx.eps = eps
        y = wide(y)
        with plain_matmul(y.device):
            logits = y @ weight.mT.to(y.dtype)
        ctx.node = ledger.here("router")
        if ctx.node:
            ctx.node.report("forward", logits, {"y_ffn": y, "w_router": weight}, {}, {"x1": x})
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogits: Tensor) -> tuple[Tensor | None, ...]:
        weight, x, gamma = ctx.saved_tensors
        y = wide(norm_forward(x, gamma, ctx.eps))
        with plain_matmul(y.device):
            dy, dw = dlogits @ weight.to(dlogits.dtype), dlogits.mT @ y
        if ctx.node:
            ctx.node.report("backward", dy, {"dlogits": dlogits, "w_router": weight}, {"dy_router": dy})
            ctx.node.report("wgrad", dw, {"dlogits": dlogits, "y_ffn": y}, {"dw_router": dw})
        return dy, dw, None, None, None, None


def router_logits(edge: Tensor, weight: Tensor, y: Tensor, x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """FP32 logits [T, E] of the norm output y [T, D] = norm(x, gamma).

    edge: fp32 autograd edge of y. weight: fp32 [E, D]; anything else is refused, because a router cast to BF16 by a
    wrapper chooses other experts without anyone noticing.
    """
    if weight.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"the router's weight is {weight.dtype}: it must stay float32; exclude it from mixed precision")
    logits: Tensor = _Logits.apply(edge, weight, y, x.detach(), gamma.detach(), eps)
    return logits


def affinity(logits: Tensor, score: str) -> Tensor:
    """Scores [T, E] from fp32 logits: sigmoid (V3) or softmax (V2)."""
    scores = torch.sigmoid(logits) if score == "sigmoid" else torch.softmax(logits, -1)
    if node := ledger.here("router"):
        ledger.amend(node, "forward", {"scores": scores}, {"scores": scores})
    return scores


def top_indices(values: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest along the last dimension, largest first; equal values by lowest index."""
    # topk breaks ties differently on every device; a stable sort does not.
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[..., :count]


def select_experts(scores: Tensor, bias: Tensor, top_k: int, groups: int, kept_groups: int) -> Tensor:
    """Expert ids [T, K] by scores + bias, from the groups whose two best biased scores sum highest.

    Experts of dropped groups are masked with -inf: with 0, they would win wherever biased scores are negative.
    """
    biased = scores + bias
    if kept_groups < groups:
        by_group = biased.unflatten(-1, (groups, -1))
        best = torch.sort(by_group, dim=-1, descending=True).values[..., : min(2, by_group.shape[-1])].sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, top_indices(best, kept_groups), True)
        biased = by_group.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
    return top_indices(biased, top_k).contiguous()  # a view would keep the order of all experts for backward


def gate_weights(scores: Tensor, ids: Tensor, normalize: bool, route_scale: float) -> Tensor:
    """Weights [T, K] from the unbiased scores; normalized to sum to one if asked, then always scaled."""
    weights = chosen = scores.gather(-1, ids)
    total = None
    if normalize:
        total = chosen.sum(-1, keepdim=True) + 1e-20
        weights = chosen / total
    weights = weights * route_scale
    if node := ledger.here("router"):
        divided = {"chosen": chosen, "total": total} if normalize else {}
        ledger.amend(node, "forward", {"ids": ids, "gate": weights}, {"ids": ids, **divided})
    return weights


def expert_counts(ids: Tensor, experts: int, real: Tensor | None) -> Tensor:
    """Tokens per expert, int64 [E]; padding tokens (real [T] False) are not counted."""
    chosen = ids if real is None else ids[real]
    return torch.bincount(chosen.flatten(), minlength=experts)


def balance_loss(scores: Tensor, top_k: int, sequences: int, real: Tensor | None) -> Tensor:
    """Sequence-wise balance loss (report Eq. 17-20), summed over sequences, without its factor alpha.

    scores: fp32 [B * S, E]. Per sequence: sum_i f_i P_i, with f_i = E / (K T) * tokens whose top K affinities (without
    bias) hold expert i, and P_i the mean normalized affinity. Padding tokens (real False) count for nothing.
    """
    experts = scores.shape[-1]
    per_sequence = scores.unflatten(0, (sequences, -1))
    total = per_sequence.sum(-1, keepdim=True) + 1e-20
    share = per_sequence / total
    chosen = torch.zeros_like(share).scatter_(-1, top_indices(per_sequence.detach(), top_k), 1.0)
    if real is None:
        tokens: Tensor | int = max(share.shape[1], 1)
    else:
        mask = real.view(sequences, -1, 1).to(share.dtype)
        share, chosen = share * mask, chosen * mask
        tokens = mask.sum(1).clamp(min=1)
    frequency = chosen.sum(1) * experts / top_k / tokens
    if node := ledger.here("router"):
        masks = [t for t in (mask, tokens) if isinstance(t, Tensor)] if real is not None else []
        ledger.amend(node, "forward", {}, {"shares": total, "frequency": frequency, "real": masks})
    return (frequency * (share.sum(1) / tokens)).sum()
