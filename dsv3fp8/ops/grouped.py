"""The grouped linear box: the experts' GEMMs over rows in expert order, in one launch where the backend has such a kernel.

Empty experts cost nothing and get exact zeros.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dsv3fp8.kernels import backend
from dsv3fp8.kernels.backend import matmul_nt
from dsv3fp8.kernels.exchange.reference import ROWS
from dsv3fp8.ops.accumulate import added, running_sum
from dsv3fp8.ops.exchange import Plan
from dsv3fp8.ops.linear import transposed
from dsv3fp8.precision import ledger
from dsv3fp8.precision.recipe import GemmSpec
from dsv3fp8.precision.tiles import Operand, QuantizedTensor, ceil_div


def grouped_rows(a: Operand, weights: Operand, plan: Plan, out_dtype: torch.dtype, spec: GemmSpec, gemm: str) -> Tensor:
    """fprop and dgrad: a [rows, K] times each expert's weights [E, N, K]^T -> [rows, N]; inert rows are zero."""
    together = backend.grouped_rows(a, weights, plan.groups, plan.blocks, out_dtype, spec, gemm)
    if together is not None:
        if (log := ledger.active()) is not None:
            for expert, (start, count) in enumerate(zip(plan.starts, plan.counts, strict=True)):
                log.look_at_gemm(spec, gemm, (_rows(a, start, count), weights[expert]), together[start : start + count])
        return together
    device = a.codes.device if isinstance(a, QuantizedTensor) else a.device
    parts, end = [], 0
    for expert, (start, count) in enumerate(zip(plan.starts, plan.counts, strict=True)):
        if start > end:
            parts.append(torch.zeros(start - end, weights.shape[-2], dtype=out_dtype, device=device))
        end = start + _computed_rows(count, device)
        if count:
            parts.append(matmul_nt(_rows(a, start, end - start), weights[expert], out_dtype, spec, gemm))
    parts.append(torch.zeros(plan.rows - end, weights.shape[-2], dtype=out_dtype, device=device))
    return torch.cat(parts)


def grouped_wgrad(dy: Operand, x: Operand, plan: Plan, master: Tensor, spec: GemmSpec) -> Tensor | None:
    """wgrad: per expert dy [rows, N]^T @ x [rows, K] -> [E, N, K] in the master's dtype; zeros for empty experts.

    None where it was added to the master's gradient so far.
    """
    total = running_sum(master)
    together = backend.grouped_wgrad(dy, x, plan.blocks, master.dtype, spec, total)
    if together is not None:
        if (log := ledger.active()) is not None:
            for expert, (start, count) in enumerate(zip(plan.starts, plan.counts, strict=True)):
                pair = (transposed(_whole_tiles(dy, start, count)), transposed(_whole_tiles(x, start, count)))
                log.look_at_gemm(spec, "wgrad", pair, together[expert])
        if together is not total:
            return together
        added(master)
        return None
    parts = []
    for start, count in zip(plan.starts, plan.counts, strict=True):
        if count:
            left, right = (_whole_tiles(operand, start, _computed_rows(count, master.device)) for operand in (dy, x))
            parts.append(matmul_nt(transposed(left), transposed(right), master.dtype, spec, "wgrad"))
        else:
            parts.append(torch.zeros(master.shape[1:], dtype=master.dtype, device=master.device))
    return torch.stack(parts)


def _computed_rows(count: int, device: torch.device) -> int:
    """Rows of an expert that are multiplied: a GPU likes whole tiles, and inert rows give zeros; the CPU skips them."""
    return ceil_div(count, ROWS) * ROWS if device.type == "cuda" else count


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
