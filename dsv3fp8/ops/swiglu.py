"""The SwiGLU box with the quantize box before it: silu(gate) * up, its input kept in E4M3 where the recipe says so.

The quantize box is straight-through in backward. The output is recomputed from the kept input for the down
projection's wgrad (report §3.3.3) or kept, as the recipe says.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsv3fp8.kernels import backend
from dsv3fp8.kernels.elementwise import (
    choose_swiglu,
    swiglu_backward,
    swiglu_backward_cast,
    swiglu_forward,
    swiglu_forward_again,
    swiglu_forward_cast,
)
from dsv3fp8.ops.quantizers import LinearQuantizers
from dsv3fp8.ops.slot import GradientSlot
from dsv3fp8.ops.stash import Activation, Stash, edge_of, keep
from dsv3fp8.precision import ledger
from dsv3fp8.precision.formats import E4M3
from dsv3fp8.precision.recipe import Recipe
from dsv3fp8.precision.tiles import ROW_128, Operand, QuantizedTensor


def cache_name(cache: Operand) -> str:
    return "h_cache" if isinstance(cache, QuantizedTensor) else "h"


def report_forward(
    node: ledger.Node, prefix: str, h: Tensor, cache: Operand, out: Tensor, operand: Operand, recipe: Recipe,
    gate: Tensor | None = None, inert: float = 0.0,
) -> None:  # fmt: skip
    """The quantize box, where there is one, and SwiGLU with the cast of its output."""
    name, keeps = cache_name(cache), {cache_name(cache): cache}
    if isinstance(cache, QuantizedTensor):
        node.at(f"{prefix}quantize").report("forward", cache, {"h": h}, {name: cache}, keeps, inert=inert)
        keeps = {}
    read = {name: cache} if recipe.swiglu_input == "cache" else {"h": h}
    fused = (operand.format.name,) if isinstance(operand, QuantizedTensor) else ()
    node.report("forward", out, {**read, "gate": gate}, {"act": operand}, keeps, fused=fused, inert=inert)


def activate(
    h: Tensor, recipe: Recipe, down: LinearQuantizers, weight: Tensor | None = None, groups: Tensor | None = None
) -> tuple[Operand, Tensor, Operand]:
    """(h as it is kept for backward, a tensor of the type computed in, the down projection's operand) from h [T, 2F].

    weight: fp32 [T], multiplied inside. groups: as in `LinearQuantizers.quantize`.
    """
    cache = recipe.swiglu_cache
    if (cast := down.rides("input")) and choose_swiglu(h, cast[0]).backend == "triton":
        if cache.format != "e4m3":
            return h, h, swiglu_forward_again(h, h.dtype, weight, *cast)
        cached, operand = swiglu_forward_cast(h, weight, cache.scale, recipe.swiglu_input == "cache", *cast)
        return cached, h, operand
    kept: Operand = backend.quantize(h, E4M3, ROW_128, cache.scale, col_parts=2) if cache.format == "e4m3" else h
    out = swiglu_forward(kept if recipe.swiglu_input == "cache" else h, h.dtype, weight)
    return kept, out, down.quantize("input", out, 1, groups=groups)


def activate_again(
    cache: Operand, dtype: torch.dtype, down: LinearQuantizers, weight: Tensor | None = None,
    groups: Tensor | None = None, scale: Tensor | None = None,
) -> Operand:  # fmt: skip
    """The down projection's operand from what was kept. scale: as in `LinearQuantizers.quantize`."""
    if (cast := down.rides("input")) and choose_swiglu(cache, cast[0]).backend == "triton":
        return swiglu_forward_again(cache, dtype, weight, *cast)
    return down.quantize("input", swiglu_forward(cache, dtype, weight), 1, groups=groups, scale=scale)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, cache: Stash, node: ledger.Node | None, slot: GradientSlot | None) -> Tensor:
        ctx.save_for_backward(*cache.tensors)
        ctx.restore, ctx.dtype, ctx.node, ctx.slot = cache.restore, h.dtype, node, slot
        return edge_of((h.shape[0], h.shape[1] // 2), h.dtype, h.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None, None]:
        cache, slot, dh = ctx.restore(ctx.saved_tensors), ctx.slot, None
        if slot is not None and slot.cast and choose_swiglu(cache, slot.cast[0]).backend == "triton":
            along_n, along_tokens, _ = swiglu_backward_cast(cache, dout, None, *slot.cast)
            slot.fill(along_n, along_tokens)
        else:
            dh, _ = swiglu_backward(cache, dout, ctx.dtype)
        if ctx.node:
            ctx.node.report("backward", dout, {cache_name(cache): cache, "dact": dout}, {"dh": dh})
        return edge_of(cache.shape, ctx.dtype, dout.device) if dh is None else dh, None, None, None


def swiglu(h: Tensor, recipe: Recipe, down: LinearQuantizers, slot: GradientSlot | None = None) -> Activation:
    """h [T, 2F] -> the down projection's input [T, F].

    down: the quantizers of the down projection, which mint it. slot: of the linear that h comes from.
    """
    with torch.no_grad():
        cached, out, operand = activate(h, recipe, down)
        cache = keep(cached, cache_name(cached))
    prefix = down.gemm.op.removesuffix("down")
    node = ledger.here(f"{prefix}swiglu")
    if node:
        report_forward(node, prefix, h, cached, out, operand, recipe)
    edge = _SwiGLU.apply(h, cache, node, slot)
    if recipe.swiglu_output == "keep":
        return Activation(edge, operand)
    dtype, restore, scale = h.dtype, cache.restore, down.known_scale("input", operand)
    cached_parts = len(cache.tensors)

    def recompute(saved: tuple[Tensor, ...]) -> Operand:
        known = saved[cached_parts:]
        return activate_again(restore(saved[:cached_parts]), dtype, down, scale=known[0] if known else None)

    return Activation(edge, operand, Stash((*cache.tensors, *scale), recompute, cache.shell, cache.name))
