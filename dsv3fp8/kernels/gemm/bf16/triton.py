"""The experts' GEMMs in BF16, one launch for all of them and nothing read back: torch's product of groups, and a wgrad to FP32.

torch's leaves rows beyond the last group as they are and rounds to BF16 whatever it makes; so those rows are cleared here,
and the weight gradient, which is summed in FP32, is a kernel of its own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from dsv3fp8.precision.tiles import ceil_div

_TILE = (128, 256)  # of a weight's gradient: 128 sums in each thread of eight warps, too many to add to the old ones there
_ROWS = 64  # tokens that are multiplied at once


def reason_against(a: Tensor, b: Tensor, out_dtype: torch.dtype, gemm: str) -> str | None:
    """Why these kernels cannot take the GEMM, or None when they can."""
    if a.dtype != torch.bfloat16 or b.dtype != torch.bfloat16:
        return "in one launch it takes bf16"
    if out_dtype != (torch.float32 if gemm == "wgrad" else torch.bfloat16):
        return f"in one launch it gives bf16, and wgrad fp32, not {str(out_dtype).removeprefix('torch.')}"
    widths = (a.shape[-1], b.shape[-1] if gemm == "wgrad" else b.shape[-2])
    if any(width % 16 for width in widths):
        return f"in one launch widths are multiples of 16, not {' and '.join(map(str, widths))}"
    return None


def grouped_rows(a: Tensor, weights: Tensor, blocks: Tensor) -> Tensor:
    """fprop and dgrad: a [rows, K] times the weights [E, N, K]^T of each row's expert -> [rows, N]; zeros beyond the last.

    blocks: int32 [E + 1], each expert's first block of 128 rows, and the end of the last.
    """
    if not a.shape[0]:
        return a.new_empty(0, weights.shape[1])
    out = F.grouped_mm(a.contiguous(), weights.mT, offs=blocks[1:] * 128)
    _clear_kernel[(a.shape[0] // 128,)](out, blocks, weights.shape[0], out.shape[1] * 128, BLOCK=4096, num_warps=4)
    return out


def grouped_wgrad(dy: Tensor, x: Tensor, blocks: Tensor) -> Tensor:
    """Per expert dy [rows, N]^T times x [rows, K] -> fp32 [E, N, K]; zeros for an expert without rows."""
    experts, n, k = blocks.numel() - 1, dy.shape[1], x.shape[1]
    out = torch.empty(experts, n, k, dtype=torch.float32, device=dy.device)
    if out.numel():
        n_tiles, k_tiles = ceil_div(n, _TILE[0]), ceil_div(k, _TILE[1])
        _wgrad_kernel[(experts * n_tiles * k_tiles,)](
            dy.contiguous(), x.contiguous(), out, blocks, n, k, n_tiles, k_tiles,
            TILE_N=_TILE[0], TILE_K=_TILE[1], ROWS=_ROWS, num_warps=8, num_stages=3,
        )  # fmt: skip
    return out


@triton.jit
def _clear_kernel(out, blocks, experts, size, BLOCK: tl.constexpr):
    """Zeros in the rows of a block that is no expert's. size: values of 128 rows."""
    block = tl.program_id(0)
    if block >= tl.load(blocks + experts):
        at = out + block.to(tl.int64) * size
        for start in range(0, size, BLOCK):
            i = start + tl.arange(0, BLOCK)
            tl.store(at + i, tl.zeros([BLOCK], out.dtype.element_ty), mask=i < size)


@triton.jit
def _wgrad_kernel(
    dy, x, out, blocks, n, k, n_tiles, k_tiles, TILE_N: tl.constexpr, TILE_K: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    tile = tl.program_id(0) % (n_tiles * k_tiles)
    expert = tl.program_id(0) // (n_tiles * k_tiles)
    rn = tile // k_tiles * TILE_N + tl.arange(0, TILE_N)
    rk = tile % k_tiles * TILE_K + tl.arange(0, TILE_K)
    begin, end = tl.load(blocks + expert) * 128, tl.load(blocks + expert + 1) * 128
    r = begin.to(tl.int64) + tl.arange(0, ROWS)
    dy_at, x_at = dy + (r[:, None] * n + rn[None, :]), x + (r[:, None] * k + rk[None, :])
    acc = tl.zeros([TILE_N, TILE_K], tl.float32)
    for _ in range(begin, end, ROWS):
        left = tl.load(dy_at, mask=(rn < n)[None, :], other=0.0)
        right = tl.load(x_at, mask=(rk < k)[None, :], other=0.0)
        acc = tl.dot(left.T, right, acc)
        dy_at += ROWS * n
        x_at += ROWS * k
    at = out + (expert.to(tl.int64) * n * k + rn.to(tl.int64)[:, None] * k + rk[None, :])
    inside = (rn < n)[:, None] & (rk < k)[None, :]
    tl.store(at, acc, mask=inside)
