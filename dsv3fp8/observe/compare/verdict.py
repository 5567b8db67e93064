"""What a comparison may say of a recipe, by rules that were written down before any run was judged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from dsv3fp8.observe.compare.curves import Curve

Verdict = Literal[
    "baseline", "again", "within the band", "outside the band", "diverged", "unfinished", "no band", "no baseline"
]

BLOW_UP = 1.1
"""A loss that ends at so many times its own minimum and the baseline's end, or above, has blown up."""
UNLEARNED = 0.5
"""So has a loss of the baseline itself that has risen again by this share of what it had fallen."""

RULES: dict[Verdict, str] = {
    "diverged": (
        "a run ended after training.max_skipped skipped steps in a row, has no finite loss in its last window, or ends with a "
        f"smoothed loss of at least {BLOW_UP:.1f} times its own minimum and {BLOW_UP:.1f} times the baseline's end of that "
        f"seed; where there is none, {BLOW_UP:.1f} times its own minimum and {UNLEARNED:.0%} of its fall above it"
    ),
    "unfinished": "a run has not reached its last step; nothing is said of it",
    "no baseline": "no finished run of the baseline has a seed of this recipe",
    "no band": "the baseline has fewer than two finished seeds, so there is nothing to hold the error against",
    "again": "the baseline, trained a second time from the same seeds: what it differs by is no recipe's",
    "within the band": (
        "the mean over seeds of the relative error at the last step is, whatever its sign, at most the band, in training loss "
        "and in validation loss"
    ),
    "outside the band": "in one of the two it is beyond the band",
}


def has_blown_up(curve: Curve, gave_up: bool, reference: float | None) -> bool:
    """Whether a run that has ended diverged. curve: smoothed loss. reference: the baseline's last value, same seed, if any."""
    if gave_up or not len(curve) or not math.isfinite(curve[-1]):
        return True
    lowest, last = float(np.nanmin(curve)), float(curve[-1])
    if reference is not None:
        return last >= BLOW_UP * lowest and last >= BLOW_UP * reference
    first = float(curve[np.isfinite(curve)][0])
    return last > lowest and last - lowest >= UNLEARNED * (first - lowest) and last >= BLOW_UP * lowest


def judge(
    states: Sequence[str], errors: Mapping[int, float], half_width: float | None, alone: Verdict | None = None
) -> Verdict:
    """Of a recipe. states: "diverged", "unfinished" or "complete" of each of its runs. errors: at the end, by seed.

    alone: what is said of one that is held against nothing: the baseline, or the baseline again.
    """
    if "diverged" in states:
        return "diverged"
    if "unfinished" in states:
        return "unfinished"
    if alone == "baseline":
        return alone
    if not errors:
        return "no baseline"
    if alone is not None:
        return alone
    if half_width is None:
        return "no band"
    mean = sum(errors.values()) / len(errors)
    return "within the band" if abs(mean) <= half_width else "outside the band"


def worse(training: Verdict, validation: Verdict) -> Verdict:
    """Of both losses: outside the band if one of them is."""
    return validation if training == "within the band" and validation == "outside the band" else training
