"""The verdicts follow from rows alone: with other figures they turn."""

from collections.abc import Callable
from typing import Any

import pytest

from dsv3fp8.observe.drift.claims import CLAIMS, NO, OPEN, PARTLY, YES, judge
from dsv3fp8.observe.drift.known import KNOWN, compare
from dsv3fp8.observe.drift.page import known_summary

Rows = dict[str, list[dict[str, Any]]]


def sums(data: str, never: list[float], promoted: list[float], common: float) -> list[dict[str, Any]]:
    def row(k: int, promote: Any, rms: float) -> dict[str, Any]:
        return {"data": data, "where": "emulated", "k": k, "promote": promote, "rms": rms, "signed": -rms, "common": common}

    return [
        row(128 * 4**i, promote, rms)
        for promote, errors in (("never", never), (128, promoted))
        for i, rms in enumerate(errors)
    ]  # fmt: skip


def figures() -> Rows:
    """Figures under which every claim that can be decided is borne out."""
    kinds = ("uniform", "normal")

    def cell(data: str, scales: str, promote: Any) -> dict[str, Any]:
        total = 1e-2 * (1 if promote == 128 else 2) * (1 if scales == "tile" else 3)
        return {
            "data": data, "scales": scales, "promote": promote, "total": {"rms": total},
            "sum": {"rms": 1e-4 if promote == 128 else 1e-2},
        }  # fmt: skip

    return {
        "length": [row for data in kinds for row in sums(data, [1e-4, 1e-3, 1e-2], [1e-4, 1.1e-4, 1e-4], 0.9)],
        "interval": [],
        "extremes": [{"data": "normal", "k": 4096, "samples": 100, "largest": 0.03, "rms": 0.021, "scatter": 0.0}],
        "cause": [
            {"data": data, "k": 4096, "rounding": rounding, "rms": rms}
            for data in kinds for rounding, rms in (("truncate", 1e-3), ("nearest", 9e-4))
        ],
        "operands": [
            {"linear": "out", "gemm": "wgrad", "k": 2048, "recipe": "rowwise", "promote": promote, "rms": rms, "common": 0.1}
            for promote, rms in (("never", 3e-2), (128, 1e-4))
        ],
        "mechanisms": [cell(data, s, p) for data in kinds for s in ("tile", "tensor") for p in (128, "never")],
        "outliers": [
            {"factor": factor, "scales": scales, "flushed": 0.5, "values": 0.03 if scales == "tile" or factor == 1 else 0.3}
            for factor in (1.0, 10.0) for scales in ("tile", "tensor")
        ],
        "casts": [{"cast": "product", "changed": None, "after": 0.037}],
        "gradient_scales": [],
    }  # fmt: skip


def verdicts(rows: Rows) -> dict[str, str]:
    return {claim["name"]: claim["verdict"] for claim in judge(rows)}


def test_figures_that_fit_bear_every_claim_out_but_the_one_that_needs_training() -> None:
    found = verdicts(figures())
    assert found.pop("the drift shows in the loss") == OPEN
    assert set(found.values()) == {YES}
    assert len(found) == len(CLAIMS) - 1 == 9


def change(experiment: str, rule: Callable[[dict[str, Any]], Any]) -> Rows:
    rows = figures()
    for row in rows[experiment]:
        rule(row)
    return rows


def flat(row: dict[str, Any]) -> None:
    row["rms"] = 1e-4


def cut_where_uniform(row: dict[str, Any]) -> None:
    if row["data"] == "uniform":
        row["common"] = 0.01


def seven_times_where_normal(row: dict[str, Any]) -> None:
    if (row["data"], row["scales"]) == ("normal", "tile"):
        row["sum"] = {"rms": 7 * row["sum"]["rms"]}


