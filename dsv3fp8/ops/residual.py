"""The residual junction: x1 + routed + shared in fp32, in that order, with one rounding. Every branch's gradient is dY."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv3fp8.kernels import moe
from dsv3fp8.precision import ledger
from dsv3fp8.precision.widen import wide


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *branches: Tensor) -> Tensor:
        ctx.dtypes = [t.dtype for t in (x, *branches)]
        out = moe.residual_sum(x, *branches)
        ctx.node = ledger.here("residual")
        if ctx.node:
            ctx.node.report("forward", wide(out), {"x1": x, "branches": branches}, {"x2": out})
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        if ctx.node:
            ctx.node.report("backward", dy, {"dx2": dy}, {"dx2": dy})
        return tuple(dy.to(dtype) for dtype in ctx.dtypes)


def residual_sum(x: Tensor, *branches: Tensor) -> Tensor:
    """x + branches, summed in fp32 in the order given, rounded once to x's dtype."""
    out: Tensor = _Sum.apply(x, *branches)
    return out
