"""The arithmetic of a comparison: smoothing, errors paired by seed, and the band that the baseline's seeds span.

All of it works on curves over one grid of steps, with NaN where a run has no value. docs/compare.md says it in words.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Curve = npt.NDArray[np.float64]
Steps = npt.NDArray[np.int64]

BAND_WINDOWS = 4
"""The band looks back over so many smoothing windows, a fifth of the run by default."""
BAND_FACTOR = 2.0
"""The band's half-width in root mean squares of the difference between two seeds."""


def default_window(steps: int) -> int:
    """Steps of the smoothing window: a twentieth of the run."""
    return max(1, math.ceil(steps / 20))


def smooth(steps: Steps, values: Curve, window: int) -> Curve:
    """Mean of the finite values logged in the last `window` steps, that of the step among them.

    NaN before step `window`, where the window is not full yet, where the step itself was not logged by the run (behind its
    end), and where no value of the window is finite.
    """
    return np.where(steps >= window, _trailing_mean(steps, values, np.isfinite(values), window), np.nan)


def _trailing_mean(steps: Steps, values: Curve, present: npt.NDArray[np.bool_], window: int) -> Curve:
    """At each step the mean of the values that are present in the last `window` steps; NaN where none is."""
    sums = np.concatenate(([0.0], np.cumsum(np.where(present, values, 0.0))))
    counts = np.concatenate(([0], np.cumsum(present)))
    first = np.searchsorted(steps, steps - window, side="right")
    last = np.arange(1, len(steps) + 1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (sums[last] - sums[first]) / (counts[last] - counts[first])


def relative_error(steps: Steps, values: Curve, baseline: Curve, window: int | None) -> Curve:
    """Mean of the values over that of the baseline's, less 1, in the window of each step; without one, step by step.

    Over the steps at which both are finite: a step that one of them skipped counts for neither, since a loss falls and batches
    differ.
    """
    both = np.isfinite(values) & np.isfinite(baseline)
    ours, theirs = np.where(both, values, np.nan), np.where(both, baseline, np.nan)
    return ours / theirs - 1 if window is None else smooth(steps, ours, window) / smooth(steps, theirs, window) - 1


def mean_of(curves: Sequence[Curve], length: int) -> Curve:
    """Over those curves, each of that length, that have a value; NaN where none has."""
    stacked = np.stack(curves) if curves else np.empty((0, length))
    present = np.isfinite(stacked)
    count = present.sum(axis=0)
    return np.where(count > 0, np.where(present, stacked, 0.0).sum(axis=0) / np.maximum(count, 1), np.nan)


def band(steps: Steps, curves: Sequence[Curve], span: int) -> Curve | None:
    """Half-width of the seed-to-seed band, relative; None with fewer than two curves.

    At each step twice the root mean square of (L_i - L_j) / mean L, over all pairs of the baseline's seeds and over the
    last `span` steps. Two runs that differ by nothing but noise of that size lie within it in some 95 % of the cases,
    once the spread is known well, which two seeds alone do not make it.
    """
    if len(curves) < 2:
        return None
    middle = mean_of(curves, len(steps))
    pairs = np.stack([(one - other) / middle for one, other in itertools.combinations(curves, 2)])
    present = np.asarray(np.isfinite(pairs).all(axis=0))
    squares = np.where(present, np.where(np.isfinite(pairs), pairs, 0.0) ** 2, 0.0).mean(axis=0)
    means = _trailing_mean(steps, squares, present, span)
    return np.where(present, BAND_FACTOR * np.sqrt(np.maximum(means, 0.0)), np.nan)


def false_alarm(seeds: int, pairs: int) -> float:
    """The chance that a recipe is called outside whose runs differ from the baseline's by no more than two seeds do.

    seeds: runs of the baseline. pairs: of the recipe, paired with them. For differences that stay as they are over the
    band's steps; what fluctuates there makes the band surer. P(|T| > 2·sqrt(pairs)) of Student's T with seeds - 1 degrees of
    freedom: a mean of `pairs` differences, over the root mean square of a difference.
    """
    return student_tail(BAND_FACTOR * math.sqrt(pairs), seeds - 1)


def student_tail(bound: float, freedom: int) -> float:
    """P(|T| > bound). Over the angle atan(t / sqrt(freedom)) the density is a power of a cosine; summed by midpoints."""
    count = 20000
    angles = (np.arange(count) + 0.5) * (math.pi / 2 / count)
    density = np.cos(angles) ** (freedom - 1)
    return float(density[angles > math.atan(bound / math.sqrt(freedom))].sum() / density.sum())
