"""The figures of a row, from what each of its ranks has told."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from dsv3fp8.observe.bench.scale.launch import Outcome
from dsv3fp8.observe.bench.scale.traffic import DISPATCH, Call, summary
from dsv3fp8.observe.bench.scale.wire import by_what, over_ranks


def layout_figures(outcome: Outcome, modes: Sequence[str], tokens: int) -> dict[str, Any]:
    """As far as all ranks came. tokens: of a step, on all ranks."""
    found: dict[str, Any] = {"modes": {}, "traffic": {}, "imbalance": None, "wire": {}, "by_what": {}}
    for mode in modes:
        if (told := outcome.all_told(mode)) is not None:
            found["modes"][mode] = _steps(told, tokens)
        if (wire := outcome.all_told(f"{mode} wire")) is not None:
            found["wire"][mode] = over_ranks(wire)
    calls: list[list[Call]] | None = outcome.all_told("calls")
    if calls is None:
        return found
    found["traffic"] = over_all(calls)
    arrived = [sum(call.rows for call in rank if call.what == DISPATCH) for rank in calls]
    if any(arrived):
        found["imbalance"] = max(arrived) * len(arrived) / sum(arrived)
    if (wire := outcome.all_told("launched wire")) is not None:
        found["by_what"] = by_what(wire, calls)
    return found


def over_all(calls: Sequence[Sequence[Call]]) -> dict[str, dict[str, float]]:
    """Calls of the first rank, the mean of what the ranks hand over, and the bytes that leave the one that sends most."""
    each = [summary(rank) for rank in calls]
    return {
        what: {
            "calls": entry["calls"],
            "payload": sum(one[what]["payload"] for one in each) / len(each),
            "sent": max(one[what]["sent"] for one in each),
        }
        for what, entry in each[0].items()
    }


def exchange_figures(told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of one size: milliseconds of a call on the slowest rank, and GB/s that leave the one that sends most."""
    found = {}
    for name in told[0]["ways"]:
        ways = [rank["ways"][name] for rank in told]
        samples = [max(samples) for samples in zip(*(way["ms"] for way in ways), strict=True)]
        ms, sent = statistics.median(samples), max(way["sent"] for way in ways)
        found[name] = {"ms": ms, "samples": samples, "sent": sent, "rate": sent / ms / 1e6, "captured": ways[0]["captured"]}
    return {"size": told[0]["size"], "ways": found}


def _steps(told: Sequence[dict[str, Any]], tokens: int) -> dict[str, Any]:
    """The slowest rank's seconds count in each round, and the fullest GPU's bytes."""
    if told[0]["failed"]:
        return {"failed": told[0]["failed"]}
    samples = [max(seconds) for seconds in zip(*(one["seconds"] for one in told), strict=True)]
    seconds = statistics.median(samples)
    return {
        "failed": "", "seconds": seconds, "samples": samples, "tokens_per_second": tokens / seconds,
        "peak": None if told[0]["peak"] is None else max(one["peak"] for one in told),
        "reserved": None if told[0]["reserved"] is None else max(one["reserved"] for one in told),
    }  # fmt: skip
