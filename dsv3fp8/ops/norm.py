"""The RMSNorm box, with the junction behind it and the residual rail beside it.

Forward reads BF16, computes in fp32 and rounds once. Backward reads the norm's input again, sums the gradients of the
norm output's readers in fp32 in the order given (one rounding), and adds the residual rail to dx before its one rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsv3fp8.ops.stash import edge_of
from dsv3fp8.precision import ledger
from dsv3fp8.precision.nodes import JUNCTIONS, names
from dsv3fp8.precision.widen import wide


def norm_forward(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """gamma * x / sqrt(mean(x^2) + eps) over the last dimension, in x's dtype, one rounding."""
    return (_normalized(x, eps)[0] * gamma).to(x.dtype)


def norm_backward(x: Tensor, gamma: Tensor, eps: float, dy: Tensor, rail: Tensor | None) -> tuple[Tensor, Tensor]:
    """(dx + rail in x's dtype, dgamma in fp32) from the norm's input."""
    x_hat, rstd = _normalized(x, eps)
    grad = wide(dy)
    dgamma = (grad * x_hat).flatten(0, -2).sum(0)
    scaled = grad * gamma
    dx = (scaled - x_hat * (scaled * x_hat).mean(-1, keepdim=True)) * rstd
    if rail is not None:
        dx = dx + wide(rail)
    return dx.to(x.dtype), dgamma


def _normalized(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    values = wide(x)
    rstd = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return values * rstd, rstd


def junction(grads: list[Tensor | None], dtype: torch.dtype) -> Tensor | None:
    """Sums gradients in fp32 in the order given and rounds once; a single one passes through."""
    given = [g for g in grads if g is not None]
    if not given:
        return None
    total = wide(given[0])
    for grad in given[1:]:
        total = total + wide(grad)
    return total.to(dtype)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor, eps: float, readers: tuple[torch.dtype, ...], name: str
    ) -> tuple[Tensor, ...]:
        y = norm_forward(x, gamma, eps)
        ctx.node = ledger.here(name)
        if ctx.node:
            of = names(name)
            ctx.node.report("forward", y, {of.input: x, f"g_{name}": gamma}, {of.output: y}, {of.input: x})
        ctx.save_for_backward(x, gamma)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(y)
        return x.view_as(x), y, *(edge_of(x.shape, dtype, x.device) for dtype in readers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rail: Tensor | None, _: None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, gamma = ctx.saved_tensors
        dy = junction(list(grads), x.dtype)
        if dy is None:
            return rail, None, None, None, None
        dx, dgamma = norm_backward(x, gamma, ctx.eps, dy, rail)
        if ctx.node:
            _report_backward(ctx.node, grads, dy, x, rail, dx, dgamma)
        return dx, dgamma, None, None, None


def _report_backward(
    node: ledger.Node, grads: tuple[Tensor | None, ...], dy: Tensor, x: Tensor, rail: Tensor | None, dx: Tensor, dgamma: Tensor
) -> None:
    of = names(node.name)
    if sum(grad is not None for grad in grads) > 1:
        branches = dict(zip(JUNCTIONS.get(node.name, ()), grads, strict=False))
        node.at(f"{node.name}.junction").report("backward", wide(dy), branches, {of.doutput: dy})
    rail_name = "dx2" if node.name == "ffn_norm" else "dx1"
    node.report("backward", dx, {of.doutput: dy, of.input: x, rail_name: rail}, {of.dinput: dx, f"dg_{node.name}": dgamma})


def norm(
    x: Tensor, gamma: Tensor, eps: float, readers: tuple[torch.dtype, ...], name: str = "norm"
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """RMSNorm of x [..., D] with gamma [D] fp32. name: what the ledger calls it.

    Returns:
        rail: x again; its gradient joins dx in fp32 before the one rounding. Leave it unused where there is no rail.
        y: the norm's output, outside autograd.
        edges: one autograd edge per reader of y, in the dtype its gradient arrives in, summed in this order.
    """
    rail, y, *edges = _Norm.apply(x, gamma, eps, readers, name)
    return rail, y, tuple(edges)
