"""Grouped GEMMs over rows in expert order, on QuantizedTensors: fprop and dgrad (bf16), wgrad (fp32, beta 0 or 1).

Rows of an expert start at multiples of 128 (ops/exchange.py's Plan). Each call is one launch of a persistent kernel whose
shape depends on nothing that is only known on the device: no synchronization, no recompilation per token count. The bits are
those of precision/accumulator.py with promote_every 128, and the same in every run.
torch.compile and CUDA graphs take them as the ops dsv3fp8::gluon_rows, dsv3fp8::gluon_wgrad and dsv3fp8::gluon_wgrad_add.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dsv3fp8.kernels.gemm.gluon import rows, wgrad
from dsv3fp8.precision.formats import E4M3
from dsv3fp8.precision.tiles import BLOCK_128, COLUMN_128, ROW_128, QuantizedTensor, ceil_div

CODES = gl.NVMMASharedLayout(128, 8, rank=2)
BF16_OUT = gl.NVMMASharedLayout(128, 16, rank=2)
FP32_OUT = gl.NVMMASharedLayout(128, 32, rank=2)
SCALES = gl.NVMMASharedLayout(0, 32, rank=1)


def reason_against_rows(a: QuantizedTensor, weights: QuantizedTensor, out_dtype: torch.dtype) -> str | None:
    """Why `grouped_rows` and `matmul_nt` cannot compute this, or None when they can. Looks at formats, tiles and sizes only."""
    k, n = a.shape[-1], weights.shape[-2]
    if (against := _formats(a, weights, ROW_128, BLOCK_128)) is not None:
        return against
    if out_dtype != torch.bfloat16:
        return f"Gluon's fprop and dgrad give bf16, not {str(out_dtype).removeprefix('torch.')}"
    if any(t.col_parts > 1 and k // t.col_parts % 128 for t in (a, weights)):
        return "a tile is cut inside K, which the Gluon GEMM's regular grid cannot express"
    if weights.row_parts > 1 and n // weights.row_parts % 128:
        return "a tile is cut inside the rows, which the Gluon GEMM's regular grid cannot express"
    if k % 16 or n % 8:
        return f"TMA rows start at multiples of 16 bytes: K = {k} codes, N = {n} bf16"
    return None


def reason_against_wgrad(dy: QuantizedTensor, x: QuantizedTensor, experts: int = 2) -> str | None:
    """Why `grouped_wgrad` cannot compute this, or None when it can. Looks at formats, tiles and sizes only."""
    n, k = dy.shape[-1], x.shape[-1]
    if (against := _formats(dy, x, COLUMN_128, COLUMN_128)) is not None:
        return against
    if dy.one_scale_per_group or x.one_scale_per_group:
        return "an expert's one scale multiplies its finished sum, the Gluon wgrad's each block of 128 tokens"
    if dy.row_parts > 1 or x.row_parts > 1:
        return "tokens are tiled in parts, which the Gluon GEMM's regular grid cannot express"
    if k % 16:
        return f"the Gluon wgrad needs K in multiples of 16, not {k}"
    if experts > 1 and n % 64:
        return f"the Gluon wgrad stores 64 rows at a time, which N = {n} would carry into the next expert"
    return None


def _formats(a: QuantizedTensor, b: QuantizedTensor, a_tile: object, b_tile: object) -> str | None:
    if a.format is not E4M3 or b.format is not E4M3:
        return f"the Gluon GEMM takes E4M3 only, not {a.format.name} x {b.format.name}"
    if a.tile != a_tile or b.tile != b_tile:
        return f"no Gluon GEMM for tiles {a.tile} x {b.tile}"
    return None


def grouped_rows(
    a: QuantizedTensor, weights: QuantizedTensor, groups: Tensor, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """fprop and dgrad: a [rows, K] times the weights [E, N, K]^T of each row's expert -> bf16 [rows, N].

    groups: int64 or int32 [rows / 128], the expert of each block of 128 rows; -1 for a block of none, which gets zeros.
    """
    _refuse(reason_against_rows(a, weights, out_dtype))
    if groups.numel() * 128 != a.shape[0]:
        raise ValueError(f"groups has {groups.numel()} blocks of 128 rows, the operand {a.shape[0]} rows")
    codes, scale = weights.codes.contiguous(), weights.scale.contiguous()
    return torch.ops.dsv3fp8.gluon_rows(a.codes.contiguous(), a.scale, codes, scale, groups)


def matmul_nt(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """a [M, K] times b [N, K]^T -> bf16 [M, N], any M."""
    _refuse(reason_against_rows(a, b, out_dtype))
    codes, scale = b.codes.contiguous()[None], b.scale.contiguous()[None]
    return torch.ops.dsv3fp8.gluon_rows(a.codes.contiguous(), a.scale, codes, scale, None)


def grouped_wgrad(dy: QuantizedTensor, x: QuantizedTensor, starts: Tensor, into: Tensor | None = None) -> Tensor:
    """wgrad: per expert dy [rows, N]^T times x [rows, K] over its rows -> fp32 [E, N, K]; zeros for an expert without rows.

    starts: int32 [E + 1], each expert's first block of 128 rows, and the end of the last (`Plan.blocks`).
    into: fp32 [E, N, K], contiguous, that the products are added to (one fp32 addition each; experts without rows are left
    alone) and that is returned.
    The tensor core reads both with the tokens contiguous: codes that are not stored so (codes.mT contiguous) are copied.
    """
    _refuse(reason_against_wgrad(dy, x, starts.numel() - 1))
    operands = (dy.codes.mT.contiguous(), dy.scale.contiguous(), x.codes.mT.contiguous(), x.scale.contiguous(), starts)
    if into is None:
        return torch.ops.dsv3fp8.gluon_wgrad(*operands)
    want = (starts.numel() - 1, dy.shape[1], x.shape[1])
    if into.dtype != torch.float32 or tuple(into.shape) != want or not into.is_contiguous():
        raise ValueError(f"into must be a contiguous fp32 {list(want)}, not {into.dtype} {list(into.shape)}")
    torch.ops.dsv3fp8.gluon_wgrad_add(into, *operands)
    return into


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise ValueError(reason)


@torch.library.custom_op("dsv3fp8::gluon_rows", mutates_args=(), device_types="cuda")
def _rows(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, groups: Tensor | None) -> Tensor:
    """a [M, K], a_scale [M, blocks]; b [E, N, K], b_scale [E, row blocks, blocks]; all but a_scale contiguous."""
    (m, k), (experts, n, _) = a.shape, b.shape
    out = a.new_empty(m, n, dtype=torch.bfloat16)
    if m == 0 or n == 0:
        return out
    if k == 0:
        return out.zero_()
    row_blocks, col_blocks = ceil_div(m, 128), ceil_div(n, rows.TILE_N)
    rows.rows_kernel[(_programs(a.device, row_blocks * col_blocks),)](
        _descriptor(a, (128, 128), CODES),
        _descriptor(b.view(experts * n, k), (rows.TILE_N, 128), CODES),
        _descriptor(out, (64, 64), BF16_OUT),
        a_scale if groups is None else groups,
        a_scale,
        b_scale,
        m,
        row_blocks,
        col_blocks,
        ceil_div(k, 128),
        n,
        ceil_div(n, 128),
        *a_scale.stride(),
        GROUPED=groups is not None,
        **rows.OPTIONS,
    )
    return out


@_rows.register_fake
def _(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, groups: Tensor | None) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.bfloat16)


@torch.library.custom_op("dsv3fp8::gluon_wgrad", mutates_args=(), device_types="cuda")
def _wgrad(dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, starts: Tensor) -> Tensor:
    """dy [N, tokens], dy_scale [blocks, N]; x [K, tokens], x_scale [blocks, K]; all contiguous."""
    out = dy.new_empty(starts.numel() - 1, dy.shape[0], x.shape[0], dtype=torch.float32)
    if dy.shape[1] == 0:
        return out.zero_()
    _launch_wgrad(out, dy, dy_scale, x, x_scale, starts, add=False)
    return out


@_wgrad.register_fake
def _(dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, starts: Tensor) -> Tensor:
    return dy.new_empty(starts.shape[0] - 1, dy.shape[0], x.shape[0], dtype=torch.float32)


@torch.library.custom_op("dsv3fp8::gluon_wgrad_add", mutates_args=("out",), device_types="cuda")
def _wgrad_add(out: Tensor, dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, starts: Tensor) -> None:
    """As gluon_wgrad, added to out [E, N, K]."""
    if dy.shape[1]:
        _launch_wgrad(out, dy, dy_scale, x, x_scale, starts, add=True)


@_wgrad_add.register_fake
def _(out: Tensor, dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, starts: Tensor) -> None:
    return None


def _launch_wgrad(out: Tensor, dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, starts: Tensor, add: bool) -> None:
    experts, n, k = out.shape
    if out.numel() == 0:
        return
    n_blocks, k_tiles = ceil_div(n, 128), ceil_div(k, wgrad.TILE_K)
    wgrad.wgrad_kernel[(_programs(out.device, experts * n_blocks * k_tiles),)](
        _descriptor(dy, (128, 128), CODES),
        _descriptor(x, (wgrad.TILE_K, 128), CODES),
        _descriptor(dy_scale.view(-1), (128,), SCALES),
        _descriptor(x_scale.view(-1), (wgrad.TILE_K,), SCALES),
        _descriptor(out.view(experts * n, k), (64, 32), FP32_OUT),
        out,
        starts,
        experts,
        n_blocks,
        k_tiles,
        n,
        k,
        ADD=add,
        **wgrad.OPTIONS,
    )


def _descriptor(t: Tensor, box: Sequence[int], layout: gl.NVMMASharedLayout) -> TensorDescriptor:
    return TensorDescriptor(t, list(t.shape), list(t.stride()), list(box), layout)


def _programs(device: torch.device, tiles: int) -> int:
    return min(tiles, _multiprocessors(device.index or 0))


@lru_cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count
