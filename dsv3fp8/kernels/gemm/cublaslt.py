"""Block-scaled FP8 GEMM of cuBLASLt (torch.nn.functional.scaled_mm) on Hopper, fed from QuantizedTensors.

It computes 1x128 . 128x128 (fprop, dgrad) and 1x128 . 1x128 (wgrad), promoted to fp32 every 128 products. Scales that
are constant along K go in as ones and multiply the fp32 result once; a 128x128 operand on the left is spread to 1x128.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv3fp8.precision.formats import E4M3
from dsv3fp8.precision.tiles import QuantizedTensor, Tile, ceil_div


def reason_against(a: QuantizedTensor, b: QuantizedTensor) -> str | None:
    """Why cuBLASLt cannot compute a @ b^T as asked, or None when it can. Looks at formats and tiles, not at values."""
    if a.format is not E4M3 or b.format is not E4M3:
        return f"cuBLASLt block scaling takes E4M3 only, not {a.format.name} x {b.format.name}"
    for operand in (a, b):
        if operand.tile.cols not in (None, 128):
            return f"no cuBLASLt block scaling for tile {operand.tile}"
        if operand.tile.rows not in (None, 1, 128):
            return f"no cuBLASLt block scaling for tile {operand.tile}"
        if operand.col_parts > 1 and (operand.shape[-1] // operand.col_parts) % 128:
            return "a tile is cut inside K, which cuBLASLt's regular grid cannot express"
        if operand.row_parts > 1 and operand.tile.rows != 1 and (operand.shape[-2] // operand.row_parts) % 128:
            return "a tile is cut inside the rows, which cuBLASLt's regular grid cannot express"
    return None


def matmul_nt(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype) -> Tensor:
    """a [M, K] @ b [N, K]^T -> [M, N] in out_dtype (bf16 or fp32)."""
    (m, k), n = a.shape, b.shape[0]
    if m == 0 or n == 0 or k == 0:
        return torch.zeros(m, n, dtype=out_dtype, device=a.codes.device)
    once = a.constant_along_k and b.constant_along_k
    blocks = ceil_div(k, 128)
    codes_a, codes_b = _padded(a.codes), _padded(b.codes)
    rows_a, rows_b = codes_a.shape[0], codes_b.shape[0]
    if once:
        scale_a = torch.ones(blocks, rows_a, device=a.codes.device).mT
        scale_b, recipe_b = _grid_128(torch.ones(ceil_div(n, 128), blocks, device=a.codes.device)), _BLOCK
    else:
        scale_a = _column_major(_rows_of(a, m, blocks), rows_a)
        if b.tile.rows == 1:
            scale_b, recipe_b = _column_major(_rows_of(b, n, blocks), rows_b), _ROW
        else:
            scale_b, recipe_b = _grid_128(_blocks_of(b, n, blocks)), _BLOCK
    out = F.scaled_mm(
        codes_a,
        codes_b.mT,
        scale_a,
        _ROW,
        scale_b,
        recipe_b,
        output_dtype=torch.float32 if once else out_dtype,
    )
    if (rows_a, rows_b) != (m, n):
        out = out[:m, :n]
    if once:
        out = (out * (a.expanded_scale() * b.expanded_scale().mT)).to(out_dtype)
    return out


_ROW = F.ScalingType.BlockWise1x128
_BLOCK = F.ScalingType.BlockWise128x128


def _padded(codes: Tensor) -> Tensor:
    """Codes with K contiguous, rows and K padded by zeros to multiples of 16: cuBLASLt takes no others.

    Nothing is copied where they lie so already, also as part of a wider matrix.
    """
    raw = codes.view(torch.uint8)
    rows, k = raw.shape
    if rows % 16 or k % 16:
        raw = F.pad(raw, (0, -k % 16, 0, -rows % 16))
    elif raw.stride(1) != 1 or raw.stride(0) < k or raw.stride(0) % 16 or raw.data_ptr() % 16:
        raw = raw.contiguous()
    return raw.view(codes.dtype)


def _column_major(scale: Tensor, rows: int) -> Tensor:
    """A grid [R, blocks] with rows contiguous (strides 1, rows), padded by ones to `rows`."""
    seen = scale.mT
    if rows != scale.shape[0]:
        seen = F.pad(seen, (0, rows - scale.shape[0]), value=1.0)
    return _dense_mT(seen)


def _rows_of(operand: QuantizedTensor, rows: int, blocks: int) -> Tensor:
    """One scale per row and K block of 128: [rows, blocks]."""
    scale = operand.scale
    if operand.tile.rows != 1:
        per_row = QuantizedTensor(
            operand.codes,
            scale,
            operand.format,
            Tile(operand.tile.rows, 1),
            (rows, scale.shape[1]),
            row_parts=operand.row_parts,
        )
        scale = per_row.expanded_scale()
    return scale.expand(rows, blocks)


def _blocks_of(operand: QuantizedTensor, rows: int, blocks: int) -> Tensor:
    """One scale per 128 rows and K block of 128: [ceil(rows / 128), blocks]."""
    return operand.scale.expand(ceil_div(rows, 128), blocks)


def _grid_128(scale: Tensor) -> Tensor:
    """cuBLASLt's layout of a 128x128 grid: K contiguous and padded to 4 -> [roundup(K blocks, 4), row blocks]."""
    if scale.shape[1] % 4:
        scale = F.pad(scale, (0, -scale.shape[1] % 4), value=1.0)
    return _dense_mT(scale)


def _dense_mT(grid: Tensor) -> Tensor:
    """The transposed view of a dense copy, with the strides that cuBLASLt asks for also where a side is 1."""
    rows, cols = grid.shape
    # contiguous() leaves whatever stride a side of length 1 happens to have.
    return grid.contiguous().as_strided((cols, rows), (1, cols))