@pytest.mark.parametrize(
    ("name", "rows", "verdict"),
    [
        ("longer chains drift further", change("length", flat), NO),
        ("longer chains drift further", change("length", lambda r: r.update(rms=r["rms"] / r["k"] ** 2)), NO),
        ("the error is biased", change("length", lambda r: r.update(common=0.01)), NO),
        ("the error is biased", change("length", cut_where_uniform), PARTLY),
        ("short mantissas are the cause", change("cause", lambda r: r["rounding"] == "nearest" and r.update(rms=1e-5)), NO),
        ("promotion every 128 bounds it", change("length", flat), NO),
        ("promotion every 128 bounds it", change("length", lambda r: r.update(rms=r["rms"] * r["k"])), NO),
        ("real operands drift too", change("operands", flat), NO),
        ("real operands drift too", change("operands", lambda r: r.update(rms=r["rms"] / 10)), PARTLY),
        ("real operands drift too", change("operands", lambda r: r.update(k=256)), OPEN),
        ("real operands drift too", {**figures(), "operands": []}, OPEN),
        ("tile scales contain outliers", change("outliers", lambda r: r.update(values=0.03)), NO),
        ("both mechanisms are needed", change("mechanisms", lambda r: r.update(total={"rms": 0.1})), NO),
        ("both mechanisms are needed",
         change("mechanisms", lambda r: r["data"] == "normal" and r.update(total={"rms": 0.1})), PARTLY),
        ("they act on different errors",
         change("mechanisms", lambda r: r["scales"] == "tile" and r.update(sum={"rms": 1e-6})), NO),
        ("they act on different errors",
         change("mechanisms", lambda r: r["scales"] == "tile" and r.update(sum={"rms": 1e-1})), NO),
        ("they act on different errors", change("mechanisms", seven_times_where_normal), PARTLY),
        ("nearly 2 % at K = 4096", change("extremes", lambda r: r.update(rms=1e-3, largest=0.019)), PARTLY),
        ("nearly 2 % at K = 4096", change("extremes", lambda r: r.update(rms=1e-3, largest=0.1)), NO),
    ],
)  # fmt: skip
def test_opposite_figures_turn_a_verdict(name: str, rows: Rows, verdict: str) -> None:
    assert verdicts(rows)[name] == verdict


def test_an_outlier_that_hurts_only_when_huge_is_half_a_claim() -> None:
    rows = figures()
    rows["outliers"] += [
        {"factor": 1e5, "scales": scales, "flushed": 0.5, "values": value}
        for scales, value in (("tile", 0.03), ("tensor", 0.5))
    ]
    rows["outliers"][3]["values"] = 0.03
    (claim,) = [claim for claim in judge(rows) if claim["name"] == "tile scales contain outliers"]
    assert claim["verdict"] == PARTLY
    assert claim["numbers"].startswith("an outlier 100,000 times larger flushes 50 %")


def test_numbers_and_rules_are_said_with_every_verdict() -> None:
    for claim in judge(figures()):
        assert claim["claim"]
        assert claim["rule"]
        assert claim["numbers"]


EMPTY: Rows = {known.experiment: [] for known in KNOWN}
ANY = {known.column: 1.0 for known in KNOWN} | {"way": None, "where": None, "promote": None}


@pytest.mark.parametrize(("factor", "within"), [(1.0, True), (1.19, True), (0.81, True), (1.21, False), (0.79, False)])
def test_a_known_figure_is_met_within_a_fifth(factor: float, within: bool) -> None:
    # A row of its own for every figure: columns of one row come from one measurement.
    found = [
        compare({**EMPTY, known.experiment: [row]})[index]
        for index, known in enumerate(KNOWN)
        for row in [{**ANY, **known.where, known.column: known.value * factor}]
    ]
    assert [row["within"] for row in found] == [within] * len(KNOWN)
    assert all(row["ratio"] == pytest.approx(factor) for row in found)


def test_figures_that_this_machine_cannot_have_are_neither_met_nor_missed() -> None:
    found = compare(EMPTY)
    assert all(row["ours"] is None and row["within"] is None for row in found)
    assert known_summary(found).startswith("0 of 0 ")
