"""Routed experts whose linears are Transformer Engine's GroupedLinear; dispatch, SwiGLU and combine are ours, in BF16."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsv3fp8.model.config import ModelConfig
from dsv3fp8.model.experts import RoutedExperts
from dsv3fp8.model.te import Borrower, TECodes, new_module
from dsv3fp8.ops.exchange import Plan, collect_copies, combine, dispatch, dispatch_copies
from dsv3fp8.ops.stash import Activation
from dsv3fp8.precision.recipe import Recipe
from dsv3fp8.precision.tiles import values_of


class TERoutedExperts(RoutedExperts):
    """The same masters, read by two GroupedLinears. It waits for the GPU: their splits have to be known on the host."""

    def __init__(self, config: ModelConfig, recipe: Recipe) -> None:
        super().__init__(config, recipe)
        count, hidden, dim = config.experts, config.expert_ffn, config.dim
        self.gate_up_codes, self.down_codes = TECodes(self.gate_up_quantizers), TECodes(self.down_quantizers)
        names = [f"weight{i}" for i in range(count)]
        up, down = new_module("GroupedLinear", count, dim, 2 * hidden), new_module("GroupedLinear", count, hidden, dim)
        self.up_borrower, self.down_borrower = (
            Borrower(up, names, self.gate_up_codes), Borrower(down, names, self.down_codes)
        )  # fmt: skip

    def set_out(self, x: Activation, weights: Tensor, plan: Plan) -> TEJourney:
        return TEJourney(x, weights, plan)

    def forward(self, edge: Tensor, journey: TEJourney) -> Tensor:  # type: ignore[override]
        return journey.work(edge, self)


class TEJourney:
    """As `ops.experts.Journey`; what is on the wire is waited for at once."""

    def __init__(self, x: Activation, weights: Tensor, plan: Plan) -> None:
        self._weights, self._plan = weights, plan
        self.edge: Tensor = _Dispatch.apply(x.edge, values_of(x.operand), plan)

    def work(self, rows: Tensor, experts: TERoutedExperts) -> Tensor:
        """The experts themselves."""
        splits = row_splits(self._plan)
        up, down = experts.up_borrower, experts.down_borrower
        h = up(up.lend(rows, rows, experts.gate_up), experts.gate_up, splits)
        act: Tensor = _SwiGLU.apply(h, _Pick.apply(self._weights, self._plan))
        out: Tensor = down(down.lend(act, act, experts.down), experts.down, splits)
        return out

    def come_back(self) -> Tensor:
        """The routed part of the MoE, [T, D]."""
        out: Tensor = _Combine.apply(self.edge, self._plan)
        return out


def row_splits(plan: Plan) -> list[int]:
    """Rows of each expert with its inert ones, which add up to all rows: the last one's end with those beyond."""
    starts = [*plan.starts, plan.rows]
    return [end - start for start, end in pairwise(starts)]


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, edge: Tensor, values: Tensor, plan: Plan) -> Tensor:
        ctx.plan, ctx.dtype = plan, edge.dtype
        rows = dispatch(values, plan)
        assert isinstance(rows, Tensor)
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor, None, None]:
        return combine(drows.contiguous(), ctx.plan).to(ctx.dtype), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, plan: Plan) -> Tensor:
        ctx.plan = plan
        return combine(rows, plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        drows = dispatch(dy.contiguous(), ctx.plan)
        assert isinstance(drows, Tensor)
        return drows, None


class _Pick(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, plan: Plan) -> Tensor:
        ctx.plan = plan
        return dispatch_copies(weights, plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor, None]:
        return collect_copies(drows, ctx.plan), None


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up * weight of h [rows, 2F] = [gate | up], op by op in BF16 as plain PyTorch has it; weight fp32 [rows]."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(h, weight)
        gate, up = h.chunk(2, -1)
        return F.silu(gate).mul_(up).mul_(weight[:, None].to(h.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
        h, weight = ctx.saved_tensors
        gate, up = h.chunk(2, -1)
        silu = F.silu(gate)
        dweight = (dout * silu).mul_(up).sum(-1, dtype=torch.float32)
        dact = dout * weight[:, None].to(h.dtype)
        dh = torch.cat((torch.ops.aten.silu_backward(dact * up, gate), silu.mul_(dact)), -1)
        return dh, dweight
