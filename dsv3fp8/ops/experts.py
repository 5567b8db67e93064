"""The routed experts, dispatch to combine, forward and backward node by node.

One autograd function, because what travels between its boxes is codes: the gradient that combine's backward dispatches
is E4M3 on the wire, and no BF16 dY exists behind it. Backward:

    dY -> junction cast (1x128) -> dispatched codes -> down dgrad | wgrad from re-tiled codes
       -> SwiGLU backward -> dh cast both ways -> gate/up dgrad | wgrad -> dispatch backward: BF16 rows, fp32 sum
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
    Plan,
    arrive,
    collect_copies,
    combine,
    combine_here,
    dispatch,
    dispatch_copies,
    leave,
    wire_bytes,
)  # fmt: skip
from dsv3fp8.ops.grouped import grouped_rows, grouped_wgrad
from dsv3fp8.ops.quantizers import LinearQuantizers
from dsv3fp8.ops.stash import keep, together
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


class _RoutedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, edge: Tensor, weights: Tensor, w_gate_up: Tensor, w_down: Tensor, x: Operand, call: ExpertsCall
    ) -> Tensor:
        plan, recipe = call.plan, call.recipe
        received = dispatch(x, plan)
        h = grouped_rows(received, call.gate_up_codes.fprop(w_gate_up), plan, edge.dtype, call.gate_up.gemm, "fprop")
        row_weight = dispatch_copies(weights, plan) if recipe.gate == "before" else None
        cache, act, operand = activate(h, recipe, call.down, row_weight, plan.groups)
        out = grouped_rows(operand, call.down_codes.fprop(w_down), plan, edge.dtype, call.down.gemm, "fprop")
        returned = leave(out, plan)
        made_again = recipe.swiglu_output == "recompute"
        scale = call.down.known_scale("input", operand) if made_again else ()
        tensors, ctx.restore = together(
            keep(received),
            keep(cache),
            None if made_again else keep(operand),
            keep(returned) if recipe.gate == "after" else None,  # the gate weights' gradient reads it
            keep(row_weight) if row_weight is not None and plan.wire else None,  # not to be sent twice
        )
        ctx.save_for_backward(weights, w_gate_up, w_down, *tensors, *scale)
        ctx.call, ctx.dtype, ctx.scales = call, edge.dtype, len(scale)
        routed = combine_here(returned, plan, weights if recipe.gate == "after" else None)
        ctx.node = ledger.here("dispatch")
        if ctx.node:
            outs, gates = (out, returned), (weights, row_weight)
            _report_forward(ctx.node, call, (w_gate_up, w_down), x, received, gates, h, cache, act, operand, outs, routed)
        return routed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weights, w_gate_up, w_down, *saved = ctx.saved_tensors
        call: ExpertsCall = ctx.call
        plan, recipe, dtype = call.plan, call.recipe, ctx.dtype
        scale = saved.pop() if ctx.scales else None
        received, cache, operand, output, row_weight = ctx.restore(saved)
        before = recipe.gate == "before"
        if before and row_weight is None:
            row_weight = dispatch_copies(weights, plan)

        dout, dweights = _combine_backward(dy.contiguous(), weights, output, call, ctx.node)
        dact = grouped_rows(dout, call.down_codes.dgrad(w_down), plan, dtype, call.down.gemm, "dgrad")
        if operand is None:
            operand = activate_again(cache, dtype, call.down, row_weight, plan.groups, scale)
        dout_t, operand_t = call.down.retile("gradient", dout, plan.groups), call.down.retile("input", operand, plan.groups)
        dw_down = grouped_wgrad(dout_t, operand_t, plan, w_down, call.down.gemm)
        if ctx.node:
            down = ctx.node.at("expert_down")
            reads = {"dexpert_out": dout, "w_expert_down": call.down_codes.dgrad(w_down)}
            down.report("backward", dact, reads, {"dact": dact})
            report.retiled(down, "dexpert_out", dout, dout_t, "_dy")
            report.retiled(down, "act", operand, operand_t)
            down.report("wgrad", dw_down, {"dexpert_out": dout_t, "act": operand_t}, {"dw_expert_down": dw_down})
        dh, along_n, along_tokens, drow = _swiglu_backward(cache, dact, row_weight, call)
        if before:
            assert drow is not None
            dweights = collect_copies(drow, plan)
        drows = grouped_rows(along_n, call.gate_up_codes.dgrad(w_gate_up), plan, dtype, call.gate_up.gemm, "dgrad")
        received_t = call.gate_up.retile("input", received, plan.groups)
        dw_gate_up = grouped_wgrad(along_tokens, received_t, plan, w_gate_up, call.gate_up.gemm)
        dx = combine(drows, plan)
        if ctx.node:
            swiglu, gate_up = ctx.node.at("expert_swiglu"), ctx.node.at("expert_gate_up")
            of_swiglu: ledger.Tensors = {cache_name(cache): cache, "dact": dact, "gate": row_weight}
            swiglu.report("backward", dact, of_swiglu, {"dh": dh, "dgate": drow})
            report.gradient_cast(gate_up, dh, along_n, along_tokens)
            reads = {"dh": along_n, "w_expert_gate_up": call.gate_up_codes.dgrad(w_gate_up)}
            gate_up.report("backward", drows, reads, {"dreceived": drows})
            report.retiled(gate_up, "received", received, received_t)
            reads = {"dh": along_tokens, "received": received_t}
            gate_up.report("wgrad", dw_gate_up, reads, {"dw_expert_gate_up": dw_gate_up})
            wire = wire_bytes(drows, plan)
            ctx.node.report("backward", wide(drows), {"dreceived": drows}, {"dpayload": dx}, wire=wire)
        return dx, dweights, dw_gate_up, dw_down, None, None


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


def _report_forward(
    node: ledger.Node, call: ExpertsCall, masters: tuple[Tensor, Tensor], x: Operand, received: Operand,
    gates: tuple[Tensor, Tensor | None], h: Tensor, cache: Operand, act: Tensor, operand: Operand,
    outs: tuple[Tensor, Tensor], routed: Tensor,
) -> None:  # fmt: skip
    plan, recipe, (out, returned), (weights, row_weight) = call.plan, call.recipe, outs, gates
    inert = 1 - sum(plan.counts) / plan.rows if plan.rows else 0.0
    indices = {"plan": plan.tensors}
    kept = {"received": received, "received_gate": row_weight if plan.wire else None}
    wire = wire_bytes(received, plan)
    node.report(
        "forward", received, {"payload": x, "gate": weights}, {"received": received}, kept,
        wire=wire, holds=indices, inert=inert,
    )  # fmt: skip
    codes = call.gate_up_codes.fprop(masters[0])
    node.at("expert_gate_up").report("forward", h, {"received": received, "w_expert_gate_up": codes}, {"h": h})
    gate = weights if recipe.gate == "before" else None
    report_forward(node.at("expert_swiglu"), "expert_", h, cache, act, operand, recipe, gate, inert)
    keeps: dict[str, Operand | tuple[Tensor, ...]] = {"act_scale": call.down.known_scale("input", operand)}
    if recipe.swiglu_output == "keep":
        keeps = {"act": operand}
    if recipe.gate == "after":
        keeps["expert_out"] = returned
    codes = call.down_codes.fprop(masters[1])
    node.at("expert_down").report(
        "forward", out, {"act": operand, "w_expert_down": codes}, {"expert_out": out}, keeps, inert=inert
    )
    wire, reads = wire_bytes(out, plan), {"expert_out": returned, "gate": None if recipe.gate == "before" else weights}
    node.at("combine").report("forward", wide(out), reads, {"routed": routed}, {"gate": weights}, wire=wire)


def _combine_backward(
    dy: Tensor, weights: Tensor, output: Tensor | None, call: ExpertsCall, node: ledger.Node | None
) -> tuple[Operand, Tensor | None]:
    """The gradient of every row as it arrives, and with `gate: after` the gate weights' gradient."""
    plan = call.plan
    if call.recipe.gate == "before":
        cast = call.down.quantize("gradient", dy, 1)
        received = dispatch(cast, plan)
        if node:
            _report_combine_backward(node.at("combine"), plan, dy, cast, received, None)
        return received, None
    assert output is not None
    # Each copy of dY * gate is cast before it travels; what leaves is per copy, so it is already in row order.
    quantized, rides = call.down.gemm.gradient.quantized, call.down.rides("gradient")
    given = (dy, plan.here.copy, plan.here.slot, weights, output)
    copies: Operand
    if rides and moe.choose_exchange(dy.device, weights.shape[1], dtype=dy.dtype, fmt=rides[0]).backend == "triton":
        copies, dweights = moe.weigh_cast(*given, *rides)
        weighted = moe.weigh(*given, torch.float32)[0] if node else None
    else:
        weighted, dweights = moe.weigh(*given, widened(dy.dtype) if quantized else dy.dtype)
        copies = call.down.quantize("gradient", weighted, 1)
    received = arrive(copies, plan)
    if node:
        _report_combine_backward(node.at("combine"), plan, weighted, copies, received, dweights)
    return received, dweights


def _report_combine_backward(
    node: ledger.Node, plan: Plan, dy: Tensor | None, cast: Operand, received: Operand, dweights: Tensor | None
) -> None:
    if isinstance(cast, QuantizedTensor):
        node.at("combine.cast").report("backward", cast, {"drouted": dy}, {"drouted": cast})
    wire = wire_bytes(received, plan)
    node.report("backward", received, {"drouted": cast}, {"dexpert_out": received, "dgate": dweights}, wire=wire)


def routed_experts(edge: Tensor, x: Operand, weights: Tensor, w_gate_up: Tensor, w_down: Tensor, call: ExpertsCall) -> Tensor:
    """Routed part of the MoE [T, D].

    x: the dispatch payload [T, D] as the norm emitted it, in token order. edge: its autograd edge, in the compute dtype.
    weights: gate weights fp32 [T, K].
    w_gate_up: fp32 masters [E, 2F, D]; w_down: [E, D, F].
    """
    out: Tensor = _RoutedExperts.apply(edge, weights, w_gate_up, w_down, x, call)
    return out
