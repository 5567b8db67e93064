"""Measured rates that a planned step is timed with, and where they come from.

A whole layer is timed, not its best kernels: what runs between GEMMs, and the time in which nothing runs, are in the rates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv3fp8.errors import UserError
from dsv3fp8.observe.bench.roofline import byte_passes
from dsv3fp8.observe.kept_bytes import block_config
from dsv3fp8.observe.plan.work import attention_work, block_work
from dsv3fp8.precision.recipe import Recipe

MEASURED_LAYER = "v3_671b", 4096
"""The model whose MoE layer `bench layer` times, with 8 experts, and its tokens."""


@dataclass(frozen=True)
class Rates:
    """gemm, attention: TFLOP/s of forward and backward. passes: GB/s at which the bytes of dsv3's ops between GEMMs pass."""

    gemm: float
    attention: float
    passes: float


# docs/results/fast_h200/layer.json, 2026-11-30, as `layer_rates` reads it.
H200 = {
    "dsv3": Rates(gemm=999.8, attention=373.4, passes=2675.4),
    "bf16": Rates(gemm=669.0, attention=371.4, passes=3577.4),
}
SOURCE = "one V3 layer of 4,096 tokens on an H200 (docs/results/fast_h200)"

COPY = 4245.0
"""GB/s read and written of a copy on an H200 (the median of docs/results/fast_h200/kernels.json)."""
NVLINK, NETWORK = 229.0, 50.0
"""GB/s a direction and GPU: NCCL's sum of gradients behind backward over two H200s (docs/results/many_gpus_h200; 450 on the
data sheet of NVLink 4), and an adapter of 400 Gbit/s for each GPU, of a data sheet: no network is measured yet."""


def layer_rates(data: Mapping[str, Any], recipe: str) -> Rates:
    """Of a page of `dsv3fp8 bench layer`, by what kinds of kernels its layer spent its time on."""
    name, tokens = MEASURED_LAYER
    config, found = block_config(name), data["breakdowns"][recipe]
    kinds = {kind: entry["ms"] / 1e3 / found["busy_share"] for kind, entry in found["kinds"].items()}
    gemm, attention = kinds.pop("GEMM"), kinds.pop("attention")
    return Rates(
        gemm=block_work(config, tokens, float(tokens * config.top_k)) / gemm / 1e12,
        attention=attention_work(config, tokens, tokens) / attention / 1e12,
        passes=sum(byte_passes(config, tokens).values()) / sum(kinds.values()) / 1e9,
    )


def family(recipe: Recipe) -> str:
    """The measured recipe that stands for this one."""
    return "dsv3" if recipe.quantizes else "bf16"


def rates_of(layer: str | None, recipe: Recipe) -> tuple[dict[str, Rates], str]:
    """(rates of `dsv3` and `bf16`, their source): of a layer.json, else those of the committed page."""
    if layer is None:
        return H200, SOURCE
    path = Path(layer).expanduser()
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return {name: layer_rates(data, name) for name in {"bf16", family(recipe)}}, str(path)
    except OSError as error:
        raise UserError(f"layer={path}: {error.strerror}; give the layer.json of `dsv3fp8 bench layer`") from error
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise UserError(
            f"layer={path}: no breakdown of {family(recipe)} and bf16 in it; give the layer.json of `dsv3fp8 bench layer`"
        ) from error
