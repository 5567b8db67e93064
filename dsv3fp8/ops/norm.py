"""The RMSNorm box, with the junction behind it and the residual rail beside it; its arithmetic is kernels/norm/reference.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsv3fp8.kernels import elementwise
from dsv3fp8.kernels.backend import quantize
from dsv3fp8.kernels.norm.reference import junction
from dsv3fp8.ops.quantizers import Cast
from dsv3fp8.ops.stash import edge_of
from dsv3fp8.precision import ledger
from dsv3fp8.precision.nodes import JUNCTIONS, names
from dsv3fp8.precision.tiles import ROW_128, QuantizedTensor
from dsv3fp8.precision.widen import wide


class Normed(NamedTuple):
    """rail: x again; its gradient joins dx in fp32 before the one rounding. Leave it unused where there is no rail.

    y: the norm's output, outside autograd; None where only its cast was asked for. codes: that cast, in 1x128 tiles.
    edges: one autograd edge per reader of y, in the dtype its gradient arrives in, summed in this order.
    """

    rail: Tensor
    y: Tensor | None
    codes: QuantizedTensor | None
    edges: tuple[Tensor, ...]


@dataclass
class NormCall:
    """The non-tensor arguments, and what forward gives beside autograd.

    cast: what rides on the norm's output; keep: whether the output itself is read too.
    """

    eps: float
    name: str
    cast: Cast | None
    keep: bool
    y: Tensor | None = None
    codes: QuantizedTensor | None = None

    def run(self, x: Tensor, gamma: Tensor) -> ledger.Node | None:
        """Sets y and codes; the op's place in the ledger."""
        self.y, self.codes = normalize(x, gamma, self.eps, self.cast, self.keep)
        node = ledger.here(self.name)
        if node:
            of = names(self.name)
            node.report("forward", x, {of.input: x, f"g_{self.name}": gamma}, {of.output: self.y}, {of.input: x})
        return node


def normalize(
    x: Tensor, gamma: Tensor, eps: float, cast: Cast | None, keep: bool
) -> tuple[Tensor | None, QuantizedTensor | None]:
    """(the norm's output where it is kept, its 1x128 tiles where a cast is asked for)."""
    if cast is None:
        return elementwise.norm_forward(x, gamma, eps), None
    fmt, kind = cast
    if elementwise.choose_norm(x, fmt=fmt).backend == "triton":
        return elementwise.norm_forward_cast(x, gamma, eps, fmt, kind, keep)
    y = elementwise.norm_forward(x, gamma, eps)
    return y if keep else None, quantize(y, fmt, ROW_128, kind)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, readers: tuple[torch.dtype, ...], call: NormCall) -> tuple[Tensor, ...]:
        ctx.node, ctx.eps = call.run(x, gamma), call.eps
        ctx.save_for_backward(x, gamma)
        ctx.set_materialize_grads(False)
        return x.view_as(x), *(edge_of(x.shape, dtype, x.device) for dtype in readers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rail: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, gamma = ctx.saved_tensors
        if all(grad is None for grad in grads):
            return rail, None, None, None
        dx, dgamma = elementwise.norm_backward(x, gamma, ctx.eps, grads, rail)
        if ctx.node:
            dy = junction(grads, x.dtype)
            assert dy is not None
            _report_backward(ctx.node, grads, dy, x, rail, dx, dgamma)
        return dx, dgamma, None, None


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
    x: Tensor,
    gamma: Tensor,
    eps: float,
    readers: tuple[torch.dtype, ...],
    name: str = "norm",
    *,
    cast: Cast | None = None,
    keep: bool = True,
) -> Normed:
    """RMSNorm of x [..., D] with gamma [D] fp32. name: what the ledger calls it.

    readers: the dtypes in which the gradients of y come. cast: of y, on the way. keep: whether y itself is read.
    """
    call = NormCall(eps, name, cast, keep)
    rail, *edges = _Norm.apply(x, gamma, readers, call)
    return Normed(rail, call.y, call.codes, tuple(edges))
