"""Figures of this study that were measured before, on other code, and how near ours come.

Source: one NVIDIA H200, torch 2.11, Triton 3.6, 2026-11-29; where marked, by emulation of its tensor core. Errors of sums are
relative Frobenius errors against float64, tensor scale 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsv3fp8.observe.drift.study import Row

WITHIN = 0.20
SOURCE = "known figures measured on one NVIDIA H200 (torch 2.11, Triton 3.6, 2026-11-29)"

SPLIT = (
    "With fast accumulation cuBLASLt splits a long K into shorter chains, into how many depends on the shape of the product. "
    "The known figures are of K in three parts, of products whose shape was not recorded"
)
DRAWN = "How tokens of unequal size were drawn for the known figure, and how often, was not recorded"


@dataclass(frozen=True)
class Known:
    """One figure: what it is, its value, and where ours stands: an experiment, the fields that choose its row, the column.

    conditions: what else it depends on, said where it is not met.
    """

    what: str
    value: float
    experiment: str
    where: Mapping[str, Any]
    column: str
    emulated: bool = False
    conditions: str = ""


def _sums() -> list[Known]:
    """Errors of sums over K, by data and way."""
    lengths = (1024, 4096, 16384, 65536)
    never, promoted = {"where": "emulated", "promote": "never"}, {"where": "emulated", "promote": 128}
    chip, chip_promoted = {"where": "gpu", "promote": "never"}, {"where": "gpu", "promote": 128}
    library = {"way": "cuBLASLt, fast accumulation"}
    lines = (
        ("uniform", "U(0,1), one chain", (1.4e-2, 6.6e-2, 2.5e-1, 5.5e-1), never, chip),
        ("uniform", "U(0,1), promoted every 128", (5.0e-4,) * 4, promoted, chip_promoted),
        ("normal", "N(0,1), one chain", (5.4e-4, 1.3e-3, 3.4e-3, 7e-3), never, chip),
        ("normal", "N(0,1), promoted every 128", (1.3e-4,) * 4, promoted, chip_promoted),
        ("uniform", "U(0,1), cuBLASLt", (1.4e-2, 6.6e-2, 9.6e-2, 2.9e-1), None, library),
        ("normal", "N(0,1), cuBLASLt", (5.4e-4, 1.3e-3, 1.6e-3, 3.7e-3), None, library),
    )
    found = []
    for data, what, values, emulated, gpu in lines:
        for k, value in zip(lengths, values, strict=True):
            beyond = "one chain" in what and k > 4096
            for side, choose in (("emulated", emulated), ("GPU", gpu)):
                if choose is not None:
                    where = {"data": data, "k": k, **choose}
                    conditions = SPLIT if choose is library else ""
                    found.append(Known(f"{what}, K {k}, {side}", value, "length", where, "rms", beyond, conditions))
    return found


KNOWN: tuple[Known, ...] = (
    *_sums(),
    *(
        Known(f"N(0,1), K 4096, promoted every {n}", value, "interval", {"data": "normal", "where": "emulated", "promote": n},
              "rms", emulated=True)
        for n, value in ((32, 4.6e-5), (64, 7.6e-5), (128, 1.3e-4), (256, 2.1e-4), (512, 3.4e-4))
    ),
    Known("N(0,1), K 4096, one chain: max|error| / rms", 1.9e-2, "extremes", {"data": "normal"}, "largest", emulated=True),
    Known("N(0,1), 1×128 · 128×128: error of quantization", 3.7e-2, "casts",
          {"cast": "product of 1×128 and 128×128, fp32 scales"}, "after"),
    Known("E4M3 by way of E5M6: codes changed", 6.3e-2, "casts", {"cast": "BF16 → E5M6 → E4M3, pow2 scales"}, "changed"),
    Known("re-tiled, fp32 scales: values changed", 0.98, "casts", {"cast": "1×128 → 128×1, fp32 scales"}, "changed"),
    Known("re-tiled, fp32 scales: error before", 2.6e-2, "casts", {"cast": "1×128 → 128×1, fp32 scales"}, "before"),
    Known("re-tiled, fp32 scales: error after", 3.6e-2, "casts", {"cast": "1×128 → 128×1, fp32 scales"}, "after"),
    Known("tokens of σ 3, 128×128 scales: error a token", 0.185, "gradient_scales", {"scales": "128×128"}, "token",
          conditions=DRAWN),
    Known("tokens of σ 3, 1×128 scales: error a token", 0.026, "gradient_scales", {"scales": "1×128"}, "token",
          conditions=DRAWN),
    Known("tokens of σ 3, one scale: error a token", 0.43, "gradient_scales", {"scales": "one scale"}, "token",
          conditions=DRAWN),
)  # fmt: skip


def compare(rows: Mapping[str, Sequence[Row]]) -> list[Row]:
    """A row per known figure: ours (None where this machine has no such row), theirs, their ratio, and whether within 20 %.

    scatter: where ours is a mean over draws that differ much, their standard deviation.
    """
    found = []
    for known in KNOWN:
        matching = [row for row in rows[known.experiment] if all(row[name] == value for name, value in known.where.items())]
        ours = matching[0][known.column] if matching else None
        ratio = None if ours is None else ours / known.value
        found.append(
            {
                "what": known.what, "theirs": known.value, "emulated": known.emulated, "ours": ours, "ratio": ratio,
                "within": None if ratio is None else abs(ratio - 1) <= WITHIN,
                "conditions": known.conditions, "outputs": matching[0].get("samples") if matching else None,
                "scatter": matching[0].get("scatter") if matching else None,
            }
        )  # fmt: skip
    return found
