"""The SwiGLU box with the quantize box before it: silu(gate) * up, its input kept in E4M3 where the recipe says so.

The quantize box is straight-through in backward. The output is recomputed from the kept input for the down
projection's wgrad (report §3.3.3) or kept, as the recipe says.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsv3fp8.kernels.backend import quantize
from dsv3fp8.ops.quantizers import LinearQuantizers
from dsv3fp8.ops.stash import Activation, Stash, edge_of, keep
from dsv3fp8.precision import ledger
from dsv3fp8.precision.formats import E4M3
from dsv3fp8.precision.recipe import Recipe
from dsv3fp8.precision.tiles import ROW_128, Operand, QuantizedTensor, values_of
from dsv3fp8.precision.widen import wide


def swiglu_forward(h: Tensor, dtype: torch.dtype, weight: Tensor | None = None) -> Tensor:
    """h [T, 2F] = [gate | up] -> silu(gate) * up (* weight [T], fp32), [T, F] in dtype, one rounding."""
    gate, up = wide(h).chunk(2, -1)
    out = torch.nn.functional.silu(gate) * up
    if weight is not None:
        out = out * weight[:, None]
    return out.to(dtype)


def swiglu_backward(h: Tensor, dout: Tensor, dtype: torch.dtype, weight: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """(dh [T, 2F] in dtype, gradient of weight [T] in fp32) from SwiGLU's input as it was read in forward."""
    gate, up = wide(h).chunk(2, -1)
    grad = wide(dout)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    dweight = None
    if weight is not None:
        dweight = (grad * silu * up).sum(-1)
        grad = grad * weight[:, None]
    dgate = grad * up * (sigmoid * (1.0 + gate * (1.0 - sigmoid)))
    return torch.cat((dgate, grad * silu), -1).to(dtype), dweight


def input_cache(h: Tensor, recipe: Recipe) -> Operand:
    """SwiGLU's input as kept for backward: E4M3 1x128, gate and up tiled each on their own, or h itself."""
    if recipe.swiglu_cache.format == "e4m3":
        return quantize(h, E4M3, ROW_128, recipe.swiglu_cache.scale, col_parts=2)
    return h


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


def read_input(h: Tensor, cache: Operand, recipe: Recipe) -> Tensor:
    """What SwiGLU's forward reads: h through the cache's cast, or h itself."""
    return values_of(cache) if recipe.swiglu_input == "cache" else h


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, cache: Stash, node: ledger.Node | None) -> Tensor:
        ctx.save_for_backward(*cache.tensors)
        ctx.restore, ctx.dtype, ctx.node = cache.restore, h.dtype, node
        return edge_of((h.shape[0], h.shape[1] // 2), h.dtype, h.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None]:
        cache = ctx.restore(ctx.saved_tensors)
        dh, _ = swiglu_backward(values_of(cache), dout, ctx.dtype)
        if ctx.node:
            ctx.node.report("backward", dh, {cache_name(cache): cache, "dact": dout}, {"dh": dh})
        return dh, None, None


def swiglu(h: Tensor, recipe: Recipe, down: LinearQuantizers) -> Activation:
    """h [T, 2F] -> the down projection's input [T, F]. down: the quantizers of the down projection, which mint it."""
    with torch.no_grad():
        cached = input_cache(h, recipe)
        cache = keep(cached, cache_name(cached))
        out = swiglu_forward(read_input(h, cached, recipe), h.dtype)
        operand = down.quantize("input", out, 1)
    prefix = down.gemm.op.removesuffix("down")
    node = ledger.here(f"{prefix}swiglu")
    if node:
        report_forward(node, prefix, h, cached, out, operand, recipe)
    edge = _SwiGLU.apply(h, cache, node)
    if recipe.swiglu_output == "keep":
        return Activation(edge, operand)
    dtype, restore, scale = h.dtype, cache.restore, down.known_scale("input", operand)
    cached_parts = len(cache.tensors)

    def recompute(saved: tuple[Tensor, ...]) -> Operand:
        out = swiglu_forward(values_of(restore(saved[:cached_parts])), dtype)
        known = saved[cached_parts:]
        return down.quantize("input", out, 1, scale=known[0] if known else None)

    return Activation(edge, operand, Stash((*cache.tensors, *scale), recompute, cache.shell, cache.name))
