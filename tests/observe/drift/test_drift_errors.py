"""The error measures by hand, and the float64 chain against the accumulator that every kernel is held to."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv3fp8.observe.drift.chain import chain
from dsv3fp8.observe.drift.errors import measure, per_row
from dsv3fp8.observe.drift.experiments.length import exact
from dsv3fp8.observe.drift.sums import ONE_SCALE, unscaled
from dsv3fp8.precision import accumulator
from dsv3fp8.precision.formats import E4M3
from dsv3fp8.precision.tiles import ROW_128, QuantizedTensor, Tile


def codes(values: torch.Tensor) -> torch.Tensor:
    return values.to(E4M3.dtype)


def test_outputs_that_are_all_too_large_by_a_tenth() -> None:
    error = measure(torch.tensor([3.3, -4.4], dtype=torch.float64), torch.tensor([3.0, -4.0], dtype=torch.float64))
    assert error.rms == pytest.approx(0.1)
    assert error.largest == pytest.approx(0.4 / (25 / 2) ** 0.5)
    assert error.signed == pytest.approx(0.1)
    assert error.common == pytest.approx(1.0)


def test_errors_that_cancel_over_the_outputs() -> None:
    error = measure(torch.tensor([1.5, -0.5]), torch.tensor([1.0, -1.0]))
    assert (error.rms, error.largest, error.signed, error.common) == (0.5, 0.5, 0.0, 0.0)


def test_outputs_that_are_too_small_have_a_negative_sign_on_either_side_of_zero() -> None:
    error = measure(torch.tensor([0.75, -0.5]), torch.tensor([1.0, -1.0]))
    assert error.signed == -0.375
    assert error.common == pytest.approx((0.25 + 0.5) ** 2 / ((0.25**2 + 0.5**2) * 2))


def test_no_error_is_no_error_also_of_zeros() -> None:
    assert set(measure(torch.zeros(2, 2), torch.zeros(2, 2)).to_dict().values()) == {0.0}


def test_the_error_of_a_row_is_its_own() -> None:
    want = torch.tensor([[3.0, 4.0], [300.0, 400.0], [0.0, 0.0]])
    got = torch.tensor([[3.0, 5.0], [300.0, 400.0], [0.0, 0.0]])
    assert per_row(got, want).tolist() == [0.2, 0.0, 0.0]


def test_the_reference_is_exact_over_the_whole_range_of_the_format() -> None:
    a = codes(torch.tensor([[448.0, 2.0**-9, -(2.0**-9), 1.125] * 16]))
    b = codes(torch.tensor([[448.0, 2.0**-9, 3.5, -448.0] * 16]))
    want = sum(Fraction(float(x)) * Fraction(float(y)) for x, y in zip(a.float()[0], b.float()[0], strict=True))
    assert Fraction(float(exact(a, b))) == want


@given(st.integers(0, 2**32), st.sampled_from([1, 31, 32, 33, 200, 512]), st.sampled_from([2.0**-12, 1.0, 100.0]))
def test_without_scales_it_is_the_accumulator_to_the_bit(seed: int, k: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b = (codes((torch.randn(n, k, generator=generator) * spread).clamp(-448, 448)) for n in (5, 3))
    assert torch.equal(chain(unscaled(a), unscaled(b)).float(), accumulator.products(a, b, "never"))


def test_scales_of_rows_move_nothing_but_exponents() -> None:
    a, b = (codes(torch.randn(4, 256)) for _ in range(2))
    scale = torch.tensor([[1.0], [2.0**-20], [2.0**30], [0.5]])
    scaled = QuantizedTensor(a, scale, E4M3, Tile(1, None), (4, 256))
    assert torch.equal(chain(scaled, unscaled(b)).float(), accumulator.products(a, b, "never") * scale)


def test_products_under_a_small_tile_scale_are_lost_in_one_chain() -> None:
    """128 ones, then 128 products of 2^-8: each lies below the last bit of 128, which is 2^-6, and all are cut off."""
    a = QuantizedTensor(codes(torch.ones(1, 256)), torch.tensor([[1.0, 2.0**-8]]), E4M3, ROW_128, (1, 256))
    b = unscaled(codes(torch.ones(1, 256)))
    assert float(chain(a, b)) == 128.0
    assert float(chain(a, b, "nearest")) == 128.0
    tiled = QuantizedTensor(b.codes, torch.ones(1, 2), E4M3, Tile(128, 128), (1, 256))
    assert float(accumulator.block_scaled(a, tiled, 128)) == 128.5


def test_rounding_to_nearest_keeps_what_truncation_cuts_off() -> None:
    """1 + 1.5 · 2^-14: the second product is three quarters of the last bit."""
    a, b = torch.zeros(1, 32), torch.zeros(1, 32)
    a[0, 0] = b[0, 0] = 1.0
    a[0, 1], b[0, 1] = 1.5 * 2.0**-6, 2.0**-8
    operands = [unscaled(codes(x)) for x in (a, b)]
    assert float(chain(*operands)) == 1.0
    assert float(chain(*operands, "nearest")) == 1.0 + 2.0**-13


def test_scales_that_are_no_powers_of_two_are_refused() -> None:
    a = QuantizedTensor(codes(torch.ones(1, 32)), torch.tensor([[0.3]]), E4M3, ONE_SCALE, (1, 32))
    with pytest.raises(AssertionError, match="powers of two"):
        chain(a, unscaled(codes(torch.ones(1, 32))))
