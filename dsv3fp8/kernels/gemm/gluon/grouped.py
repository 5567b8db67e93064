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
from dsv3fp8.kernels.gemm.triton import reason_against_format
from dsv3fp8.precision.tiles import BLOCK_128, COLUMN_128, ROW_128, QuantizedTensor, ceil_div, expand_grid

CODES = gl.NVMMASharedLayout(128, 8, rank=2)
BF16_OUT = gl.NVMMASharedLayout(128, 16, rank=2)
FP32_OUT = gl.NVMMASharedLayout(128, 32, rank=2)
SCALES = gl.NVMMASharedLayout(0, 32, rank=1)


def reason_against_rows(a: QuantizedTensor, weights: QuantizedTensor, out_dtype: torch.dtype) -> str | None:
    """Why `grouped_rows` and `matmul_nt` cannot compute this, or None when they can. Looks at formats, tiles and sizes only."""
    k, n = a.shape[-1], weights.shape[-2]
    other_tiles = f"no Gluon GEMM for tiles {a.tile} x {weights.tile}"
    if (against := reason_against_format(a) or reason_against_format(weights)) is not None:
        return against
    if out_dtype != torch.bfloat16:
        return f"Gluon's fprop and dgrad give bf16, not {str(out_dtype).removeprefix('torch.')}"
    if a.row_parts > 1 and a.tile.rows != 1:
        return "rows are tiled in parts, which the Gluon GEMM's regular grid cannot express"
    if a.constant_along_k and weights.constant_along_k:
        if weights.tile.rows == 128 or (weights.tile.rows is None and weights.row_parts > 1):
            return other_tiles
    elif a.tile not in (ROW_128, BLOCK_128) or weights.tile != BLOCK_128:
        return other_tiles
    elif any(t.col_parts > 1 and k // t.col_parts % 128 for t in (a, weights)):
        return "a tile is cut inside K, which the Gluon GEMM's regular grid cannot express"
    elif weights.row_parts > 1 and n // weights.row_parts % 128:
        return "a tile is cut inside the rows, which the Gluon GEMM's regular grid cannot express"
    if k % 16 or n % 8:
        return f"TMA rows start at multiples of 16 bytes: K = {k} codes, N = {n} bf16"
    return None


def reason_against_wgrad(dy: QuantizedTensor, x: QuantizedTensor, experts: int = 2) -> str | None:
    """Why `grouped_wgrad` cannot compute this, or None when it can. Looks at formats, tiles and sizes only."""
    n, k = dy.shape[-1], x.shape[-1]
    other_tiles = f"no Gluon GEMM for tiles {dy.tile} x {x.tile}"
    if (against := reason_against_format(dy) or reason_against_format(x)) is not None:
        return against
    if dy.row_parts > 1 or x.row_parts > 1:
        return "tokens are tiled in parts, which the Gluon GEMM's regular grid cannot express"
    if _along_tokens_once(dy) and _along_tokens_once(x):
        if any(t.tile.cols == 128 or (t.tile.cols is None and t.col_parts > 1) for t in (dy, x)):
            return other_tiles
    elif _along_tokens_once(dy) or _along_tokens_once(x):
        return "an expert's one scale multiplies its finished sum, those of single blocks each block of 128 tokens"
    elif dy.tile not in (COLUMN_128, BLOCK_128) or x.tile != COLUMN_128:
        return other_tiles
    elif dy.tile == BLOCK_128 and dy.col_parts > 1 and n // dy.col_parts % 128:
        return "a tile is cut inside the columns, which the Gluon GEMM's regular grid cannot express"
    if k % 16:
        return f"the Gluon wgrad needs K in multiples of 16, not {k}"
    if experts > 1 and n % 64:
        return f"the Gluon wgrad stores 64 rows at a time, which N = {n} would carry into the next expert"
    return None


def _along_tokens_once(operand: QuantizedTensor) -> bool:
    """Whether an expert's tokens share their scales."""
    return operand.tile.rows is None or operand.one_scale_per_group


def grouped_rows(
    a: QuantizedTensor, weights: QuantizedTensor, groups: Tensor, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """fprop and dgrad: a [rows, K] times the weights [E, N, K]^T of each row's expert -> bf16 [rows, N].

    groups: int64 or int32 [rows / 128], the expert of each block of 128 rows; -1 for a block of none, which gets zeros.
    """
    _refuse(reason_against_rows(a, weights, out_dtype))
    if groups.numel() * 128 != a.shape[0]:
        raise ValueError(f"groups has {groups.numel()} blocks of 128 rows, the operand {a.shape[0]} rows")
    return _product(a, weights, weights.codes.contiguous(), weights.scale.contiguous(), groups)


def matmul_nt(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """a [M, K] times b [N, K]^T -> bf16 [M, N], any M."""
    _refuse(reason_against_rows(a, b, out_dtype))
    return _product(a, b, b.codes.contiguous()[None], b.scale.contiguous()[None], None)


def _product(a: QuantizedTensor, b: QuantizedTensor, codes: Tensor, scale: Tensor, groups: Tensor | None) -> Tensor:
    once = a.constant_along_k and b.constant_along_k
    return torch.ops.dsv3fp8.gluon_rows(a.codes.contiguous(), a.scale, codes, scale, groups, a.tile.rows or 0, once)


def grouped_wgrad(dy: QuantizedTensor, x: QuantizedTensor, starts: Tensor, into: Tensor | None = None) -> Tensor:
    """wgrad: per expert dy [rows, N]^T times x [rows, K] over its rows -> fp32 [E, N, K]; zeros for an expert without rows.

    starts: int32 [E + 1], each expert's first block of 128 rows, and the end of the last (`Plan.blocks`).
    into: fp32 [E, N, K], contiguous, that the products are added to (one fp32 addition each; experts without rows are left
    alone) and that is returned.
    The tensor core reads both with the tokens contiguous: codes that are not stored so (codes.mT contiguous) are copied.
    """
    _refuse(reason_against_wgrad(dy, x, starts.numel() - 1))
    once = _along_tokens_once(dy)
    dy_scale = dy.scale if once else _of_single_columns(dy)
    codes, scales = (dy.codes.mT.contiguous(), x.codes.mT.contiguous()), (dy_scale.contiguous(), x.scale.contiguous())
    operands = (codes[0], scales[0], codes[1], scales[1], starts, once)
    if into is None:
        return torch.ops.dsv3fp8.gluon_wgrad(*operands)
    want = (starts.numel() - 1, dy.shape[1], x.shape[1])
    if into.dtype != torch.float32 or tuple(into.shape) != want or not into.is_contiguous():
        raise ValueError(f"into must be a contiguous fp32 {list(want)}, not {into.dtype} {list(into.shape)}")
    torch.ops.dsv3fp8.gluon_wgrad_add(into, *operands)
    return into


def _of_single_columns(operand: QuantizedTensor) -> Tensor:
    """Scales with one column for each column of the matrix, as TMA reads them beside the codes."""
    return expand_grid(operand.scale, -1, operand.shape[-1], operand.tile.cols, operand.col_parts)


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise ValueError(reason)


@torch.library.custom_op("dsv3fp8::gluon_rows", mutates_args=(), device_types="cuda")
def _rows(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, groups: Tensor | None, a_tile: int, once: bool) -> Tensor:
    """a [M, K], a_scale [scales of rows, blocks]; b [E, N, K], b_scale [E, row blocks, blocks]; all but a_scale contiguous.

    a_tile: rows that share a scale, 0 for all. once: one block along K, and b_scale's rows are N or one.
    """
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
        a_scale.shape[0] if a_tile else m,
        row_blocks,
        col_blocks,
        ceil_div(k, 128),
        n,
        b_scale.shape[1],
        a_scale.stride(0) if a_tile else 0,
        a_scale.stride(1),
        GROUPED=groups is not None,
        A_TILE=max(a_tile, 1),
        ONCE=once,
        **rows.OPTIONS,
    )
    return out


@_rows.register_fake
def _(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, groups: Tensor | None, a_tile: int, once: bool) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.bfloat16)


@torch.library.custom_op("dsv3fp8::gluon_wgrad", mutates_args=(), device_types="cuda")
def _wgrad(dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, starts: Tensor, once: bool) -> Tensor:
    """dy [N, tokens], dy_scale [blocks, N]; x [K, tokens], x_scale [blocks, K]; all contiguous.

    once: an expert's first row of scales serves all of its tokens; it may have one column, and may be the only row.
    """
    out = dy.new_empty(starts.numel() - 1, dy.shape[0], x.shape[0], dtype=torch.float32)
    if dy.shape[1] == 0:
        return out.zero_()
    _launch_wgrad(out, dy, dy_scale, x, x_scale, starts, once, add=False)
    return out


@_wgrad.register_fake
def _(dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, starts: Tensor, once: bool) -> Tensor:
    return dy.new_empty(starts.shape[0] - 1, dy.shape[0], x.shape[0], dtype=torch.float32)


@torch.library.custom_op("dsv3fp8::gluon_wgrad_add", mutates_args=("out",), device_types="cuda")
def _wgrad_add(out: Tensor, dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, starts: Tensor, once: bool) -> None:
    """As gluon_wgrad, added to out [E, N, K]."""
    if dy.shape[1]:
        _launch_wgrad(out, dy, dy_scale, x, x_scale, starts, once, add=True)


@_wgrad_add.register_fake
def _(out: Tensor, dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, starts: Tensor, once: bool) -> None:
    return None


def _launch_wgrad(
    out: Tensor, dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, starts: Tensor, once: bool, add: bool
) -> None:
    experts, n, k = out.shape
    if out.numel() == 0:
        return
    n_blocks, k_tiles = ceil_div(n, 128), ceil_div(k, wgrad.TILE_K)
    wgrad.wgrad_kernel[(_programs(out.device, experts * n_blocks * k_tiles),)](
        _descriptor(dy, (128, 128), CODES),
        _descriptor(x, (wgrad.TILE_K, 128), CODES),
        dy_scale if once else _descriptor(dy_scale.view(-1), (128,), SCALES),
        x_scale if once else _descriptor(x_scale.view(-1), (wgrad.TILE_K,), SCALES),
        _descriptor(out.view(experts * n, k), (64, 32), FP32_OUT),
        out,
        starts,
        experts,
        n_blocks,
        k_tiles,
        n,
        k,
        *_row_of_scales(dy_scale),
        *_row_of_scales(x_scale),
        ADD=add,
        ONCE=once,
        **wgrad.OPTIONS,
    )


def _row_of_scales(scale: Tensor) -> tuple[int, int]:
    """(scales of a block of tokens; how far it is to the next block's, 0 where one serves all)."""
    return scale.shape[1], scale.stride(0) if scale.shape[0] > 1 else 0


def _descriptor(t: Tensor, box: Sequence[int], layout: gl.NVMMASharedLayout) -> TensorDescriptor:
    return TensorDescriptor(t, list(t.shape), list(t.stride()), list(box), layout)


def _programs(device: torch.device, tiles: int) -> int:
    return min(tiles, _multiprocessors(device.index or 0))


@lru_cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count
