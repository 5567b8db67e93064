"""Number formats of the recipe and the one cast into them.

The cast is the same on every backend: clamp to the format's largest finite value, then round to nearest even
(including subnormals). The clamp is explicit because the libraries disagree about 465 and above: some torch versions
and ml_dtypes give NaN, others saturate. NaN stays NaN. Scales live in `tiles`; this file knows single numbers only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """A storage format. `max`: the largest finite value; `bits`: of a stored value; `mantissa`: those of its fraction."""

    name: str
    max: float
    bits: int
    dtype: torch.dtype
    mantissa: int

    @property
    def saturates_above(self) -> float:
        """Half a step beyond `max`. What is larger has no code near it: `max` stands in for it."""
        return self.max + 2.0 ** (math.floor(math.log2(self.max)) - self.mantissa - 1)


E4M3 = Format("e4m3", 448.0, 8, torch.float8_e4m3fn, 3)
E5M2 = Format("e5m2", 57344.0, 8, torch.float8_e5m2, 2)
E5M6 = Format("e5m6", 65024.0, 12, torch.uint8, 6)  # two codes packed in three bytes
FORMATS = {f.name: f for f in (E4M3, E5M2, E5M6)}

E5M6_NAN = 0x7E0  # exponent all ones, quiet bit set
_MIN_NORMAL_E5M6 = 2.0**-14
_SUBNORMALS_PER_UNIT = 2.0**20  # the E5M6 subnormal step is 2^-20


def encode(values: Tensor, fmt: Format) -> Tensor:
    """Casts scaled fp32 values to codes.

    Args:
        values: float32, any shape; for E5M6 the last dimension is even (two codes share three bytes).
    Returns:
        float8 codes of the same shape, or for E5M6 uint8 with the last dimension times 3/2.
    """
    clamped = values.clamp(-fmt.max, fmt.max)
    if fmt is E5M6:
        return pack12(encode_e5m6(clamped))
    return clamped.to(fmt.dtype)


def decode(codes: Tensor, fmt: Format) -> Tensor:
    """Inverse of `encode`: float32 values, exact."""
    if fmt is E5M6:
        return decode_e5m6(unpack12(codes))
    if codes.device.type == "cpu":
        return _decode_on_cpu(codes, fmt)
    return codes.to(torch.float32)


def _decode_on_cpu(codes: Tensor, fmt: Format) -> Tensor:
    # torch converts float8 one value at a time on the CPU; half precision holds every code, up to a factor 2^8, and its
    # conversion is vectorized: five times faster, same values.
    raw = codes.view(torch.uint8)
    if fmt is E4M3 and raw.numel() and int((raw & 0x7F).amax()) == 0x7F:  # NaN has no counterpart in that trick
        return codes.to(torch.float32)
    shifted = raw.to(torch.int16).bitwise_left_shift_(8)
    if fmt is E5M2:  # half precision's upper byte
        return shifted.view(torch.float16).to(torch.float32)
    # The sign stays on top; the seven bits below move down by one, so that four exponent bits fill five.
    return shifted.bitwise_right_shift_(1).bitwise_and_(~0x4000).view(torch.float16).to(torch.float32).mul_(2.0**8)


def encode_e5m6(values: Tensor) -> Tensor:
    """Rounds float32 to 12-bit E5M6 codes (int16), to nearest even, subnormals too; no clamp: 65280 and above give inf.

    DeepSeek's own packer truncates some subnormals; exact rounding is the choice here.
    """
    values = values.to(torch.float32)
    bits = values.view(torch.int32)
    sign = (bits >> 31) & 1
    magnitude = bits & 0x7FFFFFFF
    # Normal range: keep 6 of 23 mantissa bits. A carry out of the mantissa moves the exponent, as it should.
    rounded = (magnitude + 0xFFFF + ((magnitude >> 17) & 1)) >> 17
    normal = rounded - ((127 - 15) << 6)
    # Subnormal range: multiples of 2^-20; torch.round is half-to-even. 64 steps is the smallest normal's code.
    absolute = values.abs()
    small = absolute < _MIN_NORMAL_E5M6
    subnormal = torch.round(torch.where(small, absolute, 0.0) * _SUBNORMALS_PER_UNIT).to(torch.int32)
    code = torch.where(small, subnormal, normal.clamp(max=0x7C0))
    # NaN without its sign: devices differ in the sign of the NaN that arithmetic gives.
    return torch.where(torch.isnan(values), E5M6_NAN, code | (sign << 11)).to(torch.int16)


def decode_e5m6(codes: Tensor) -> Tensor:
    """12-bit codes (any integer dtype) to float32, exact (E5M6 is exact in BF16 too)."""
    code = codes.to(torch.int32)
    exponent = (code >> 6) & 0x1F
    mantissa = code & 0x3F
    special = 0x7F800000 | (mantissa << 17)  # inf, or NaN where a mantissa bit is set
    bits = torch.where(exponent == 31, special, ((exponent + (127 - 15)) << 23) | (mantissa << 17))
    normal = bits.view(torch.float32)
    value = torch.where(exponent == 0, mantissa.to(torch.float32) / _SUBNORMALS_PER_UNIT, normal)
    return torch.where(((code >> 11) & 1) == 1, -value, value)


def pack12(codes: Tensor) -> Tensor:
    """Packs 12-bit codes two in three bytes, a little-endian bit stream. Last dimension even -> uint8, times 3/2."""
    if codes.shape[-1] % 2:
        raise ValueError(f"pack12 needs an even last dimension, got {tuple(codes.shape)}: pad it first")
    pair = codes.to(torch.int32).unflatten(-1, (codes.shape[-1] // 2, 2))
    low, high = pair[..., 0], pair[..., 1]
    packed = torch.stack((low & 0xFF, ((low >> 8) & 0xF) | ((high & 0xF) << 4), (high >> 4) & 0xFF), dim=-1)
    return packed.flatten(-2).to(torch.uint8)


def unpack12(packed: Tensor) -> Tensor:
    """Inverse of `pack12`: uint8 [..., 3n/2] -> int16 codes [..., n]."""
    if packed.shape[-1] % 3:
        raise ValueError(f"unpack12 needs a last dimension that is a multiple of 3, got {tuple(packed.shape)}")
    triple = packed.to(torch.int16).unflatten(-1, (packed.shape[-1] // 3, 3))
    first, middle, last = triple.unbind(-1)
    return torch.stack((first | ((middle & 0xF) << 8), (middle >> 4) | (last << 4)), dim=-1).flatten(-2)
