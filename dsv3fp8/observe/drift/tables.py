"""The study's rows as tables of text: one list for the terminal and the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsv3fp8.observe.drift.claims import NAMES
from dsv3fp8.observe.drift.study import Row
from dsv3fp8.observe.drift.sums import promotion_name
from dsv3fp8.observe.output import pipe_table


@dataclass(frozen=True)
class Table:
    """name: of the experiment it shows. note: what the columns mean, one sentence or two."""

    name: str
    title: str
    note: str
    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def markdown(self) -> str:
        """A pipe table."""
        return pipe_table(self.heads, self.rows)


def tables_of(data: Mapping[str, Any]) -> list[Table]:
    """Every table of a study's JSON; those without rows are left out."""
    rows = data["rows"]
    found = [
        *_length(rows["length"]), _interval(rows["interval"]), _extremes(rows["extremes"]), _cause(rows["cause"]),
        _operands(rows["operands"]), _mechanisms(rows["mechanisms"]), _outliers(rows["outliers"]), _casts(rows["casts"]),
        _gradient_scales(rows["gradient_scales"]), _known(data["known"]),
    ]  # fmt: skip
    return [table for table in found if table.rows]


_SUMS = (
    "rms: relative Frobenius error against float64 of the decoded operands. max: the largest error over the outputs' rms. "
    "signed: Σ e · sign(y) / Σ |y|, below 0 where results are too small. bias: the share of the squared error that one factor "
    "common to all outputs explains."
)
_COLUMNS = {"rms": "rms", "largest": "max", "signed": "signed", "common": "bias"}


def _length(rows: Sequence[Row]) -> Iterator[Table]:
    for kind, mine in _grouped(rows, "data"):
        for where, title in (("emulated", "emulated"), ("gpu", "on the GPU")):
            ways = list(dict.fromkeys(row["way"] for row in mine if row["where"] == where))
            columns = _COLUMNS if where == "emulated" else {"rms": "rms", "signed": "signed", "equal": "equal"}
            heads = ("K", "outputs", *(f"{_short(way)}: {name}" for way in ways for name in columns.values()))
            lines = []
            for k, same in _grouped(mine, "k"):
                by_way = {row["way"]: row for row in same}
                cells = [_cell(column, by_way[way][column]) for way in ways for column in columns]
                lines.append((str(k), f"{same[0]['samples']:,}", *cells))
            note = _SUMS if where == "emulated" else f"{_equal([row for row in mine if row['where'] == where])} {_SUMS}"
            if ways:
                yield Table("length", f"Error against K, {NAMES[kind]}, {title}", note, heads, lines)


def _equal(rows: Sequence[Row]) -> str:
    """Which emulated sums the ways of a table are compared with."""
    parts = [
        f"{' and '.join(way for way, _ in _grouped(same, 'way'))} with sums {promotion_name(promote)}"
        for promote, same in _grouped(rows, "against")
    ]
    return f"equal: share of outputs that equal the emulated ones in every bit, {'; '.join(parts)}."


def _interval(rows: Sequence[Row]) -> Table:
    kinds, on_gpu = [kind for kind, _ in _grouped(rows, "data")], any(row["where"] == "gpu" for row in rows)
    heads = ["promoted every"]
    for kind in kinds:
        heads += [f"{NAMES[kind]}: {name}" for name in _COLUMNS.values()]
        heads += [f"{NAMES[kind]}, GPU: {name}" for name in ("rms", "equal")] if on_gpu else []
    lines = []
    for promote, same in _grouped(rows, "promote"):
        cells = [str(promote)]
        for kind in kinds:
            by_where = {row["where"]: row for row in same if row["data"] == kind}
            cells += [_cell(column, by_where["emulated"][column]) for column in _COLUMNS]
            cells += [_cell(column, by_where.get("gpu", {}).get(column)) for column in ("rms", "equal")] if on_gpu else []
        lines.append(tuple(cells))
    title = f"Error against the promotion interval, K = {rows[0]['k']}" if rows else ""
    note = f"equal: share of outputs that equal the emulated ones beside them in every bit. {_SUMS}" if on_gpu else _SUMS
    return Table("interval", title, note, tuple(heads), lines)


