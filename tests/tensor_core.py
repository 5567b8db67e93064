"""The FP8 tensor core's sums in whole numbers and fractions, one product at a time: what the emulator is held against.

Written from the contract (§3), shares no code with the package. Values are whole multiples of 2^-64.
"""

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

UNIT = 64
Codes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def parts_of(code: int, fmt: str) -> tuple[int, int, int]:
    """(signed significand, power of two of its last bit, exponent as the tensor core sees it) of a finite code."""
    mantissa_bits, bias = {"e4m3": (3, 7), "e5m2": (2, 15)}[fmt]
    field, mantissa = (code & 0x7F) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    exponent = max(field, 1) - bias
    significand = mantissa + ((1 << mantissa_bits) if field else 0)
    return (-significand if code & 0x80 else significand), exponent - mantissa_bits, exponent if significand else -126


def toward_zero(value: int, step: int) -> int:
    return (abs(value) // step) * step * (1 if value >= 0 else -1)


def after_group(running: int, a: list[int], b: list[int], formats: tuple[str, str]) -> int:
    """The running sum after up to 32 more products."""
    terms, exponents = [running], [abs(running).bit_length() - 1 - UNIT if running else -126]
    for x, y in zip(a, b, strict=True):
        (sx, px, ex), (sy, py, ey) = parts_of(x, formats[0]), parts_of(y, formats[1])
        terms.append(sx * sy * 2 ** (UNIT + px + py))
        exponents.append(ex + ey)
    step = 2 ** max(UNIT + max(exponents) - 13, 0)
    total = sum(toward_zero(term, step) for term in terms)
    return toward_zero(total, 2 ** max(abs(total).bit_length() - 1 - 13, 0))


def chain(a: Codes, b: Codes, formats: tuple[str, str]) -> Fraction:
    """One row times one column in one chain."""
    running = 0
    for at in range(0, len(a), 32):
        running = after_group(running, a[at : at + 32].tolist(), b[at : at + 32].tolist(), formats)
    return Fraction(running, 2**UNIT)


def fp32(value: Fraction) -> Fraction:
    """Rounded to the nearest fp32, ties to even, subnormals included; too large a value is left as it is."""
    if value == 0:
        return value
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > size
    step = Fraction(2) ** (max(exponent, -126) - 23)
    return round(value / step) * step


def promoted(a: Codes, b: Codes, every: int, formats: tuple[str, str]) -> Fraction:
    """Chains of `every` products, added in fp32."""
    total = Fraction(0)
    for at in range(0, len(a), every):
        total = fp32(total + chain(a[at : at + every], b[at : at + every], formats))
    return total


def products(a: Codes, b: Codes, every: int | str, formats: tuple[str, str] = ("e4m3", "e4m3")) -> Floats:
    """a [M, K] times b [N, K] -> [M, N]."""
    length = max(a.shape[1], 1) if isinstance(every, str) else every
    rows = [[float(promoted(x, y, length, formats)) for y in b] for x in a]
    return np.array(rows, dtype=np.float32).reshape(len(a), len(b))


def block_scaled(
    a: Codes, b: Codes, s_a: Floats, s_b: Floats, every: int, one_by_one: bool, parts: int = 1,
    formats: tuple[str, str] = ("e4m3", "e4m3"),
) -> Floats:  # fmt: skip
    """s_a [M, blocks], s_b [N, blocks]: scales of each row in each K block. one_by_one: s_a first, then s_b (wgrad)."""
    k = a.shape[1] // parts
    starts = [(part * k + at, part * k + min(at + 128, k)) for part in range(parts) for at in range(0, k, 128)]
    out = np.zeros((len(a), len(b)), dtype=np.float32)
    for m, n in np.ndindex(*out.shape):
        total = Fraction(0)
        for block, (start, stop) in enumerate(starts):
            p = promoted(a[m, start:stop], b[n, start:stop], every, formats)
            left, right = Fraction(float(s_a[m, block])), Fraction(float(s_b[n, block]))
            total = fp32(fp32(p * left) * right + total) if one_by_one else fp32(p * fp32(left * right) + total)
        out[m, n] = float(total)
    return out
