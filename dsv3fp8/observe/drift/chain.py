"""The tensor core's chain of sums in float64, over decoded operands: for what no hardware and no kernel of ours computes.

It differs from precision/accumulator.py in two ways. Products enter the chain with their scales, which are powers of two
and move exponents only: this defines tile scales without promotion, which on the chip has no place to apply the scales.
And the rounding of every addition can be chosen, which tells what truncation does from what few bits do.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from dsv3fp8.precision.formats import E4M3, decode
from dsv3fp8.precision.tiles import QuantizedTensor

GROUP = 32  # products that are added at once
FRACTION_BITS = 13
_SMALLEST_EXPONENT = -6  # E4M3's subnormals are aligned as if they had it
_NOTHING = -(2**20)  # the exponent of a zero: below every other

Rounding = Literal["truncate", "nearest"]
_ROUND = {"truncate": torch.trunc, "nearest": torch.round}


def chain(a: QuantizedTensor, b: QuantizedTensor, rounding: Rounding = "truncate") -> Tensor:
    """Σ a · b, one chain over all of K with the scales inside, float64 [M, N].

    a [M, K] and b [N, K]: E4M3 with power-of-two scales. K is padded with zeros to whole groups.
    Groups of 32 products and the running sum are aligned to their largest exponent, each rounded to 13 fraction bits,
    summed exactly, and the sum is rounded to 13 fraction bits. A product's exponent is e_a + e_b: it is not renormalized.
    """
    (values_a, exponents_a), (values_b, exponents_b) = _parts(a), _parts(b)
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float64, device=a.codes.device)
    round_to = _ROUND[rounding]
    for start in range(0, a.shape[1], GROUP):
        group = slice(start, start + GROUP)
        products = values_a[:, None, group] * values_b[None, :, group]
        exponents = exponents_a[:, None, group] + exponents_b[None, :, group]
        last_bit = torch.maximum(exponents.amax(-1), _exponent(total)) - FRACTION_BITS
        units = round_to(products * _power_of_two(-last_bit)[..., None]).sum(-1) + round_to(total * _power_of_two(-last_bit))
        exact = units * _power_of_two(last_bit)
        last_bit = _exponent(exact) - FRACTION_BITS
        total = round_to(exact * _power_of_two(-last_bit)) * _power_of_two(last_bit)
    return total


def _parts(x: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """(values float64, exponents int32) [R, K] of codes times scales; exponents as the tensor core aligns by."""
    assert x.format is E4M3
    codes = decode(x.codes, x.format).double()
    scale = x.expanded_scale().double().expand_as(codes)
    mantissa, power = torch.frexp(scale)
    assert bool((mantissa == 0.5).all()), "scales have to be powers of two"
    exponent = torch.where(codes == 0, _NOTHING, _exponent(codes).clamp(min=_SMALLEST_EXPONENT) + power - 1)
    return codes * scale, exponent


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as float64, from the bits; beyond ±1000 2^±1000, which only zeros ask for."""
    return (exponent.clamp(-1000, 1000).long() + 1023 << 52).view(torch.float64)


def _exponent(x: Tensor) -> Tensor:
    """floor(log2 |x|) as int32, far below everything for 0."""
    return torch.where(x == 0, _NOTHING, torch.frexp(x)[1] - 1)