def _extremes(rows: Sequence[Row]) -> Table:
    heads = ("data", "K", "outputs a draw", *_COLUMNS.values(), "max: its scatter over draws")
    lines = [
        (NAMES[r["data"]], str(r["k"]), f"{r['samples']:,}", *(_cell(c, r[c]) for c in _COLUMNS), _cell("rms", r["scatter"]))
        for r in rows
    ]
    note = "What a sum of zero-mean products can be off by at worst, and what it is off by as a rule"
    note += f"; emulated, means over {rows[0]['draws']} draws." if rows else "."
    return Table("extremes", "The largest error of one chain", note, heads, lines)


def _cause(rows: Sequence[Row]) -> Table:
    heads = ("data", "K", "outputs", "additions", *_COLUMNS.values())
    names = {"truncate": "truncated, as the chip does", "nearest": "rounded to nearest"}
    lines = [
        (NAMES[r["data"]], str(r["k"]), f"{r['samples']:,}", names[r["rounding"]], *(_cell(c, r[c]) for c in _COLUMNS))
        for r in rows
    ]
    note = "The same chain with the same 13 fraction bits, emulated in float64; no hardware rounds it to nearest."
    return Table("cause", "Few bits, or bits cut off? One chain, not promoted", note, heads, lines)


def _operands(rows: Sequence[Row]) -> Table:
    columns = (
        (("rowwise", "never"), "one chain", ("rms", "largest", "signed", "common")),
        (("rowwise", 128), "every 128", ("rms", "signed", "common")),
        (("dsv3", 128), "tiles, every 128", ("rms", "signed")),
    )
    backends = _backends(rows)
    heads = ["linear", "GEMM", "K"]
    for _, name, shown in columns:
        heads += [f"{name}: {_COLUMNS[c]}" for c in shown] + ([f"{name}, GPU: equal"] if backends else [])
    lines = []
    for (linear, gemm), same in _grouped(rows, "linear", "gemm"):
        by_way = {(row["recipe"], row["promote"]): row for row in same}
        cells = []
        for way, _, shown in columns:
            row = by_way.get(way, {})
            cells += [_cell(c, row.get(c)) for c in shown] + ([_equal_cell(row)] if backends else [])
        lines.append((linear, gemm, str(same[0]["k"]), *cells))
    note = (
        "Operands of the checkpoint's last layer, as its kernels read them: under recipe rowwise, whose scales leave the "
        "interval free, and under dsv3. 128 rows by 128 columns of each product. K of a wgrad is tokens, and of an expert's "
        f"those routed to it under rowwise, without padding. {_measured(backends)}"
    )
    return Table("operands", "Sums of a checkpoint's own operands", note, tuple(heads), lines)


def _mechanisms(rows: Sequence[Row]) -> Table:
    heads = ["data", "scales", "promotion", "product: rms", "product: max", "sum: rms", "sum: signed", "reachable on the chip"]
    backends = _backends(rows)
    heads += ["GPU: equal"] if backends else []
    lines = [
        (
            NAMES[r["data"]], r["scales"], promotion_name(r["promote"]), _cell("rms", r["total"]["rms"]),
            _cell("largest", r["total"]["largest"]), _cell("rms", r["sum"]["rms"]), _cell("signed", r["sum"]["signed"]),
            "yes" if r["reachable"] else "no", *([_equal_cell(r)] if backends else []),
        )
        for r in rows
    ]  # fmt: skip
    note = (
        "product: error against float64 of the values before quantization. sum: its error alone, against float64 of the "
        "decoded operands. All scales are powers of two. The tensor core has no place to apply tile scales inside a chain; "
        "that cell is defined by products that carry their scales into the chain, where powers of two move exponents only. "
        f"{_measured(backends)}"
    )
    sizes = {row["outlier"] for row in rows if row["outlier"]}
    note += "".join(f" The outlier channel is {size:,.0f} times larger than the others." for size in sizes)
    title = f"Tile scales and promotion apart, K = {rows[0]['k']}" if rows else ""
    return Table("mechanisms", title, note, tuple(heads), lines)


