"""The routed experts, dispatch to combine, forward and backward node by node.

Three autograd functions, between which rows may be on the wire: other work finds its place there, forward and, since autograd
takes the nodes in reverse, backward. What travels between them is codes, not autograd's values: the gradient that
combine's backward dispatches is E4M3 on the wire, and no BF16 dY exists behind it. Backward:

    come back: dY -> junction cast (1x128) -> codes leave
    work: dispatched codes -> down dgrad | wgrad from re-tiled codes
          -> SwiGLU backward -> dh cast both ways -> gate/up dgrad | wgrad -> BF16 rows leave
    set out: dispatch backward, fp32 sum of the rows
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsv3fp8.kernels import moe
from dsv3fp8.kernels.elementwise import choose_swiglu, swiglu_backward, swiglu_backward_cast
from dsv3fp8.ops import report
from dsv3fp8.ops.exchange import (
    Arrival,
    Plan,
    Return,
    combine_here,
    dispatch_copies,
    send_back,
    send_copies,
    send_rows,
    send_values,
    send_values_back,
    wire_bytes,
)  # fmt: skip
from dsv3fp8.ops.grouped import grouped_rows, grouped_wgrad
from dsv3fp8.ops.quantizers import LinearQuantizers
from dsv3fp8.ops.stash import edge_of, keep, together
from dsv3fp8.ops.swiglu import activate, activate_again, cache_name, report_forward
from dsv3fp8.ops.weights import WeightCodes
from dsv3fp8.precision import ledger
from dsv3fp8.precision.recipe import Recipe
from dsv3fp8.precision.tiles import Operand, QuantizedTensor
from dsv3fp8.precision.widen import wide, widened


@dataclass(frozen=True)
class ExpertsCall:
    """The non-tensor arguments."""

    plan: Plan
    recipe: Recipe
    gate_up: LinearQuantizers
    down: LinearQuantizers
    gate_up_codes: WeightCodes
    down_codes: WeightCodes


@dataclass
class Underway:
    """What is on its way between two of the functions; whoever takes it leaves nothing behind.

    rows: the payload, the experts' output or one of their gradients. values: gate weights, or their gradient.
    told: what a ledger is told of at the other end, of what has left; empty without one.
    """

    rows: Arrival | Return | None = None
    values: Return | None = None
    told: tuple[Any, ...] = ()

    def take(self) -> tuple[Operand, Tensor | None, tuple[Any, ...]]:
        """Waits for all of it."""
        rows, values, told = self.rows, self.values, self.told
        assert rows is not None, "nothing is on its way"
        self.rows, self.values, self.told = None, None, ()
        return rows(), values() if values is not None else None, told


class _SetOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, edge: Tensor, weights: Tensor, x: Operand, call: ExpertsCall, way: Underway) -> Tensor:
        ctx.call, ctx.way, ctx.node = call, way, ledger.here("dispatch")
        way.rows = send_rows(x, call.plan)
        way.values = send_values(weights, call.plan) if call.recipe.gate == "before" else None
        way.told = (x,) if ctx.node else ()
        return edge_of((call.plan.rows, edge.shape[-1]), edge.dtype, edge.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        plan = ctx.call.plan
        rows, dweights, told = ctx.way.take()
        assert isinstance(rows, Tensor)
        dx = combine_here(rows, plan)
        if ctx.node:
            (drows,) = told
            ctx.node.report("backward", wide(drows), {"dreceived": drows}, {"dpayload": dx}, wire=wire_bytes(drows, plan))
        return dx, dweights, None, None, None


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, edge: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, call: ExpertsCall, way: Underway
    ) -> Tensor:
        """weights: without their graph, to be sent again in backward where no wire keeps what has arrived."""
        plan, recipe, dtype = call.plan, call.recipe, edge.dtype
        received, row_weight, told = way.take()
        h = grouped_rows(received, call.gate_up_codes.fprop(w_gate_up), plan, dtype, call.gate_up.gemm, "fprop")
        cache, act, operand = activate(h, recipe, call.down, row_weight, plan.groups)
        out = grouped_rows(operand, call.down_codes.fprop(w_down), plan, dtype, call.down.gemm, "fprop")
        way.rows = send_back(out, plan)
        made_again = recipe.swiglu_output == "recompute"
        scale = call.down.known_scale("input", operand) if made_again else ()
        gates = None if row_weight is None else row_weight if plan.wire else weights
        tensors, ctx.restore = together(
            keep(received),
            keep(cache),
            None if made_again else keep(operand),
            None if gates is None else keep(gates),
        )  # fmt: skip
        ctx.save_for_backward(w_gate_up, w_down, *tensors, *scale)
        ctx.call, ctx.way, ctx.dtype, ctx.scales = call, way, dtype, len(scale)
        ctx.node = ledger.here("dispatch")
        if ctx.node:
            (x,), way.told = told, (out,)
            _report_work(ctx.node, call, (w_gate_up, w_down), x, received, (weights, row_weight), h, cache, act, operand, out)
        return edge_of(out.shape, dtype, out.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        w_gate_up, w_down, *saved = ctx.saved_tensors
        call: ExpertsCall = ctx.call
        plan, dtype = call.plan, ctx.dtype
        scale = saved.pop() if ctx.scales else None
        received, cache, operand, gates = ctx.restore(saved)
        row_weight = gates if plan.wire or gates is None else dispatch_copies(gates, plan)

        dout, _, told = ctx.way.take()
        if ctx.node:
            _report_combine_backward(ctx.node.at("combine"), plan, dout, *told)
        dact = grouped_rows(dout, call.down_codes.dgrad(w_down), plan, dtype, call.down.gemm, "dgrad")
        if operand is None:
            operand = activate_again(cache, dtype, call.down, row_weight, plan.groups, scale)
        dout_t, operand_t = call.down.retile("gradient", dout, plan.groups), call.down.retile("input", operand, plan.groups)
        dw_down = grouped_wgrad(dout_t, operand_t, plan, w_down, call.down.gemm)
        if ctx.node:
            down = ctx.node.at("expert_down")
            given = {"dexpert_out": dout, "w_expert_down": call.down_codes.dgrad(w_down)}
            down.report("backward", dact, given, {"dact": dact})
            report.retiled(down, "dexpert_out", dout, dout_t, "_dy")
            report.retiled(down, "act", operand, operand_t)
            down.report("wgrad", dw_down, {"dexpert_out": dout_t, "act": operand_t}, {"dw_expert_down": dw_down})
        dh, along_n, along_tokens, drow = _swiglu_backward(cache, dact, row_weight, call)
        drows = grouped_rows(along_n, call.gate_up_codes.dgrad(w_gate_up), plan, dtype, call.gate_up.gemm, "dgrad")
        ctx.way.rows, ctx.way.told = send_back(drows, plan), (drows,) if ctx.node else ()
        ctx.way.values = send_values_back(drow, plan) if drow is not None and call.recipe.gate == "before" else None
        received_t = call.gate_up.retile("input", received, plan.groups)
        dw_gate_up = grouped_wgrad(along_tokens, received_t, plan, w_gate_up, call.gate_up.gemm)
        if ctx.node:
            swiglu, gate_up = ctx.node.at("expert_swiglu"), ctx.node.at("expert_gate_up")
            of_swiglu: ledger.Tensors = {cache_name(cache): cache, "dact": dact, "gate": row_weight}
            swiglu.report("backward", dact, of_swiglu, {"dh": dh, "dgate": drow})
            report.gradient_cast(gate_up, dh, along_n, along_tokens)
            given = {"dh": along_n, "w_expert_gate_up": call.gate_up_codes.dgrad(w_gate_up)}
            gate_up.report("backward", drows, given, {"dreceived": drows})
            report.retiled(gate_up, "received", received, received_t)
            given = {"dh": along_tokens, "received": received_t}
            gate_up.report("wgrad", dw_gate_up, given, {"dw_expert_gate_up": dw_gate_up})
        return edge_of((plan.rows, drows.shape[-1]), dtype, drows.device), dw_gate_up, dw_down, None, None, None


class _ComeBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, edge: Tensor, weights: Tensor, call: ExpertsCall, way: Underway) -> Tensor:
        plan, after = call.plan, call.recipe.gate == "after"
        returned, _, told = way.take()
        assert isinstance(returned, Tensor)
        routed = combine_here(returned, plan, weights if after else None)
        # The gate weights' gradient reads the experts' output.
        ctx.save_for_backward(*((weights, returned) if after else ()))
        ctx.call, ctx.way, ctx.node = call, way, ledger.here("combine")
        if ctx.node:
            (out,) = told
            reads = {"expert_out": returned, "gate": weights if after else None}
            keeps = {"gate": weights if after or plan.wire is None else None, "expert_out": returned if after else None}
            ctx.node.report("forward", wide(out), reads, {"routed": routed}, keeps, wire=wire_bytes(out, plan))
        return routed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call, way, dy = ctx.call, ctx.way, dy.contiguous()
        dweights: Tensor | None = None
        weighted: Tensor | None = dy
        if call.recipe.gate == "before":
            cast = call.down.quantize("gradient", dy, 1)
            way.rows = send_rows(cast, call.plan)
        else:
            weights, output = ctx.saved_tensors
            weighted, cast, dweights = _weigh(dy, weights, output, call, bool(ctx.node))
            way.rows = send_copies(cast, call.plan)
        way.told = (weighted, cast, dweights) if ctx.node else ()
        return edge_of((call.plan.rows, dy.shape[-1]), dy.dtype, dy.device), dweights, None, None


def _swiglu_backward(
    cache: Operand, dact: Tensor, row_weight: Tensor | None, call: ExpertsCall
) -> tuple[Tensor | None, Operand, Operand, Tensor | None]:
    """(dh, None where its kernel hosts its casts; dh along its columns and along the tokens; the gate weights' gradient)."""
    gate_up, groups = call.gate_up, call.plan.groups
    if (cast := gate_up.rides("gradient")) and choose_swiglu(cache, cast[0]).backend == "triton":
        return None, *swiglu_backward_cast(cache, dact, row_weight, *cast)
    dh, drow = swiglu_backward(cache, dact, dact.dtype, row_weight)
    along_n = gate_up.quantize("gradient", dh, 1, col_parts=2, groups=groups)
    return dh, along_n, gate_up.other_orientation("gradient", dh, along_n, col_parts=2, groups=groups), drow


def _weigh(dy: Tensor, weights: Tensor, output: Tensor, call: ExpertsCall, told: bool) -> tuple[Tensor | None, Operand, Tensor]:
    """`gate: after`: (dY times the gate weight of each copy, in its row, for a ledger; its cast; the gate weights' gradient).

    Each copy is cast before it travels; what leaves is per copy, so it is already in row order.
    """
    plan = call.plan
    quantized, rides = call.down.gemm.gradient.quantized, call.down.rides("gradient")
    given = (dy, plan.here.copy, plan.here.slot, weights, output)
    if rides and moe.choose_exchange(dy.device, weights.shape[1], dtype=dy.dtype, fmt=rides[0]).backend == "triton":
        copies, dweights = moe.weigh_cast(*given, *rides)
        return moe.weigh(*given, torch.float32)[0] if told else None, copies, dweights
    weighted, dweights = moe.weigh(*given, widened(dy.dtype) if quantized else dy.dtype)
    return weighted, call.down.quantize("gradient", weighted, 1), dweights


def _report_work(
    node: ledger.Node, call: ExpertsCall, masters: tuple[Tensor, Tensor], x: Operand, received: Operand,
    gates: tuple[Tensor, Tensor | None], h: Tensor, cache: Operand, act: Tensor, operand: Operand, out: Tensor,
) -> None:  # fmt: skip
    plan, recipe, (weights, row_weight) = call.plan, call.recipe, gates
    inert = 1 - sum(plan.counts) / plan.rows if plan.rows else 0.0
    kept = {"received": received, "received_gate": row_weight if plan.wire else None}
    node.report(
        "forward", received, {"payload": x, "gate": weights}, {"received": received}, kept,
        wire=wire_bytes(received, plan), holds={"plan": plan.tensors}, inert=inert,
    )  # fmt: skip
    codes = call.gate_up_codes.fprop(masters[0])
    node.at("expert_gate_up").report("forward", h, {"received": received, "w_expert_gate_up": codes}, {"h": h})
    gate = weights if recipe.gate == "before" else None
    report_forward(node.at("expert_swiglu"), "expert_", h, cache, act, operand, recipe, gate, inert)
    known = {"act_scale": call.down.known_scale("input", operand)}
    keeps = {"act": operand} if recipe.swiglu_output == "keep" else known
    codes = call.down_codes.fprop(masters[1])
    node.at("expert_down").report(
        "forward", out, {"act": operand, "w_expert_down": codes}, {"expert_out": out}, keeps, inert=inert
    )


def _report_combine_backward(
    node: ledger.Node, plan: Plan, received: Operand, dy: Tensor | None, cast: Operand, dweights: Tensor | None
) -> None:
    if isinstance(cast, QuantizedTensor):
        node.at("combine.cast").report("backward", cast, {"drouted": dy}, {"drouted": cast})
    wire = wire_bytes(received, plan)
    node.report("backward", received, {"drouted": cast}, {"dexpert_out": received, "dgate": dweights}, wire=wire)


class Journey:
    """The copies of tokens on their way to the routed experts and back: set out, worked on, brought home, in this order.

    Between two of these calls they are on the wire, where there is one; in backward, where the calls come in reverse, their
    gradients are. edge: the autograd edge that the next call takes.
    """

    def __init__(self, edge: Tensor, x: Operand, weights: Tensor, call: ExpertsCall) -> None:
        """Sets out.

        x: the dispatch payload [T, D] as the norm emitted it, in token order. edge: its autograd edge, in the compute dtype.
        weights: gate weights fp32 [T, K].
        """
        self._call, self._way, self._weights = call, Underway(), weights
        self.edge: Tensor = _SetOut.apply(edge, weights, x, call, self._way)

    def work(self, edge: Tensor, masters: tuple[Tensor, Tensor]) -> Tensor:
        """The experts themselves, from the edge to the next one. masters: fp32 gate and up [E, 2F, D], down [E, D, F]."""
        out: Tensor = _Work.apply(edge, *masters, self._weights.detach(), self._call, self._way)
        return out

    def come_back(self) -> Tensor:
        """The routed part of the MoE, [T, D]."""
        out: Tensor = _ComeBack.apply(self.edge, self._weights, self._call, self._way)
        return out
