"""Smoothing, paired errors and the band, against definitions written out step by step."""

import math

import numpy as np
import pytest

from dsv3fp8.observe.compare.curves import band, default_window, false_alarm, mean_of, relative_error, smooth, student_tail


def plain_smooth(steps: list[int], values: list[float], window: int) -> list[float]:
    out = []
    for end in steps:
        seen = [v for s, v in zip(steps, values, strict=True) if end - window < s <= end and math.isfinite(v)]
        out.append(sum(seen) / len(seen) if seen and end >= window else math.nan)
    return out


@pytest.mark.parametrize("steps", [list(range(1, 41)), [1, *range(5, 41, 5)]], ids=["every step", "every fifth"])
@pytest.mark.parametrize("window", [1, 7, 40])
def test_a_smoothed_value_is_the_mean_of_the_finite_values_of_its_window(steps: list[int], window: int) -> None:
    values = np.random.default_rng(1).standard_normal(len(steps))
    values[3:5] = math.nan, math.inf
    got = smooth(np.array(steps), values, window)
    np.testing.assert_allclose(got, plain_smooth(steps, values.tolist(), window), rtol=1e-12)


def test_a_window_without_a_finite_value_has_no_mean() -> None:
    steps, values = np.arange(1, 9), np.array([1.0, 1, 1, math.nan, math.nan, math.nan, 3, 3])
    assert np.isnan(smooth(steps, values, 3)).tolist() == [True, True, False, False, False, True, False, False]


def test_the_window_is_a_twentieth_of_the_run() -> None:
    assert [default_window(steps) for steps in (1, 19, 20, 21, 160, 1500)] == [1, 1, 1, 2, 8, 75]


@pytest.mark.parametrize("window", [None, 1, 3])
def test_an_error_is_of_the_steps_that_neither_run_skipped(window: int | None) -> None:
    steps = list(range(1, 8))
    ours, theirs = [2.0, 3, math.nan, 5, 6, 7, 9], [1.0, 2, 4, 8, math.inf, 4, 6]
    want = []
    for end in steps:
        seen = [
            (x, y)
            for step, x, y in zip(steps, ours, theirs, strict=True)
            if end - (window or 1) < step <= end and math.isfinite(x) and math.isfinite(y)
        ]
        full = end >= (window or 1)
        want.append(sum(x for x, _ in seen) / sum(y for _, y in seen) - 1 if seen and full else math.nan)
    got = relative_error(np.array(steps), np.array(ours), np.array(theirs), window)
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_a_mean_is_of_the_runs_that_have_a_value() -> None:
    got = mean_of([np.array([1.0, math.nan, math.nan]), np.array([3.0, 5.0, math.nan])], 3)
    assert got[:2].tolist() == [2.0, 5.0]
    assert math.isnan(got[2])


def test_the_band_is_twice_the_root_mean_square_of_pairwise_differences_over_its_span() -> None:
    draws = np.random.default_rng(2)
    steps, span = np.arange(10, 101, 10), 30
    curves = [3 + 0.1 * draws.standard_normal(10) for _ in range(3)]
    got = band(steps, curves, span)
    assert got is not None
    for index, end in enumerate(steps):
        squares = []
        for at, step in enumerate(steps):
            if end - span < step <= end:
                mean = sum(curve[at] for curve in curves) / 3
                pairs = ((0, 1), (0, 2), (1, 2))
                squares += [((curves[i][at] - curves[j][at]) / mean) ** 2 for i, j in pairs]
        assert got[index] == pytest.approx(2 * math.sqrt(sum(squares) / len(squares)), rel=1e-12)


def test_one_seed_has_no_band() -> None:
    assert band(np.arange(3), [np.ones(3)], 2) is None


def test_tails_of_students_t() -> None:
    """Quantiles of the tables: two-sided 5 % and 1 %."""
    for bound, freedom, want in ((12.706, 1, 0.05), (4.303, 2, 0.05), (2.776, 4, 0.05), (4.604, 4, 0.01), (2.042, 30, 0.05)):
        assert student_tail(bound, freedom) == pytest.approx(want, rel=3e-3)


@pytest.mark.parametrize(("seeds", "pairs"), [(2, 2), (3, 3), (3, 1), (5, 5)])
def test_equal_recipes_are_called_outside_as_often_as_the_report_says(seeds: int, pairs: int) -> None:
    """Seeds and recipe differ by offsets of one size, which stay for all of the band's steps: the worst case."""
    draws, trials, beyond = np.random.default_rng(3), 4000, 0
    steps = np.arange(1, 4)
    for _ in range(trials):
        own, other = 1 + 1e-3 * draws.standard_normal(seeds), 1 + 1e-3 * draws.standard_normal(pairs)
        half = band(steps, [np.full(3, level) for level in own], 3)
        assert half is not None
        beyond += abs(np.mean(other / own[:pairs] - 1)) > half[-1]
    want = false_alarm(seeds, pairs)
    assert beyond / trials == pytest.approx(want, abs=4 * math.sqrt(want * (1 - want) / trials) + 1e-3)
