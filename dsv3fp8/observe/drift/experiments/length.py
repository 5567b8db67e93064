"""The error of a sum against K, against the promotion interval, and the largest error among many outputs."""

from __future__ import annotations

from statistics import mean, pstdev

from torch import Tensor

from dsv3fp8.observe.drift.errors import measure
from dsv3fp8.observe.drift.study import Row, Study
from dsv3fp8.observe.drift.sums import Promotion, Way, emulated_products, emulation, equal_share, on_chip
from dsv3fp8.precision.formats import E4M3, decode

DATA = ("uniform", "normal")
INTERVALS = (32, 64, 128, 256, 512, 1024, 2048, 4096, "never")
DRAWS = 4  # of the largest error, which differs from draw to draw
MIDDLE = 4096  # the K of everything that is not drawn against K


def against_length(study: Study) -> list[Row]:
    """Rows by data, K (doubled from 128 on) and way."""
    rows = []
    for data in DATA:
        k = 128
        while k <= study.size.longest:
            a, b = _operands(study, data, k)
            rows += _compared(list(study.sums.ways), a, b, data)
            k *= 2
    return rows


def against_interval(study: Study) -> list[Row]:
    """Rows by data and promotion interval, emulated and, where there is one, on the GPU."""
    k = min(MIDDLE, study.size.longest)
    on_gpu = any(way.where == "gpu" for way in study.sums.ways)
    rows: list[Row] = []
    for data in DATA:
        a, b = _operands(study, data, k)
        for interval in INTERVALS:
            if interval == "never" or int(interval) <= k:
                way = on_chip(interval, study.device)[0] if on_gpu else None
                rows += _compared([emulation(interval), *([way] if way else [])], a, b, data)
    return rows


def extremes(study: Study) -> list[Row]:
    """The largest error of N(0,1) sums that are not promoted: it takes many outputs to meet a large one.

    One row of means over draws, each of `samples` outputs. scatter: of the largest error, its standard deviation over draws.
    """
    k, side = min(MIDDLE, study.size.longest), study.size.extreme
    generator = study.generator("extremes")
    draws = []
    for _ in range(DRAWS):
        a, b = study.codes("normal", side, k, generator), study.codes("normal", side, k, generator)
        draws.append(measure(emulated_products(a, b, "never"), exact(a, b)).to_dict())
    means = {name: mean(draw[name] for draw in draws) for name in draws[0]}
    scatter = pstdev(draw["largest"] for draw in draws)
    return [{"data": "normal", "k": k, "samples": side * side, "draws": DRAWS, **means, "scatter": scatter}]


def exact(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] @ b [N, K]^T of E4M3 codes in float64, where such products and sums are exact."""
    return decode(a, E4M3).double() @ decode(b, E4M3).double().mT


def _operands(study: Study, data: str, k: int) -> tuple[Tensor, Tensor]:
    generator, side = study.generator(f"{data} {k}"), study.outputs(k)
    return study.codes(data, side, k, generator), study.codes(data, side, k, generator)


def _compared(ways: list[Way], a: Tensor, b: Tensor, data: str) -> list[Row]:
    """A row per way; `equal` is the share of outputs that equal those emulated with promotion `against` in every bit."""
    want = exact(a, b)
    emulated: dict[Promotion, Tensor] = {}
    rows = []
    for way in ways:
        got = way.products(a, b)
        twin = emulated.get(way.against)
        if way.where == "emulated":
            emulated[way.against] = got
        equal = None if way.where == "emulated" or twin is None else equal_share(got, twin)
        rows.append(
            {
                "data": data, "k": a.shape[1], "way": way.name, "where": way.where, "promote": way.promote,
                "against": way.against, "samples": want.numel(), **measure(got, want).to_dict(), "equal": equal,
            }
        )  # fmt: skip
    return rows