def _outliers(rows: Sequence[Row]) -> Table:
    columns = {"flushed": "flushed to zero", "values": "error of values", "output": "error of product"}
    heads = ("outlier", *(f"{kind} scales: {name}" for kind in ("tile", "tensor") for name in columns.values()))
    lines = []
    for factor, same in _grouped(rows, "factor"):
        by_kind = {row["scales"]: row for row in same}
        cells = [_cell(column, by_kind[kind][column]) for kind in ("tile", "tensor") for column in columns]
        lines.append((f"{factor:,.0f}×", *cells))
    note = (
        "One channel of K is so many times larger than N(0,1), and the weights that read it as much smaller. flushed to zero, "
        "error of values: of the activations outside that channel. "
        "error of product: against float64 of the values before quantization, its sum emulated and promoted every 128."
    )
    return Table("outliers", "An outlier channel under tile and tensor scales", note, heads, lines)


def _casts(rows: Sequence[Row]) -> Table:
    heads = ("cast", "values", "changed by the second step", "error after one step", "error at the end")
    lines = [
        (r["cast"], f"{r['samples']:,}", *("" if r[c] is None else _share(r[c]) for c in ("changed", "before", "after")))
        for r in rows
    ]
    note = "BF16 N(0,1). The last line: one cast of an operand, then the product of two, summed in float64."
    return Table("casts", "Double rounding and re-tiling", note, heads, lines)


def _gradient_scales(rows: Sequence[Row]) -> Table:
    heads = ("scales", "error a token", "its scatter over draws", "tokens with error above 0.5", "error overall")
    lines = [
        (r["scales"], f"{r['token']:.3f}", f"{r['scatter']:.3f}", _share(r["lost"]), _share(r["overall"])) for r in rows
    ]  # fmt: skip
    drawn = f"means over {rows[0]['draws']} draws of {rows[0]['tokens']:,} tokens" if rows else ""
    note = f"E4M3 gradients, N(0,1) times a token's size, which is log-normal with σ = 3; {drawn}."
    return Table("gradient_scales", "Gradient scales over tokens of unequal size", note, heads, lines)


def _known(rows: Sequence[Row]) -> Table:
    heads = ("figure", "known", "ours", "ours / known", "within 20 %")
    lines = []
    for r in rows:
        if r["ours"] is None:
            continue
        known = f"{r['theirs']:.3g}" + (" (emulated)" if r["emulated"] else "")
        ours = f"{r['ours']:.3g}" + (f" ± {r['scatter']:.2g}" if r["scatter"] is not None else "")
        lines.append((r["what"], known, ours, f"{r['ratio']:.2f}", "yes" if r["within"] else "**no**"))
    note = (
        "Known figures measured on an H200 (2026-11-29; torch 2.11, Triton 3.6). ±: the scatter of single draws around our "
        "mean; how many draws a known figure is of was not recorded."
    )
    return Table("known", "Known figures, reproduced", note, heads, lines)


def _backends(rows: Sequence[Row]) -> str:
    """The backends that summed these rows on a GPU too; empty without one."""
    return ", ".join(dict.fromkeys(row["gpu"]["backend"] for row in rows if row["gpu"]))


def _measured(backends: str) -> str:
    """Where a table's sums were computed."""
    if not backends:
        return "All sums here are emulated."
    return (
        f"All errors here are of emulated sums. GPU: the same operands, summed by the chip (backend {backends}); "
        "equal: share of outputs that equal the emulated ones in every bit."
    )


def _equal_cell(row: Row) -> str:
    return _cell("equal", row["gpu"]["equal"] if row.get("gpu") else None)


def _grouped(rows: Sequence[Row], *names: str) -> list[tuple[Any, list[Row]]]:
    """(value, rows that have it) in order of appearance; a tuple of values for several names."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(row[names[0]] if len(names) == 1 else tuple(row[n] for n in names), []).append(row)
    return list(found.items())


def _short(way: str) -> str:
    return {"emulated, not promoted": "one chain", "emulated, promoted every 128": "every 128"}.get(way, way)


def _cell(column: str, value: float | None) -> str:
    write: dict[str, Callable[[float], str]] = {
        "signed": lambda v: f"{v:+.1e}", "common": lambda v: f"{v:.3f}", "equal": _whole_share, "flushed": _share,
    }  # fmt: skip
    return "" if value is None else write.get(column, lambda v: f"{v:.2e}")(value)


def _whole_share(value: float) -> str:
    """A share that is 100 % only where it is all."""
    text = _share(value)
    return f"< {text}" if value < 1 and text == "100 %" else text


def _share(value: float) -> str:
    return f"{100 * value:.3g} %"
