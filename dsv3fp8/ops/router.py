"""The router box, FP32 throughout: logits, and what follows from them as kernels/router/reference.py has it.

FP32 holds under autocast and whatever the rest of the model computes in; no TF32. The router reads the unquantized norm
output widened to fp32, and does not keep it: backward recomputes it from the norm's input, which the norm keeps anyway.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsv3fp8.kernels import moe
from dsv3fp8.kernels.elementwise import norm_forward
from dsv3fp8.kernels.gemm.reference import plain_matmul
from dsv3fp8.kernels.router.reference import Kept
from dsv3fp8.kernels.router.reference import Rule as Rule
from dsv3fp8.precision import ledger
from dsv3fp8.precision.widen import wide


class Routing(NamedTuple):
    """ids int64 [T, K], ascending by rank; weights fp32 [T, K]; the balance loss, summed over sequences, without its factor."""

    ids: Tensor
    weights: Tensor
    balance: Tensor


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


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, bias: Tensor, rule: Rule, sequences: int, real: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights, balance, kept = moe.route(logits, bias, rule, sequences, real)
        ctx.save_for_backward(*kept)
        ctx.rule = rule
        ctx.mark_non_differentiable(kept.ids)
        if node := ledger.here("router"):
            keeps = {name: getattr(kept, name) for name in ("scores", "ids", "chosen", "total", "shares", "frequency")}
            masks = [t for t in (kept.real, kept.tokens) if t is not None]
            emits = {"scores": kept.scores, "ids": kept.ids, "gate": weights}
            ledger.amend(node, "forward", emits, {**keeps, "real": masks})
        return kept.ids, weights, balance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, dweights: Tensor, dbalance: Tensor) -> tuple[Tensor | None, ...]:
        return moe.route_backward(Kept(*ctx.saved_tensors), dweights, dbalance, ctx.rule), None, None, None, None


def route(logits: Tensor, bias: Tensor, rule: Rule, sequences: int, real: Tensor | None) -> Routing:
    """Experts, gate weights and balance loss from fp32 logits [B * S, E] of so many sequences B.

    bias: fp32 [E], selects and never weighs. real: bool [B * S], False for padding, which is weighed like any token but
    counts for nothing in the loss.
    """
    return Routing(*_Route.apply(logits, bias, rule, sequences, real))
