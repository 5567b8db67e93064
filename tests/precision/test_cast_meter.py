"""The meter of what casts lose: values flushed to zero, and values beyond a format's range."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from dsv3fp8.kernels.quantize.reference import quantize, retile
from dsv3fp8.precision.cast_meter import active_meter, measure_casts
from dsv3fp8.precision.formats import E4M3, E5M2, E5M6, Format
from dsv3fp8.precision.tiles import COLUMN_128, ROW_128, Tile

TENSOR = Tile(None, None)
# Of four nonzero values in a tile of amax 448 (scale 1), two lie below half of E4M3's smallest subnormal, 2^-10.
VALUES = torch.tensor([[448.0, 1.0, 2.0**-11, -(2.0**-12), 0.0, -0.0]])


def test_it_counts_nonzero_values_whose_code_is_zero() -> None:
    with measure_casts() as meter:
        quantize(VALUES, E4M3, ROW_128)
        assert meter.counts().flushed_share == 0.5
        quantize(VALUES, E5M6, ROW_128)  # E5M6 holds all four
        assert meter.counts().flushed_share == 0.25
        quantize(VALUES[:, :5], E5M6, ROW_128)  # an odd width is padded, and padding is not counted
        assert meter.counts().flushed_share == pytest.approx(2 / 12)


def test_re_tiling_counts_what_it_reads() -> None:
    with measure_casts() as meter:
        retile(quantize(VALUES, E4M3, ROW_128), COLUMN_128)
    assert meter.counts().flushed_share == pytest.approx(2 / (4 + 2))


def test_it_is_off_outside_and_the_inner_meter_of_two_counts() -> None:
    assert active_meter() is None
    with measure_casts() as outer:
        with measure_casts() as inner:
            quantize(VALUES, E4M3, ROW_128)
        assert active_meter() is outer
    assert active_meter() is None
    assert (inner.counts().flushed_share, outer.counts().flushed_share) == (0.5, 0.0)


@pytest.mark.parametrize(
    ("fmt", "last", "behind"),
    [(E4M3, 464.0, 464.00003), (E5M2, 61440.0, 61440.004), (E5M6, 65280.0, 65280.004)],
    ids=lambda given: given.name if isinstance(given, Format) else "",
)
def test_it_counts_values_that_a_given_scale_puts_beyond_the_range(fmt: Format, last: float, behind: float) -> None:
    """Half a step beyond the largest value, from the formats' tables: 448 + 32/2, 57344 + 8192/2, 65024 + 512/2."""
    values = torch.tensor([[fmt.max, -fmt.max, last, -last, 0.0, 1.0, behind, -behind, 1e30, 3.0]]) * 2.0**-20
    with measure_casts() as meter:
        quantize(values, fmt, TENSOR, scale=torch.full((1, 1), 2.0**-20))
    assert meter.counts() == (9, 0, 3)
    assert meter.counts().saturated_share == 3 / 9


def test_nan_is_not_beyond_the_range_and_nothing_quantized_is_a_share_of_zero() -> None:
    with measure_casts() as meter:
        assert (meter.counts().flushed_share, meter.counts().saturated_share) == (0.0, 0.0)
        quantize(torch.tensor([[math.nan, 1.0]]), E4M3, TENSOR, scale=torch.ones(1, 1))
    assert meter.counts().saturated == 0


@given(
    exponent=st.integers(-150, 127),
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(["fp32", "pow2"]),
    fmt=st.sampled_from([E4M3, E5M2, E5M6]),
    tile=st.sampled_from([ROW_128, COLUMN_128, TENSOR]),
)
def test_the_scale_of_values_own_amax_saturates_none(exponent: int, seed: int, kind: str, fmt: Format, tile: Tile) -> None:
    """Which is why nobody looks: here it is handed back as a given one."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.ldexp(2 * torch.rand(3, 201, generator=generator) - 1, torch.tensor(exponent))
    own = quantize(values, fmt, tile, kind)
    with measure_casts() as meter:
        quantize(values, fmt, tile, kind, scale=own.scale)
    assert meter.counts().saturated == 0


@pytest.mark.parametrize("fmt", [E4M3, E5M2, E5M6], ids=lambda fmt: fmt.name)
def test_odd_widths_and_empty_matrices_are_counted(fmt: Format) -> None:
    with measure_casts() as meter:
        quantize(torch.full((3, 129), -1e9), fmt, TENSOR, scale=torch.ones(1, 1))
        quantize(torch.ones(0, 129), fmt, TENSOR, scale=torch.ones(1, 1))
        quantize(torch.ones(3, 129), fmt, TENSOR, scale=torch.full((1, 1), math.nan))
    assert meter.counts() == (2 * 3 * 129, 0, 3 * 129)
