"""The meter of values that quantization flushes to zero."""

import pytest
import torch

from dsv3fp8.kernels.quantize.reference import quantize, retile
from dsv3fp8.precision.flush import active_meter, measure_flush
from dsv3fp8.precision.formats import E4M3, E5M6
from dsv3fp8.precision.tiles import COLUMN_128, ROW_128

# Of four nonzero values in a tile of amax 448 (scale 1), two lie below half of E4M3's smallest subnormal, 2^-10.
VALUES = torch.tensor([[448.0, 1.0, 2.0**-11, -(2.0**-12), 0.0, -0.0]])


def test_it_counts_nonzero_values_whose_code_is_zero() -> None:
    with measure_flush() as meter:
        quantize(VALUES, E4M3, ROW_128)
        assert meter.share() == 0.5
        quantize(VALUES, E5M6, ROW_128)  # E5M6 holds all four
        assert meter.share() == 0.25
        quantize(VALUES[:, :5], E5M6, ROW_128)  # an odd width is padded, and padding is not counted
        assert meter.share() == pytest.approx(2 / 12)


def test_re_tiling_counts_what_it_reads() -> None:
    with measure_flush() as meter:
        retile(quantize(VALUES, E4M3, ROW_128), COLUMN_128)
    assert meter.share() == pytest.approx(2 / (4 + 2))


def test_it_is_off_outside_and_the_inner_meter_of_two_counts() -> None:
    assert active_meter() is None
    with measure_flush() as outer:
        with measure_flush() as inner:
            quantize(VALUES, E4M3, ROW_128)
        assert active_meter() is outer
    assert active_meter() is None
    assert (inner.share(), outer.share()) == (0.5, 0.0)
