"""The precision contract in slow numpy, tile by tile: what the tests hold the framework's kernels and ops against.

Written from the contract, shares no code with the package.
"""

from dataclasses import dataclass
from fractions import Fraction

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float32]
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e5m6": 65024.0}
FLOAT8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
TINY, HUGE = np.float32(2.0**-126), np.float32(2.0**126)


def scale_of(amax: np.float32, fmt: str, kind: str) -> np.float32:
    """The dequantization factor of a tile with this largest magnitude."""
    if not np.isfinite(amax):
        return np.float32(np.nan)
    if amax == 0:
        return np.float32(1)
    if kind == "fp32":
        scale = amax / np.float32(LARGEST[fmt])
    else:
        ratio, power = Fraction(float(amax)) / Fraction(LARGEST[fmt]), Fraction(1)
        while power < ratio:
            power *= 2
        while power / 2 >= ratio:
            power /= 2
        scale = np.float32(min(max(float(power), float(TINY)), float(HUGE)))
    return min(max(scale, TINY), HUGE)


def cast(values: Floats, fmt: str) -> Floats:
    """Clamp, then round to nearest even, and back to float32."""
    clamped = np.clip(values, np.float32(-LARGEST[fmt]), np.float32(LARGEST[fmt]))
    if fmt in FLOAT8:
        with np.errstate(invalid="ignore"):
            return clamped.astype(FLOAT8[fmt]).astype(np.float32)
    wide = clamped.astype(np.float64)
    _, exponent = np.frexp(wide)
    step = np.ldexp(1.0, np.maximum(exponent - 1, -14) - 6)
    return (np.rint(wide / step) * step).astype(np.float32)


@dataclass
class Quantized:
    """codes as float32 values before scaling, the scale of every element, and the decoded float32 values."""

    codes: Floats
    scale: Floats
    values: Floats


def _spans(length: int, tile: int | None, parts: int) -> list[slice]:
    if tile is None:
        return [slice(0, length)]
    part = length // parts
    return [slice(p * part + start, p * part + min(start + tile, part)) for p in range(parts) for start in range(0, part, tile)]


def quantize(
    x: Floats | Tensor, fmt: str, tile: tuple[int | None, int | None], kind: str, row_parts: int = 1, col_parts: int = 1
) -> Quantized:
    """amax -> s -> r = 1/s -> cast(x * r), in float32, one tile at a time."""
    x = array(x)
    codes, scales = np.zeros_like(x), np.ones_like(x)
    for rows in _spans(x.shape[0], tile[0], row_parts):
        for cols in _spans(x.shape[1], tile[1], col_parts):
            part = x[rows, cols]
            if part.size == 0:
                continue
            scale = scale_of(np.max(np.abs(part)), fmt, kind)
            reciprocal = np.float32(1) / scale
            with np.errstate(invalid="ignore"):
                codes[rows, cols] = cast(part * reciprocal, fmt)
            scales[rows, cols] = scale
    with np.errstate(invalid="ignore"):
        return Quantized(codes, scales, codes * scales)


def array(x: Floats | Tensor) -> Floats:
    return x.detach().float().numpy() if isinstance(x, Tensor) else x.astype(np.float32)


def bf16(x: NDArray[np.floating] | Tensor) -> Floats:
    """Rounded to BF16, as float32."""
    if isinstance(x, Tensor):
        return x.detach().bfloat16().float().numpy()
    return torch.from_numpy(np.asarray(x, dtype=np.float32)).bfloat16().float().numpy()


def matmul(a: Floats, b: Floats) -> NDArray[np.float64]:
    """a @ b in float64: the exact sum for the tests' purposes."""
    return a.astype(np.float64) @ b.astype(np.float64)
