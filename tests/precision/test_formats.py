"""The casts, code by code: ml_dtypes is the oracle of E4M3 and E5M2, exact rational arithmetic that of E5M6."""

import math
from bisect import bisect_left
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from dsv3fp8.precision.formats import (
    E4M3,
    E5M2,
    E5M6,
    E5M6_NAN,
    Format,
    decode,
    decode_e5m6,
    encode,
    encode_e5m6,
    pack12,
    unpack12,
)


def every_bf16() -> Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()


def value_of(code: int) -> Fraction:
    """A positive finite E5M6 code by the definition: bias 15, six mantissa bits, gradual underflow."""
    exponent, mantissa = code >> 6, code & 0x3F
    if exponent == 0:
        return Fraction(mantissa, 2**20)
    return Fraction(64 + mantissa, 64) * Fraction(2) ** (exponent - 15)


FINITE = [value_of(code) for code in range(31 << 6)]


def nearest_even(value: Fraction) -> int:
    """The code of the nearest finite E5M6 value (ties to the even code), or of inf halfway beyond the largest."""
    above = bisect_left(FINITE, value)
    if above == len(FINITE):
        step = FINITE[-1] - FINITE[-2]
        return 31 << 6 if value >= FINITE[-1] + step / 2 else above - 1
    if above == 0 or FINITE[above] == value:
        return above
    low, high = value - FINITE[above - 1], FINITE[above] - value
    return above if high < low or (high == low and above % 2 == 0) else above - 1


def code_of(value: float) -> int:
    sign = 0x800 if math.copysign(1.0, value) < 0 else 0
    return sign | nearest_even(abs(Fraction(value)))


@pytest.mark.parametrize(("fmt", "oracle"), [(E4M3, ml_dtypes.float8_e4m3fn), (E5M2, ml_dtypes.float8_e5m2)])
def test_every_bf16_value_is_cast_as_ml_dtypes_does_after_the_clamp(fmt: Format, oracle: type) -> None:
    """Q05, Q06: subnormals, ties, both zeros, NaN; whatever is beyond the largest value saturates, infinity too."""
    values = every_bf16()
    codes = encode(values, fmt).view(torch.uint8).numpy()
    clamped = np.clip(values.numpy(), -fmt.max, fmt.max)  # keeps NaN
    with np.errstate(invalid="ignore"):
        want = clamped.astype(oracle)
    finite = ~np.isnan(values.numpy())
    assert np.array_equal(codes[finite], want.view(np.uint8)[finite])
    assert np.isnan(codes[~finite].view(oracle).astype(np.float32)).all()
    assert np.array_equal(decode(encode(values, fmt), fmt).numpy()[finite], want.astype(np.float32)[finite])


@pytest.mark.parametrize(
    ("value", "code"),
    [(448, 0x7E), (464, 0x7E), (465, 0x7E), (480, 0x7E), (1000, 0x7E), (math.inf, 0x7E), (-1000, 0xFE), (0.0, 0), (-0.0, 0x80)],
)
def test_e4m3_saturates_at_its_largest_value(value: float, code: int) -> None:
    """Q05: torch, ml_dtypes and Triton each do something else from 465 up."""
    assert int(encode(torch.tensor([value]), E4M3).view(torch.uint8)) == code


def test_every_bf16_value_is_cast_to_the_nearest_e5m6_value() -> None:
    """Q17, Q19: exact rounding to nearest even, subnormals included, where DeepSeek's own packer truncates some."""
    values = every_bf16()
    codes = encode_e5m6(values.clamp(-E5M6.max, E5M6.max))
    finite = torch.isfinite(values)
    want = [code_of(float(np.clip(v, -65024, 65024))) for v in values[finite].tolist()]
    assert codes[finite].tolist() == want
    nan = torch.isnan(values)
    assert torch.isnan(decode_e5m6(codes[nan])).all()


