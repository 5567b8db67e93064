"""The attention box: causal attention in BF16 with fp32 softmax, its output kept in E5M6 where the recipe says so.

The kept output is what attention's backward reads, and what the out projection's wgrad re-tiles. The out projection's
forward operand is requantized from the decoded cache (operand: cache) or from the output itself (operand: bf16).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsv3fp8.kernels import backend
from dsv3fp8.kernels.attention import choice
from dsv3fp8.kernels.backend import quantize
from dsv3fp8.ops.quantizers import LinearQuantizers
from dsv3fp8.ops.recompute import KeptInputs, keep_inputs
from dsv3fp8.ops.stash import Activation, Stash, edge_of, keep
from dsv3fp8.precision import ledger
from dsv3fp8.precision.formats import E5M6
from dsv3fp8.precision.recipe import Recipe
from dsv3fp8.precision.tiles import ROW_128, Operand, QuantizedTensor, values_of


@dataclass
class AttentionCall:
    """scale: the softmax scale; documents: int [B, S] or None; inputs: what is kept of q, k, v.

    kept: the output as kept, [B * S, H * Dv], set by forward.
    """

    scale: float
    documents: Tensor | None
    cache_format: str
    inputs: KeptInputs
    output: Tensor | None = None
    kept: Stash | None = None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        widths = q.shape[-1], v.shape[-1]
        ctx.backend = choice.choose(q.device, q.dtype, widths, call.documents is not None).backend
        out, lse = choice.forward(ctx.backend, q, k, v, call.scale, call.documents)
        flat = out.flatten(2).flatten(0, 1)
        call.output = flat
        cache: Operand = quantize(flat, E5M6, ROW_128, "pow2") if call.cache_format == "e5m6" else flat
        call.kept = keep(cache, "attn_cache")
        ctx.save_for_backward(lse, *call.kept.tensors, *call.inputs.tensors)
        ctx.scale, ctx.documents, ctx.restore = call.scale, call.documents, call.kept.restore
        ctx.restore_inputs, ctx.n_kept = call.inputs.restore, len(call.kept.tensors)
        ctx.node = ledger.here("attention")
        if ctx.node:
            _report_forward(ctx.node, ctx.backend, (q, k, v), (flat, lse, cache), call)
        return edge_of(flat.shape, out.dtype, out.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        lse, *rest = ctx.saved_tensors
        kept = ctx.restore(tuple(rest[: ctx.n_kept]))
        q, k, v = ctx.restore_inputs(tuple(rest[ctx.n_kept :]))
        # E5M6 times a power of two is exact in BF16: the rounding changes nothing.
        out = backend.decode(kept, v.dtype) if isinstance(kept, QuantizedTensor) else kept
        out, dout = out.view_as(v), dout.reshape(v.shape)
        dq, dk, dv = choice.backward(ctx.backend, dout, q, k, v, out, lse, ctx.scale, ctx.documents)
        if ctx.node:
            ctx.node.ledger.note_kernel("attention", "dgrad", ctx.backend, q, k, v, dout)
            reads = {"q": q, "k": k, "v": v, "lse": lse, "attn_cache": kept, "dattn_out": dout}
            ctx.node.report("backward", dq, reads, {"dq": dq, "dk": dk, "dv": dv})
        return dq, dk, dv, None


def _report_forward(
    node: ledger.Node, taken: str, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, Tensor, Operand], call: AttentionCall,
) -> None:  # fmt: skip
    flat, lse, cache = outputs
    reads: dict[str, Operand | Sequence[Operand] | None] = dict(zip("qkv", inputs, strict=True))
    packed = cache if isinstance(cache, QuantizedTensor) else None
    kept = reads if len(call.inputs.tensors) == 3 else {"inputs": call.inputs.tensors}
    node.ledger.note_kernel("attention", "fprop", taken, *inputs)
    node.report(
        "forward", flat, reads, {"attn_out": flat, "lse": lse, "attn_cache": packed},
        {**kept, "lse": lse, "attn_cache": cache},
        fused=("e5m6",) if packed else (), holds={"documents": call.documents},
    )  # fmt: skip


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    documents: Tensor | None,
    recipe: Recipe,
    out_proj: LinearQuantizers,
    inputs: KeptInputs | None = None,
) -> Activation:
    """q, k [B, S, H, Dqk], v [B, S, H, Dv] -> the out projection's input, [B * S, H * Dv].

    out_proj: the quantizers of the out projection, which mint its operand.
    inputs: how backward gets q, k, v back; by default they are kept.
    """
    call = AttentionCall(scale, documents, recipe.attention_cache, inputs or keep_inputs(q, k, v))
    edge = _Attention.apply(q, k, v, call)
    assert call.output is not None
    assert call.kept is not None
    with torch.no_grad():
        cache = call.kept.restore(call.kept.tensors)
        operand = _requantized(cache if recipe.operand == "cache" else call.output, out_proj, v.dtype)
        if isinstance(operand, QuantizedTensor) and (node := ledger.here("requantize")):
            read = {"attn_cache": cache} if recipe.operand == "cache" else {"attn_out": call.output}
            node.report("forward", operand, read, {"attn_operand": operand})
    return Activation(edge, operand, call.kept)


def _requantized(source: Operand, out_proj: LinearQuantizers, dtype: torch.dtype) -> Operand:
    """The out projection's operand from attention's output or its cache; values of dtype where it is not quantized."""
    if isinstance(source, QuantizedTensor) and (cast := out_proj.rides("input")):
        fmt, kind = cast
        return backend.retile(source, ROW_128, kind, fmt=fmt)
    operand = out_proj.quantize("input", values_of(source), 1)
    return operand if isinstance(operand, QuantizedTensor) else operand.to(dtype)
