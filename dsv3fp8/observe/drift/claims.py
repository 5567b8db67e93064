"""What the draft on partial sums says, and what the figures say to it. Rules decide; no verdict is written down.

The draft: the project's seed document on partial-sum drift under FP8, in our words. Every rule reads rows alone and
states its thresholds, so that other figures give other verdicts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dsv3fp8.observe.drift.study import Row

Rows = Mapping[str, Sequence[Row]]

YES, PARTLY, NO, OPEN = "borne out", "borne out in part", "not borne out", "not decided here"

GROWTH = 2.0  # the error of the longest chain over the shortest's, to count as growing
STEP_BACK = 0.9  # an error this much of its predecessor's still counts as not falling: samples are finite
SYSTEMATIC = 0.5  # the share of squared error that one common factor explains, to count as biased
LEVEL = 1.5  # the largest promoted error over the smallest, to count as not growing
CUT = 5.0  # unpromoted over promoted, to count as cut
NEEDED = 1.10  # what leaving a mechanism out multiplies the error by, to count as needed
ALIKE = 2.0  # within this factor an error counts as unchanged
ROUNDED = 0.5  # the error when rounding to nearest, over truncating, below which truncation counts as the cause
LONG = 512  # the least K at which a checkpoint's sums are asked for drift
MATTERS = 0.5  # of the error of quantization: from there on a sum's own error counts as mattering
NEAR = 0.25  # relative distance that counts as near


@dataclass(frozen=True)
class Claim:
    """text: what the draft says. rule: what decides. found: (verdict, the numbers it rests on), from the rows."""

    name: str
    text: str
    rule: str
    found: Callable[[Rows], tuple[str, str]]


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def judge(rows: Rows) -> list[dict[str, str]]:
    """Every claim with its verdict and numbers."""
    judged = []
    for claim in CLAIMS:
        verdict, numbers = claim.found(rows)
        judged.append({"name": claim.name, "claim": claim.text, "rule": claim.rule, "verdict": verdict, "numbers": numbers})
    return judged


def _grows(rows: Rows) -> tuple[str, str]:
    holds, numbers = [], []
    for data in _kinds(rows["length"]):
        chain = _chain(rows, data, "never")
        errors = [row["rms"] for row in chain]
        steady = all(later >= STEP_BACK * sooner for sooner, later in pairwise(errors))
        holds.append(steady and errors[-1] >= GROWTH * errors[0])
        numbers.append(f"{NAMES[data]}: {errors[0]:.1e} at K = {chain[0]['k']}, {errors[-1]:.1e} at K = {chain[-1]['k']}")
    return _verdict(holds), "; ".join(numbers)


def _biased(rows: Rows) -> tuple[str, str]:
    holds, numbers = [], []
    for data in _kinds(rows["length"]):
        last = _chain(rows, data, "never")[-1]
        holds.append(last["common"] >= SYSTEMATIC)
        numbers.append(
            f"{NAMES[data]}, K = {last['k']}: one factor explains {_percent(last['common'])} of the squared error, "
            f"mean signed error {last['signed']:+.1e} beside an rms of {last['rms']:.1e}"
        )
    return _verdict(holds), "; ".join(numbers)


def _real(rows: Rows) -> tuple[str, str]:
    chains = [row for row in rows["operands"] if row["promote"] == "never"]
    if not chains:
        return OPEN, "give run=RUN_DIR for sums of a checkpoint's own operands"
    recipe = chains[0]["recipe"]
    twins = [row for row in rows["operands"] if row["recipe"] == recipe and row["promote"] != "never"]
    promoted = {(row["linear"], row["gemm"]): row["rms"] for row in twins}
    long = [row for row in chains if row["k"] >= LONG]
    if not long:
        return OPEN, f"the checkpoint's longest sum has K = {max(row['k'] for row in chains)}"
    worst = max(long, key=lambda row: row["rms"])
    drifting = sum(row["rms"] >= GROWTH * promoted[row["linear"], row["gemm"]] for row in long)
    biased = sum(row["common"] >= SYSTEMATIC for row in long)
    cast = next(row["after"] for row in rows["casts"] if row["changed"] is None)
    numbers = (
        f"{drifting} of {len(long)} sums with K >= {LONG} have {GROWTH:g} times the error or more when they are not promoted; "
        f"the largest error is {worst['rms']:.1e} ({worst['linear']} {worst['gemm']}, K = {worst['k']}), where quantizing the "
        f"operands of a Gaussian product costs {cast:.1e}; {biased} of {len(long)} are biased"
    )
    if drifting < len(long):
        return (PARTLY if drifting else NO), numbers
    return (YES if worst["rms"] >= MATTERS * cast else PARTLY), numbers


def _truncation(rows: Rows) -> tuple[str, str]:
    holds, numbers = [], []
    for data in _kinds(rows["cause"]):
        longest = max(row["k"] for row in rows["cause"])
        cut, nearest = (
            next(row["rms"] for row in rows["cause"] if (row["data"], row["k"], row["rounding"]) == (data, longest, rounding))
            for rounding in ("truncate", "nearest")
        )
        holds.append(nearest >= ROUNDED * cut)
        numbers.append(f"{NAMES[data]}, K = {longest}: {cut:.1e} truncated, {nearest:.1e} rounded to nearest")
    return _verdict(holds), "; ".join(numbers)


def _promotion(rows: Rows) -> tuple[str, str]:
    holds, numbers = [], []
    for data in _kinds(rows["length"]):
        promoted, never = _chain(rows, data, 128), _chain(rows, data, "never")
        errors = [row["rms"] for row in promoted]
        cut = never[-1]["rms"] / errors[-1]
        holds.append(max(errors) <= LEVEL * min(errors) and cut >= CUT)
        numbers.append(
            f"{NAMES[data]}: between {min(errors):.1e} and {max(errors):.1e} over all K, {cut:.0f} times less than one chain "
            f"at K = {never[-1]['k']}"
        )
    return _verdict(holds), "; ".join(numbers)


def _both(rows: Rows) -> tuple[str, str]:
    needed, numbers = [], []
    for data in _kinds(rows["mechanisms"]):
        both = _cell(rows, data, "tile", 128, "total")
        no_promotion, no_tiles = (
            _cell(rows, data, scales, promote, "total") / both for scales, promote in (("tile", "never"), ("tensor", 128))
        )
        needed.append((no_promotion >= NEEDED, no_tiles >= NEEDED))
        numbers.append(
            f"{NAMES[data]}: {both:.1e} with both, {no_promotion:.2f} times that without promotion, {no_tiles:.2f} times with "
            "one scale a tensor"
        )
    if all(one and other for one, other in needed):
        verdict = YES
    else:
        verdict = PARTLY if any(one for one, _ in needed) and any(other for _, other in needed) else NO
    return verdict, "; ".join(numbers)


def _apart(rows: Rows) -> tuple[str, str]:
    holds, numbers = [], []
    for data in _kinds(rows["mechanisms"]):
        tile, tensor = (_cell(rows, data, scales, "never", "sum") for scales in ("tile", "tensor"))
        holds.append(tensor <= ALIKE * tile and tile <= ALIKE * tensor)
        numbers.append(f"{NAMES[data]}: sum alone, one chain: {tile:.1e} with tile scales, {tensor:.1e} with one")
    return _verdict(holds), "; ".join(numbers)


def _outliers(rows: Rows) -> tuple[str, str]:
    tile, tensor = ({row["factor"]: row for row in rows["outliers"] if row["scales"] == kind} for kind in ("tile", "tensor"))
    worse = [factor for factor in tile if tensor[factor]["values"] >= ALIKE * tile[factor]["values"]]
    if not worse:
        return NO, f"no outlier up to {max(tile):.0e} doubles the error of the other values"
    first, below = min(worse), [factor for factor in tile if factor < min(worse) and factor > 1]
    at = tensor[first]
    numbers = (
        f"an outlier {first:,.0f} times larger flushes {_percent(at['flushed'])} of the other values to zero under one scale "
        f"({_percent(tile[first]['flushed'])} with tiles), and makes their error {at['values']:.1e} "
        f"({tile[first]['values']:.1e})"
    )
    if below:
        ratio = max(tensor[factor]["values"] / tile[factor]["values"] for factor in below)
        numbers += f"; up to {max(below):,.0f} times larger, one scale has at most {ratio:.2f} times the error of tiles"
    return (PARTLY if below else YES), numbers


def _two_percent(rows: Rows) -> tuple[str, str]:
    row = rows["extremes"][0]
    near_largest, near_rms = (abs(row[name] / 0.02 - 1) <= NEAR for name in ("largest", "rms"))
    numbers = (
        f"{NAMES[row['data']]}, K = {row['k']}, {row['samples']:,} outputs: largest error over their rms "
        f"{_percent(row['largest'])}, relative rms error {_percent(row['rms'])}"
    )
    return (YES if near_rms else PARTLY if near_largest else NO), numbers


def _loss(rows: Rows) -> tuple[str, str]:
    return OPEN, "the study sums and casts, it trains nothing; compare runs under no_promotion and rowwise for that"


CLAIMS = (
    Claim(
        "longer chains drift further",
        "The partial sum strays further from the exact one the longer the chain is, at every length.",
        f"rms error of one chain never falls below {STEP_BACK:g} of its value at half the K, and grows {GROWTH:g} times or "
        "more from the shortest to the longest K; in part: for one kind of data",
        _grows,
    ),
    Claim(
        "the error is biased",
        "The error of every step points one way and accumulates; it does not cancel as random errors do.",
        f"at the longest K one factor common to all outputs explains at least {_percent(SYSTEMATIC)} of the "
        "squared error of one chain; in part: for one kind of data",
        _biased,
    ),
    Claim(
        "short mantissas are the cause",
        "Each addition rounds to few bits, and that alone makes the sum drift.",
        f"with the same bits but additions rounded to nearest instead of truncated, at least {ROUNDED:g} of the rms error of "
        "one chain is left; in part: for one kind of data",
        _truncation,
    ),
    Claim(
        "promotion every 128 bounds it",
        "Moving the partial sum into FP32 every 128 products restarts the error, so that it no longer grows with K.",
        f"over all K the promoted rms error stays within a factor of {LEVEL:g}, and at the longest K it is {CUT:g} times or "
        "more below that of one chain",
        _promotion,
    ),
    Claim(
        "real operands drift too",
        "Inner products of a V3-like model are long enough for the drift to matter.",
        f"every sum of the checkpoint with K >= {LONG} has {GROWTH:g} times the rms error or more when it is not promoted, and "
        f"the worst of them at least {MATTERS:g} of the error that quantization makes; in part: only the former, or for "
        "some of them",
        _real,
    ),
    Claim(
        "tile scales contain outliers",
        "An outlier spoils the FP8 codes of everything that shares its scale, so scales have to be fine.",
        f"with one scale the error of the values that are no outliers is {ALIKE:g} times that with tiles; in part: only from "
        "some size of the outlier on",
        _outliers,
    ),
    Claim(
        "both mechanisms are needed",
        "Fine scales without promotion fail in the sum, promotion without fine scales fails in the cast.",
        f"for every kind of data, leaving either out multiplies the error of the product by {NEEDED:g} or more; in part: each "
        "of them does for some kind",
        _both,
    ),
    Claim(
        "they act on different errors",
        "Fine scales act on what enters the sum, not on its drift.",
        f"with tile scales the error of the unpromoted sum is at most {ALIKE:g} times what it is with one scale, and at least "
        f"1/{ALIKE:g} of it; in part: for some kinds of data",
        _apart,
    ),
    Claim(
        "nearly 2 % at K = 4096",
        "A sum over 4096 products is off by nearly 2 % (the DeepSeek-V3 report, which the draft explains).",
        f"the relative rms error of N(0,1) sums is within {_percent(NEAR)} of 2 %; in part: only the "
        "largest error over the rms of the outputs is",
        _two_percent,
    ),
    Claim(
        "the drift shows in the loss",
        "With long inner products the drift becomes visible in the training loss.",
        "needs training runs",
        _loss,
    ),
)  # fmt: skip

NAMES = {"uniform": "U(0,1)", "normal": "N(0,1)", "outliers": "N(0,1) with an outlier channel"}


def _verdict(holds: Sequence[bool]) -> str:
    return YES if all(holds) else PARTLY if any(holds) else NO


def _kinds(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["data"] for row in rows))


def _chain(rows: Rows, data: str, promote: Any) -> list[Row]:
    """Emulated sums of one kind of data and promotion, by K."""
    return [row for row in rows["length"] if (row["data"], row["where"], row["promote"]) == (data, "emulated", promote)]


def _cell(rows: Rows, data: str, scales: str, promote: Any, error: str) -> float:
    wanted = (data, scales, promote)
    return next(row[error]["rms"] for row in rows["mechanisms"] if (row["data"], row["scales"], row["promote"]) == wanted)