def test_fp32_values_between_bf16_ones_are_rounded_once_to_e5m6() -> None:
    """Random fp32 in the normal and the subnormal range, and exact ties of both: no double rounding through BF16."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(4000, generator=generator) * 2.0 ** torch.randint(-12, 12, (4000,), generator=generator)
    subnormal = torch.randn(4000, generator=generator) * 2.0**-15
    ties = torch.tensor([float((FINITE[c] + FINITE[c + 1]) / 2) for c in range(0, len(FINITE) - 1, 7)])
    beside = torch.cat((torch.nextafter(ties, torch.tensor(0.0)), torch.nextafter(ties, torch.tensor(1e9))))
    values = torch.cat((normal, subnormal, ties, -ties, beside))
    assert encode_e5m6(values).tolist() == [code_of(v) for v in values.tolist()]


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (0.0, 0), (-0.0, 0x800), (1.0, 15 << 6), (1 + 1 / 128, 15 << 6), (1 + 3 / 128, (15 << 6) + 2),
        (2.0**-20, 1), (2.0**-21, 0), (2.0**-14, 64), (65024.0, 0x7BF), (65279.0, 0x7BF), (65280.0, 0x7C0),
        (65504.0, 0x7C0), (65535.0, 0x7C0), (1e5, 0x7C0), (math.inf, 0x7C0), (-math.inf, 0xFC0), (math.nan, E5M6_NAN),
    ],
)  # fmt: skip
def test_known_e5m6_codes_without_the_clamp(value: float, code: int) -> None:
    """Q17, Q19: 65024 is the largest, 65280 the first to become infinite."""
    assert int(encode_e5m6(torch.tensor([value]))) == code


def test_the_clamp_keeps_a_finite_value_finite_in_e5m6() -> None:
    values = torch.tensor([65279.0, 65280.0, 1e5, -1e30, math.inf, math.nan])
    got = decode(encode(values, E5M6), E5M6)
    assert got[:5].tolist() == [65024.0, 65024.0, 65024.0, -65024.0, 65024.0]
    assert math.isnan(got[5])


def test_every_e5m6_code_decodes_to_its_value_and_back_and_is_exact_in_bf16() -> None:
    codes = torch.arange(4096)
    values = decode_e5m6(codes)
    finite = ((codes >> 6) & 0x1F) != 31
    want = [float(FINITE[c & 0x7FF]) * (-1 if c & 0x800 else 1) for c in codes[finite].tolist()]
    assert values[finite].tolist() == want
    assert torch.equal(values[finite].bfloat16().float(), values[finite])
    assert torch.equal(torch.signbit(values[finite]), (codes[finite] & 0x800) != 0)
    assert torch.equal(encode_e5m6(values[finite]).long() & 0xFFF, codes[finite])
    infinite = ~finite & ((codes & 0x3F) == 0)
    assert values[infinite].tolist() == [math.inf, -math.inf]
    assert torch.isnan(values[~finite & ~infinite]).all()


def test_packed_codes_are_a_little_endian_bit_stream() -> None:
    """128 values take 192 bytes; bit i of the stream is bit i % 8 of byte i / 8."""
    codes = torch.randint(4096, (3, 128), generator=torch.Generator().manual_seed(0))
    packed = pack12(codes)
    assert packed.shape == (3, 192)
    assert packed.dtype == torch.uint8
    for row, stored in zip(codes.tolist(), packed.numpy(), strict=True):
        stream = sum(code << (12 * i) for i, code in enumerate(row))
        assert stored.tobytes() == stream.to_bytes(192, "little")
    assert torch.equal(unpack12(packed).long(), codes)


def test_every_code_survives_packing_in_either_place() -> None:
    codes = torch.arange(4096)
    both = torch.stack((codes, codes.flip(0)), -1).flatten()
    assert torch.equal(unpack12(pack12(both)).long(), both)


def test_an_odd_number_of_codes_is_refused() -> None:
    """Q17: widths that do not fill a byte are padded by the quantizer, never silently here."""
    with pytest.raises(ValueError, match="even last dimension"):
        pack12(torch.zeros(2, 3, dtype=torch.int16))
    with pytest.raises(ValueError, match="multiple of 3"):
        unpack12(torch.zeros(2, 4, dtype=torch.uint8))
