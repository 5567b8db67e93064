"""The latent norm's box: the norm of a down-projection's first columns, the others passing beside it, in one node.

So the gradient of the whole projection arrives in one place, and where a kernel can it leaves as codes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsv3fp8.kernels import elementwise
from dsv3fp8.ops.norm import NormCall
from dsv3fp8.ops.quantizers import Cast
from dsv3fp8.ops.slot import GradientSlot
from dsv3fp8.ops.stash import edge_of
from dsv3fp8.precision.nodes import names
from dsv3fp8.precision.tiles import QuantizedTensor


class Latent(NamedTuple):
    """latent: [T, C], the norm's input, outside autograd. beside: the columns behind it (none: [T, 0]).

    y, codes: the norm's output as in `Normed`. edge: y's autograd edge.
    """

    latent: Tensor
    beside: Tensor
    y: Tensor | None
    codes: QuantizedTensor | None
    edge: Tensor


class _LatentNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, latent: Tensor, gamma: Tensor, call: NormCall, slot: GradientSlot | None
    ) -> tuple[Tensor, Tensor]:
        ctx.node, ctx.eps, ctx.slot = call.run(latent, gamma), call.eps, slot
        ctx.save_for_backward(latent, gamma)
        return x[:, latent.shape[1] :], edge_of(latent.shape, x.dtype, x.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dbeside: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
        latent, gamma = ctx.saved_tensors
        slot, dlatent = ctx.slot, None
        columns = latent.shape[1] + dbeside.shape[1]
        if slot is not None and slot.cast and elementwise.choose_norm(latent, [dy], slot.cast[0]).backend == "triton":
            beside = dbeside if dbeside.shape[1] else None
            *codes, dgamma = elementwise.norm_backward_cast(latent, gamma, ctx.eps, dy, beside, *slot.cast)
            slot.fill(*codes)
            dx = edge_of((latent.shape[0], columns), latent.dtype, latent.device)
        else:
            dlatent, dgamma = elementwise.norm_backward(latent, gamma, ctx.eps, [dy], None)
            dx = torch.cat((dlatent, dbeside), -1) if dbeside.shape[1] else dlatent
        if ctx.node:
            of = names(ctx.node.name)
            emits = {of.dinput: dlatent, f"dg_{ctx.node.name}": dgamma}
            ctx.node.report("backward", latent, {of.doutput: dy, of.input: latent}, emits)
        return dx, None, dgamma, None, None


def latent_norm(
    x: Tensor, gamma: Tensor, eps: float, name: str, *, cast: Cast | None, keep: bool, slot: GradientSlot | None = None
) -> Latent:
    """x [T, C + R] of a down-projection with the norm's gamma [C] fp32. slot: the projection's; else as in `norm`."""
    columns = gamma.shape[0]
    # A copy, where there are columns beside it: to keep one must not keep the other.
    latent = x.detach()[:, :columns].contiguous()
    call = NormCall(eps, name, cast, keep)
    beside, edge = _LatentNorm.apply(x, latent, gamma, call, slot)
    return Latent(latent, beside, call.y, call.codes, edge)
