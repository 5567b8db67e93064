"""The RMSNorm box, with the junction behind it and the residual rail beside it; its arithmetic is kernels/norm/reference.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsv3fp8.kernels import elementwise
from dsv3fp8.kernels.norm.reference import junction
from dsv3fp8.ops.stash import edge_of
from dsv3fp8.precision import ledger
from dsv3fp8.precision.nodes import JUNCTIONS, names
from dsv3fp8.precision.widen import wide


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor, eps: float, readers: tuple[torch.dtype, ...], name: str
    ) -> tuple[Tensor, ...]:
        y = elementwise.norm_forward(x, gamma, eps)
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
        if all(grad is None for grad in grads):
            return rail, None, None, None, None
        dx, dgamma = elementwise.norm_backward(x, gamma, ctx.eps, grads, rail)
        if ctx.node:
            dy = junction(grads, x.dtype)
            assert dy is not None
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
