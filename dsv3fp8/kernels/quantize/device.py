"""The cast as Triton kernels do it: device functions that the quantizers and the fused kernels share.

Scales are those of `reference.scale_from_amax` in every bit. Magnitudes are compared as integers: the bits of |x| order as |x|
does, with inf above every number and NaN above inf, so that neither is dropped (tl.max drops NaN).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv3fp8.precision.formats import Format
from dsv3fp8.precision.tiles import COLUMN_128, ROW_128, QuantizedTensor, ceil_div, grid_size

_INFINITY = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC00000)
_SMALLEST_SCALE = tl.constexpr(2.0**-126)
PAIRS_FROM = tl.constexpr(1024)  # values of a block, so that each thread of eight warps has two and more
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))  # its fma rounds twice, and it knows no PTX


@triton.jit
def scale_of(amax_bits, LIMIT: tl.constexpr, LIMIT_BITS: tl.constexpr, POW2: tl.constexpr):
    """`reference.scale_from_amax`, from the bits of the largest magnitude."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    if POW2:
        above = ((amax_bits & 0x7FFFFF) > (LIMIT_BITS & 0x7FFFFF)).to(tl.int32)
        exponent = (amax_bits >> 23) - (LIMIT_BITS >> 23) + above + 127
        s = (tl.maximum(exponent, 1) << 23).to(tl.float32, bitcast=True)
    else:
        s = tl.maximum(_divided(amax, LIMIT), _SMALLEST_SCALE)  # the largest, 2^128 / LIMIT, has a normal reciprocal
    s = tl.where(amax_bits == 0, 1.0, s)
    nan = tl.full(amax_bits.shape, _NAN, tl.int32).to(tl.float32, bitcast=True)
    return tl.where(amax_bits >= _INFINITY, nan, s)


@triton.jit
def _divided(amax, LIMIT: tl.constexpr):
    """amax / LIMIT, rounded as IEEE says for every quotient above 2^-126: the remainder of a product is exact, and corrects it.

    Held against division for all significands of many exponents, 4.5e8 numbers; a third of a division's instructions.
    """
    limit = tl.full(amax.shape, LIMIT, tl.float32)
    if INTERPRETED:
        return tl.div_rn(amax, limit)
    inverse = tl.full(amax.shape, 1.0 / LIMIT, tl.float32)
    quotient = amax * inverse
    return tl.fma(tl.fma(-quotient, limit, amax), inverse, quotient)


@triton.jit
def reciprocal(x):
    """1 / x as IEEE says, for x in [2^-126, 2^126) or NaN: there rcp.rn is the approximation and one step of Newton's.

    Written out, because rcp.rn comes with a test and a branch for all other numbers. Scales, and 1 + exp, are no others.
    """
    if INTERPRETED:
        return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)
    near = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return tl.fma(tl.fma(-x, near, 1.0), near, near)


@triton.jit
def rounded_to_bf16(values):
    """fp32 rounded to BF16's significand, two at a time: a conversion of one takes as long as four of two.

    A block so small that a thread may have one value alone is converted one by one.
    """
    if INTERPRETED or values.numel < PAIRS_FROM:
        rounded = values.to(tl.bfloat16).to(tl.float32)
    else:  # not behind a return: what follows one is compiled all the same
        bits = tl.inline_asm_elementwise(
            "{ .reg .b32 pair; cvt.rn.bf16x2.f32 pair, $3, $2; shl.b32 $0, pair, 16; and.b32 $1, pair, 0xffff0000; }",
            "=r,=r,f,f", [values], dtype=tl.int32, is_pure=True, pack=2,
        )  # fmt: skip
        rounded = bits.to(tl.float32, bitcast=True)
    return rounded


@triton.jit
def magnitude_bits(values):
    """The bits of fp32 magnitudes."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scaled_along(values, AXIS: tl.constexpr, LIMIT: tl.constexpr, LIMIT_BITS: tl.constexpr, POW2: tl.constexpr):
    """(values / s, s) with one scale s for all values along AXIS. values: fp32, zero where there are none.

    What comes back is stored as FP8 without a clamp: sm_90's conversion saturates, and keeps NaN.
    """
    s = scale_of(tl.max(magnitude_bits(values), AXIS), LIMIT, LIMIT_BITS, POW2)
    return values * tl.expand_dims(reciprocal(s), AXIS), s


def limits(fmt: Format) -> dict[str, float | int]:
    """The constants of a format that the device functions take."""
    return {"LIMIT": fmt.max, "LIMIT_BITS": int(torch.tensor(fmt.max, dtype=torch.float32).view(torch.int32))}


def row_tiles(rows: int, cols: int, fmt: Format, kind: str, device: torch.device, col_parts: int = 1) -> QuantizedTensor:
    """Room for a matrix in 1x128 tiles: codes row by row, scales with the rows contiguous, as cuBLASLt reads them."""
    codes = torch.empty(rows, cols, dtype=torch.uint8, device=device).view(fmt.dtype)
    scale = torch.empty(grid_size(cols, 128, col_parts), rows, dtype=torch.float32, device=device).mT
    return QuantizedTensor(codes, scale, fmt, ROW_128, (rows, cols), kind, col_parts=col_parts)


def column_tiles(rows: int, cols: int, fmt: Format, kind: str, device: torch.device, col_parts: int = 1) -> QuantizedTensor:
    """Room for a matrix in 128x1 tiles: codes with the rows contiguous, as wgrad reads them; scales row by row."""
    codes = torch.empty(cols, rows, dtype=torch.uint8, device=device).view(fmt.dtype).mT
    scale = torch.empty(ceil_div(rows, 128), cols, dtype=torch.float32, device=device)
    return QuantizedTensor(codes, scale, fmt, COLUMN_128, (rows, cols), kind, col_parts=col_parts)
