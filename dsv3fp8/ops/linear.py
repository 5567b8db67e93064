"""The linear box: fprop, dgrad and wgrad of y = x W^T, each GEMM on operands quantized as the recipe says.

Forward reads x's operand and the weight codes. Backward quantizes dY along N for dgrad and along tokens for wgrad;
wgrad re-tiles what was kept of x. Weight gradients are FP32 and leave finished, so that they are added once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsv3fp8.kernels.backend import matmul_nt
from dsv3fp8.kernels.moe import residual_sum
from dsv3fp8.ops import report
from dsv3fp8.ops.quantizers import LinearQuantizers
from dsv3fp8.ops.slot import GradientSlot
from dsv3fp8.ops.stash import Activation
from dsv3fp8.ops.weights import WeightCodes, compute_dtype
from dsv3fp8.precision import ledger
from dsv3fp8.precision.nodes import names
from dsv3fp8.precision.tiles import Operand, QuantizedTensor
from dsv3fp8.precision.widen import widened


@dataclass(frozen=True)
class LinearCall:
    """The non-tensor arguments of one call.

    out_parts: parts of the output features tiled on their own (gate, up). slot: where dY may come as codes.
    """

    x: Activation
    quantizers: LinearQuantizers
    codes: WeightCodes
    out_parts: int
    slot: GradientSlot | None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, edge: Tensor, weight: Tensor, residual: Tensor | None, call: LinearCall) -> Tensor:
        gemm = call.quantizers.gemm
        out_dtype = compute_dtype(gemm.compute, weight)
        codes = call.codes.fprop(weight)
        product = matmul_nt(call.x.operand, codes, out_dtype if residual is None else widened(out_dtype), gemm, "fprop")
        if residual is not None:
            product = residual_sum(residual, product)
        ctx.save_for_backward(weight, *call.x.stash.tensors)
        # Not the call itself: it holds fprop's operand, which nobody reads again.
        ctx.restore, ctx.quantizers, ctx.codes = call.x.stash.restore, call.quantizers, call.codes
        ctx.out_parts, ctx.slot = call.out_parts, call.slot
        ctx.edge_dtype = edge.dtype
        ctx.has_residual = residual is not None
        ctx.node, name = ledger.here(gemm.op), names(gemm.op)
        if ctx.node:
            reads = {name.input: call.x.operand, f"w_{gemm.op}": codes, "x0": residual}
            ctx.node.report("forward", product, reads, {name.output: product}, call.x.stash.kept(name.input))
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        weight, *stash = ctx.saved_tensors
        quantizers: LinearQuantizers = ctx.quantizers
        gemm = quantizers.gemm
        for_wgrad = ctx.needs_input_grad[1]
        left = ctx.slot.take() if ctx.slot is not None else None
        along_n, along_tokens = left or _cast(dy, quantizers, ctx.out_parts, for_wgrad)
        along_tokens = along_tokens if for_wgrad else None
        node, name = ctx.node, names(gemm.op)
        if node:
            report.gradient_cast(node, None if left else dy, along_n, along_tokens)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            codes = ctx.codes.dgrad(weight)
            dx = matmul_nt(along_n, codes, ctx.edge_dtype, gemm, "dgrad")
            if node:
                node.report("backward", dx, {name.doutput: along_n, f"w_{gemm.op}": codes}, {name.dinput: dx})
        if along_tokens is not None:
            kept = ctx.restore(tuple(stash))
            operand = quantizers.retile("input", kept)
            if node:
                report.retiled(node, name.input, kept, operand)
            dw = matmul_nt(transposed(along_tokens), transposed(operand), weight.dtype, gemm, "wgrad")
            if node:
                node.report("wgrad", dw, {name.doutput: along_tokens, name.input: operand}, {f"dw_{gemm.op}": dw})
        return dx, dw, dy if ctx.has_residual else None, None


def _cast(dy: Tensor, quantizers: LinearQuantizers, out_parts: int, for_wgrad: bool) -> tuple[Operand, Operand | None]:
    """dY along its columns and, where wgrad will read it, along the tokens."""
    if for_wgrad:
        return quantizers.both_orientations("gradient", dy, col_parts=out_parts)
    return quantizers.quantize("gradient", dy, 1, col_parts=out_parts), None


def linear(
    x: Activation,
    weight: Tensor,
    quantizers: LinearQuantizers,
    codes: WeightCodes,
    *,
    residual: Tensor | None = None,
    out_parts: int = 1,
    slot: GradientSlot | None = None,
) -> Tensor:
    """y [T, N] = x [T, K] @ W [N, K]^T (+ residual [T, N], added in fp32 before the one rounding).

    weight: the FP32 master. slot: where the one op that reads y may leave its gradient as codes. The gradient of x comes in
    the dtype of x's edge: FP32 where it is summed with others.
    """
    y: Tensor = _Linear.apply(x.edge, weight, residual, LinearCall(x, quantizers, codes, out_parts, slot))
    return y


def transposed(operand: Operand) -> Operand:
    return operand.transposed() if isinstance(operand, QuantizedTensor) else operand.mT
