"""The cast as Triton kernels do it: device functions that the quantizers and the fused kernels share.

Scales are those of `reference.scale_from_amax` in every bit. The largest magnitude is NaN where a tile holds NaN (max.NaN:
tl.max drops NaN), so that neither NaN nor inf is lost.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from dsv3fp8.precision.formats import E5M6, Format
from dsv3fp8.precision.tiles import BLOCK_128, COLUMN_128, ROW_128, QuantizedTensor, ceil_div, grid_size

_NAN = tl.constexpr(0x7FC00000)
_SMALLEST_SCALE = tl.constexpr(2.0**-126)
PAIRS_FROM = tl.constexpr(1024)  # values of a block, so that each thread of eight warps has two and more
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))  # its fma rounds twice, and it knows no PTX


@triton.jit
def scale_of(amax_bits, LIMIT: tl.constexpr, LIMIT_BITS: tl.constexpr, POW2: tl.constexpr):
    """`reference.scale_from_amax`, from the bits of the largest magnitude, which may be NaN."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    if POW2:
        above = ((amax_bits & 0x7FFFFF) > (LIMIT_BITS & 0x7FFFFF)).to(tl.int32)
        exponent = (amax_bits >> 23) - (LIMIT_BITS >> 23) + above + 127
        s = (tl.maximum(exponent, 1) << 23).to(tl.float32, bitcast=True)
    else:
        s = tl.maximum(_divided(amax, LIMIT), _SMALLEST_SCALE)  # the largest, 2^128 / LIMIT, has a normal reciprocal
    s = tl.where(amax == 0, 1.0, s)
    nan = tl.full(amax_bits.shape, _NAN, tl.int32).to(tl.float32, bitcast=True)
    return tl.where(amax < float("inf"), s, nan)


@triton.jit
def _divided(amax, LIMIT: tl.constexpr):
    """amax / LIMIT, rounded as IEEE says for every quotient above 2^-126: the remainder of a product is exact, and corrects it.

    Held against division for all significands of many exponents, 4.5e8 numbers; a third of a division's instructions.
    """
    if INTERPRETED:
        return tl.div_rn(amax, tl.full(amax.shape, LIMIT, tl.float32))
    inverse = tl.full(amax.shape, 1.0 / LIMIT, tl.float32)
    quotient = amax * inverse
    return tl.fma(tl.fma(quotient, tl.full(amax.shape, -LIMIT, tl.float32), amax), inverse, quotient)


