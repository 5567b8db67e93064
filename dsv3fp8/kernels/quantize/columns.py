"""128x1 tiles for wgrad in Triton: the reference's codes and scales, bit for bit, stored with the tokens contiguous.

wgrad's tensor cores read both operands with the tokens contiguous; codes that are stored as the matrix is would have to be
copied first. Reads 2 bytes an element (BF16), writes 1.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dsv3fp8.kernels.quantize.device import column_tiles, limits, scaled_along
from dsv3fp8.precision.formats import Format
from dsv3fp8.precision.tiles import QuantizedTensor, ceil_div

_COLS = 64


def quantize_columns(x: Tensor, fmt: Format, kind: str) -> QuantizedTensor:
    """`reference.quantize` of bf16 or fp32 [R, C] with tile 128x1 to E4M3 or E5M2; codes.mT is contiguous."""
    rows, cols = x.shape
    cast = column_tiles(rows, cols, fmt, kind, x.device)
    if x.numel():
        _columns_kernel[(ceil_div(rows, 128) * ceil_div(cols, _COLS),)](
            x, cast.codes, cast.scale, rows, cols, *x.stride(), POW2=kind == "pow2", COLS=_COLS, **limits(fmt),
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return cast


# Compiled for numbers of rows that are multiples of 16, whose codes are stored 16 bytes at a time, and for all others.
@triton.jit
def _columns_kernel(
    x, codes, scale, rows, cols, stride_r, stride_c,
    LIMIT: tl.constexpr, LIMIT_BITS: tl.constexpr, POW2: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    col_blocks = tl.cdiv(cols, COLS)
    tile = (tl.program_id(0) // col_blocks).to(tl.int64)
    r_in = tl.program_id(0) // col_blocks * 128 + tl.arange(0, 128)
    c_in = tl.program_id(0) % col_blocks * COLS + tl.arange(0, COLS)
    inside = (r_in < rows)[:, None] & (c_in < cols)[None, :]
    r, c = r_in.to(tl.int64), c_in.to(tl.int64)
    values = tl.load(x + (r[:, None] * stride_r + c[None, :] * stride_c), mask=inside, other=0.0).to(tl.float32)
    scaled, s = scaled_along(values, 0, LIMIT, LIMIT_BITS, POW2)
    tl.store(codes + (r[:, None] + c[None, :] * rows), scaled.to(codes.dtype.element_ty), mask=inside)
    tl.store(scale + (tile * cols + c), s, mask=c_in < cols)
