"""What makes the drift: few bits, or that they are cut off? The same chain, truncating and rounding to nearest."""

from __future__ import annotations

from dsv3fp8.observe.drift.chain import Rounding, chain
from dsv3fp8.observe.drift.errors import measure
from dsv3fp8.observe.drift.experiments.length import DATA, MIDDLE, exact
from dsv3fp8.observe.drift.study import Row, Study
from dsv3fp8.observe.drift.sums import unscaled

ROUNDINGS: tuple[Rounding, ...] = ("truncate", "nearest")


def cause(study: Study) -> list[Row]:
    """Rows by data, K and rounding; never promoted."""
    longest = min(MIDDLE, study.size.longest)
    rows: list[Row] = []
    for data in DATA:
        for k in (longest // 16, longest):
            generator = study.generator(f"cause {data} {k}")
            side = min(study.outputs(k), 32)
            a, b = study.codes(data, side, k, generator), study.codes(data, side, k, generator)
            want = exact(a, b)
            for rounding in ROUNDINGS:
                error = measure(chain(unscaled(a), unscaled(b), rounding), want)
                rows.append({"data": data, "k": k, "rounding": rounding, "samples": side * side, **error.to_dict()})
    return rows