@triton.jit
def reciprocal(x):
    """1 / x as IEEE says, for x in [2^-126, 2^126) or NaN: there rcp.rn is the approximation and one step of Newton's.

    Written out, because rcp.rn comes with a test and a branch for all other numbers. Scales, and 1 + exp, are no others.
    """
    if INTERPRETED:
        return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)
    newton: tl.constexpr = (
        "{ .reg .f32 near, minus, error; rcp.approx.ftz.f32 near, $1; neg.f32 minus, $1; "
        "fma.rn.f32 error, minus, near, 0f3F800000; fma.rn.f32 $0, error, near, near; }"
    )
    return tl.inline_asm_elementwise(newton, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


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
def larger(a, b):
    """The larger number, NaN where one is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_bits(magnitudes, AXIS: tl.constexpr):
    """The bits of the largest of fp32 magnitudes along an axis, NaN where one is NaN."""
    if INTERPRETED:
        return tl.max(magnitudes.to(tl.int32, bitcast=True), AXIS)
    return tl.reduce(magnitudes, AXIS, larger).to(tl.int32, bitcast=True)


@triton.jit
def scaled_along(values, AXIS: tl.constexpr, LIMIT: tl.constexpr, LIMIT_BITS: tl.constexpr, POW2: tl.constexpr):
    """(values / s, s) with one scale s for all values along AXIS. values: fp32, zero where there are none.

    What comes back is stored as FP8 without a clamp: sm_90's conversion saturates, and keeps NaN.
    """
    s = scale_of(largest_bits(tl.abs(values), AXIS), LIMIT, LIMIT_BITS, POW2)
    return values * tl.expand_dims(reciprocal(s), AXIS), s


@triton.jit
def cast_four(a, b, c, d, E5M2: tl.constexpr):
    """Four scaled fp32 numbers as codes in the bytes of one int32, a in the lowest: two conversions, no shifts."""
    if INTERPRETED:
        words = _code(a, E5M2) | _code(b, E5M2) << 8 | _code(c, E5M2) << 16 | _code(d, E5M2) << 24
    else:  # not behind a return: what follows one is compiled all the same
        to: tl.constexpr = "e5m2x2" if E5M2 else "e4m3x2"
        cast: tl.constexpr = (
            "{ .reg .b16 low, high; cvt.rn.satfinite." + to + ".f32 low, $2, $1; cvt.rn.satfinite." + to + ".f32 high, $4, $3; "
            "mov.b32 $0, {low, high}; }"
        )
        words = tl.inline_asm_elementwise(cast, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)
    return words


@triton.jit
def _code(scaled, E5M2: tl.constexpr):
    code = scaled.to(tl.float8e5 if E5M2 else tl.float8e4nv)
    return code.to(tl.uint8, bitcast=True).to(tl.int32)


@cache  # asked for at every launch
def limits(fmt: Format) -> dict[str, float | int]:
    """The constants of a format that the device functions take."""
    return {"LIMIT": fmt.max, "LIMIT_BITS": int(torch.tensor(fmt.max, dtype=torch.float32).view(torch.int32))}


def row_tiles(
    rows: int, cols: int, fmt: Format, kind: str, device: torch.device, col_parts: int = 1, row_parts: int = 1,
    lead: tuple[int, ...] = (),
) -> QuantizedTensor:  # fmt: skip
    """Room for matrices in 1x128 tiles: codes row by row, scales with the rows contiguous, as cuBLASLt reads them."""
    width = ceil_div(cols, 2) * 3 if fmt is E5M6 else cols
    codes = torch.empty(*lead, rows, width, dtype=torch.uint8, device=device).view(fmt.dtype)
    scale = torch.empty(*lead, grid_size(cols, 128, col_parts), rows, dtype=torch.float32, device=device).mT
    return QuantizedTensor(codes, scale, fmt, ROW_128, (*lead, rows, cols), kind, row_parts, col_parts)


def column_tiles(
    rows: int, cols: int, fmt: Format, kind: str, device: torch.device, col_parts: int = 1, row_parts: int = 1,
    lead: tuple[int, ...] = (),
) -> QuantizedTensor:  # fmt: skip
    """Room for matrices in 128x1 tiles: codes with the rows contiguous, as wgrad reads them; scales row by row."""
    codes = torch.empty(*lead, cols, rows, dtype=torch.uint8, device=device).view(fmt.dtype).mT
    scale = torch.empty(*lead, grid_size(rows, 128, row_parts), cols, dtype=torch.float32, device=device)
    return QuantizedTensor(codes, scale, fmt, COLUMN_128, (*lead, rows, cols), kind, row_parts, col_parts)


def block_tiles(
    rows: int, cols: int, fmt: Format, kind: str, device: torch.device, col_parts: int = 1, row_parts: int = 1,
    lead: tuple[int, ...] = (),
) -> QuantizedTensor:  # fmt: skip
    """Room for matrices in 128x128 tiles, codes and scales row by row."""
    codes = torch.empty(*lead, rows, cols, dtype=torch.uint8, device=device).view(fmt.dtype)
    grid = (*lead, grid_size(rows, 128, row_parts), grid_size(cols, 128, col_parts))
    scale = torch.empty(grid, dtype=torch.float32, device=device)
    return QuantizedTensor(codes, scale, fmt, BLOCK_128, (*lead, rows, cols), kind, row_parts, col_parts)
