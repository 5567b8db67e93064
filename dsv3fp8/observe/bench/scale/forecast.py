"""What `plan` says of a layout, under the names by which a step's traffic is counted."""

from __future__ import annotations

from typing import Any

from dsv3fp8.config import load_config
from dsv3fp8.errors import UserError
from dsv3fp8.observe.bench.scale.traffic import GATHER, REDUCE, SCATTER
from dsv3fp8.observe.plan.command import describe, planned
from dsv3fp8.observe.plan.config import PlanConfig
from dsv3fp8.observe.plan.memory import memory

PREFIXES = {"gather ": GATHER, "reduce-scatter ": SCATTER, "all-reduce ": REDUCE}


def forecast(words: list[str], imbalance: float) -> dict[str, Any]:
    """Bytes and seconds: allocated by a GPU at the fullest moment, payload by what is carried, and time of a step.

    words: the settings of a run, its layout among them. imbalance: rows of the GPU that receives most, over the mean.
    """
    settings = load_config(words)
    config = PlanConfig(parallel=settings.parallel, imbalance=imbalance)
    plan = planned(config, settings)
    used = memory(plan)
    try:
        found = describe(config, settings, plan, used, [])
    except UserError as error:  # recipes of which no rate was measured
        return {"failed": str(error)}
    payload: dict[str, int] = {}
    for transfer in found["wire"]:
        what = next((name for prefix, name in PREFIXES.items() if transfer["what"].startswith(prefix)), transfer["what"])
        payload[what] = payload.get(what, 0) + transfer["payload"]
    time = found["time"]
    return {
        "failed": "", "memory": used.total, "peak": used.peak, "moment": used.moment, "payload": payload,
        "seconds": time["step"], "wire_seconds": time["hidden"] + time["exposed"], "exposed_seconds": time["exposed"],
        "tokens_per_second": time["tokens_per_second"], "imbalance": imbalance,
    }  # fmt: skip
