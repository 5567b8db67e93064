"""The grouped linear box: one GEMM per expert over rows in expert order. Empty experts cost nothing and get exact zeros."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dsv3fp8.kernels.backend import matmul_nt
from dsv3fp8.ops.exchange import ROWS, Plan
from dsv3fp8.ops.linear import transposed
from dsv3fp8.precision.recipe import GemmSpec
from dsv3fp8.precision.tiles import Operand, QuantizedTensor, ceil_div


def grouped_rows(a: Operand, weights: Operand, plan: Plan, out_dtype: torch.dtype, spec: GemmSpec, gemm: str) -> Tensor:
    """fprop and dgrad: a [rows, K] times each expert's weights [E, N, K]^T -> [rows, N]; inert rows are zero."""
    n = weights.shape[-2]
    device = a.codes.device if isinstance(a, QuantizedTensor) else a.device
    out = torch.zeros(plan.rows, n, dtype=out_dtype, device=device)
    for expert, (start, count) in enumerate(zip(plan.starts, plan.counts, strict=True)):
        # A GPU likes whole tiles, and inert rows give zeros; the CPU skips them.
        rows = ceil_div(count, ROWS) * ROWS if device.type == "cuda" else count
        if rows:
            out[start : start + rows] = matmul_nt(_rows(a, start, rows), weights[expert], out_dtype, spec, gemm)
    return out


def grouped_wgrad(dy: Operand, x: Operand, plan: Plan, like: Tensor, spec: GemmSpec) -> Tensor:
    """wgrad: per expert dy [rows, N]^T @ x [rows, K] -> [E, N, K] in the master's dtype; zeros for empty experts."""
    dw = torch.zeros_like(like)
    for expert, (start, count) in enumerate(zip(plan.starts, plan.counts, strict=True)):
        rows = ceil_div(count, ROWS) * ROWS if dw.device.type == "cuda" else count
        if rows:
            left, right = (_whole_tiles(operand, start, rows) for operand in (dy, x))
            dw[expert] = matmul_nt(transposed(left), transposed(right), dw.dtype, spec, "wgrad")
    return dw


def _rows(operand: Operand, start: int, count: int) -> Operand:
    if isinstance(operand, QuantizedTensor):
        return operand.rows(start, start + count)
    return operand[start : start + count]


def _whole_tiles(operand: Operand, start: int, count: int) -> Operand:
    rows = _rows(operand, start, count)
    if isinstance(rows, QuantizedTensor) and rows.tile.rows == 128 and _one_scale(operand):
        # All blocks of an expert carry the expert's one scale: constant along wgrad's K.
        return replace(rows, scale=rows.scale[:1], tile=replace(rows.tile, rows=None))
    return rows


def _one_scale(operand: Operand) -> bool:
    return isinstance(operand, QuantizedTensor) and operand.one_scale_per_group
