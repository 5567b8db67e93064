"""The error of sums of real operands: activations, weights and gradients of a checkpoint's last layer."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from dsv3fp8.observe.drift.capture import Captured, capture
from dsv3fp8.observe.drift.errors import measure
from dsv3fp8.observe.drift.study import Row, Study
from dsv3fp8.observe.drift.sums import emulated_block_scaled, on_chip_too
from dsv3fp8.precision.tiles import QuantizedTensor

SIDE = 128  # rows and columns taken of each product
# Scales constant along K leave the interval free; tiles are promoted every 128 at most.
WAYS = (("rowwise", "never"), ("rowwise", 128), ("dsv3", 128))


def operands(study: Study) -> list[Row]:
    """Rows by linear, GEMM, recipe and promotion; none without a run.

    Errors are of the emulated sums. gpu: on a Hopper GPU, the backend and the share of its outputs that equal them.
    """
    if study.run is None:
        return []
    rows = []
    taken = {recipe: capture(study.run, recipe, study.size.tokens, study.device) for recipe in ("rowwise", "dsv3")}
    for key, found in taken["rowwise"].items():
        for recipe, promote in WAYS:
            source: Captured | None = taken[recipe].get(key)
            if source is None or not (wanted := _product_exactly(source)):
                continue
            a, b, want = wanted
            got = emulated_block_scaled(a, b, promote)
            rows.append(
                {
                    "linear": found.op, "gemm": found.gemm, "k": a.shape[1], "recipe": recipe, "promote": promote,
                    "samples": want.numel(), **measure(got, want).to_dict(),
                    "gpu": on_chip_too(a, b, promote, got),
                }
            )  # fmt: skip
    return rows


def _product_exactly(found: Captured) -> tuple[QuantizedTensor, QuantizedTensor, Tensor] | None:
    """Some rows of both operands and their product in float64; None where it is all zero or not finite."""
    a, b = (_first_rows(x) for x in (found.a, found.b))
    want = a.decode().double() @ b.decode().double().mT
    return (a, b, want) if bool(want.isfinite().all()) and bool(want.any()) else None


def _first_rows(x: QuantizedTensor) -> QuantizedTensor:
    """At most SIDE rows, of the first part."""
    return replace(x.rows(0, min(SIDE, x.shape[0] // x.row_parts)), row_parts=1)
