"""The study's figures. Colours of Okabe and Ito, and a marker of its own for every line: no figure needs colour vision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsv3fp8.observe.drift.claims import NAMES
from dsv3fp8.observe.drift.study import Row

BLUE, ORANGE, GREEN, PURPLE, BLACK, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#8A8A8A"
RMS = "relative rms error"


def draw_figures(rows: Mapping[str, Sequence[Row]], out: Path) -> list[str]:
    """Write the PNG files of what has rows to the directory `out`; their names, without .png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = []
    for name, draw in FIGURES.items():
        if rows[name]:
            figure = draw(rows[name], pyplot)
            figure.savefig(out / f"{name}.png", dpi=130)
            pyplot.close(figure)
            drawn.append(name)
    return drawn


def _length(rows: Sequence[Row], pyplot: Any) -> Any:
    figure, (errors, bias) = pyplot.subplots(2, 2, figsize=(10, 7.6), sharex=True, sharey="row", layout="constrained")
    for axes, below, data in zip(errors, bias, ("uniform", "normal"), strict=True):
        for promote, color, marker in (("never", ORANGE, "o"), (128, BLUE, "s")):
            chain = [row for row in rows if (row["data"], row["where"], row["promote"]) == (data, "emulated", promote)]
            k = [row["k"] for row in chain]
            name = "one chain" if promote == "never" else f"promoted every {promote}"
            axes.plot(k, [row["rms"] for row in chain], color=color, marker=marker, label=f"{name}, rms")
            axes.plot(k, [row["largest"] for row in chain], color=color, marker=marker, markersize=3, linestyle=":",
                      label=f"{name}, max / rms of outputs")  # fmt: skip
            below.plot(k, [row["common"] for row in chain], color=color, marker=marker, label=name)
        for index, way in enumerate(dict.fromkeys(row["way"] for row in rows if row["where"] == "gpu")):
            mine = [row for row in rows if (row["data"], row["way"]) == (data, way)]
            style = {"color": (BLACK, GREY, GREEN, PURPLE)[index % 4], "marker": "D^vX"[index % 4], "markersize": 9}
            k, errors_of = [row["k"] for row in mine], [row["rms"] for row in mine]
            axes.plot(k, errors_of, linestyle="none", markerfacecolor="none", label=f"{way}, rms", **style)
        axes.set(title=NAMES[data], xscale="log", yscale="log")
        axes.set_xscale("log", base=2)
        below.set(ylim=(-0.03, 1.03), xlabel="K, products in a sum")
    errors[0].set_ylabel("error relative to the outputs")
    bias[0].set_ylabel("share of squared error\nthat one common factor explains")
    for axes in (*errors, *bias):
        axes.grid(alpha=0.3)
    handles, labels = errors[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3 if len(labels) > 4 else 2, fontsize=8)
    figure.suptitle("Error of a sum of K products against float64, and how much of it is bias")
    return figure


def _interval(rows: Sequence[Row], pyplot: Any) -> Any:
    figure, axes = pyplot.subplots(figsize=(7, 4.4), layout="constrained")
    names = list(dict.fromkeys(str(row["promote"]) for row in rows))
    for data, color, marker in (("uniform", ORANGE, "o"), ("normal", BLUE, "s")):
        for where in ("emulated", "gpu"):
            mine = [row for row in rows if (row["data"], row["where"]) == (data, where)]
            style: dict[str, Any] = {"linestyle": "none", "markersize": 10, "markerfacecolor": "none"} if where == "gpu" else {}
            if mine:
                at = [names.index(str(row["promote"])) for row in mine]
                label = f"{NAMES[data]}{', GPU' if where == 'gpu' else ''}"
                axes.plot(at, [row["rms"] for row in mine], color=color, marker="D" if style else marker, label=label, **style)
    axes.set_xticks(range(len(names)), names)
    axes.set(yscale="log", xlabel="promoted every … products", ylabel=RMS)
    axes.set_title(f"Error against the promotion interval, K = {rows[0]['k']}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    return figure


def _cause(rows: Sequence[Row], pyplot: Any) -> Any:
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    groups = list(dict.fromkeys((row["data"], row["k"]) for row in rows))
    for offset, (rounding, name, color, hatch) in enumerate(
        (("truncate", "truncated, as the chip does", ORANGE, ""), ("nearest", "rounded to nearest", BLUE, "//"))
    ):
        mine = {(row["data"], row["k"]): row["rms"] for row in rows if row["rounding"] == rounding}
        at = [index + 0.4 * offset - 0.2 for index in range(len(groups))]
        bars = axes.bar(at, [mine[group] for group in groups], 0.38, color=color, hatch=hatch, edgecolor="white", label=name)
        axes.bar_label(bars, fmt="%.1e", fontsize=8, padding=2)
    axes.set_xticks(range(len(groups)), [f"{NAMES[data]}\nK = {k}" for data, k in groups])
    axes.set(yscale="log", ylabel=RMS, title="One chain, 13 fraction bits: what truncation does")
    axes.margins(y=0.12)
    axes.grid(alpha=0.3, axis="y")
    axes.set_axisbelow(True)
    axes.legend(fontsize=9)
    return figure


def _operands(rows: Sequence[Row], pyplot: Any) -> Any:
    groups = list(dict.fromkeys((row["linear"], row["gemm"]) for row in rows))[::-1]
    lengths = {(row["linear"], row["gemm"]): row["k"] for row in reversed(rows)}
    figure, axes = pyplot.subplots(figsize=(7.6, 1.4 + 0.24 * len(groups)), layout="constrained")
    for (recipe, promote), name, color, marker in (
        (("rowwise", "never"), "one chain (scales per row)", ORANGE, "o"),
        (("rowwise", 128), "promoted every 128 (scales per row)", BLUE, "s"),
        (("dsv3", 128), "promoted every 128 (tile scales)", GREEN, "^"),
    ):
        mine = [row for row in rows if (row["recipe"], row["promote"]) == (recipe, promote)]
        at = [groups.index((row["linear"], row["gemm"])) for row in mine]
        axes.plot([row["rms"] for row in mine], at, linestyle="none", marker=marker, color=color, label=name, alpha=0.85)
    axes.set_yticks(
        range(len(groups)), [f"{linear} {gemm}, K = {lengths[linear, gemm]}" for linear, gemm in groups], fontsize=8
    )
    axes.set_ylim(-0.7, len(groups) - 0.3)
    axes.set(xscale="log", xlabel=RMS, title="Sums of a checkpoint's own operands, emulated")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", fontsize=8, ncols=3)
    return figure


def _mechanisms(rows: Sequence[Row], pyplot: Any) -> Any:
    kinds = list(dict.fromkeys(row["data"] for row in rows))
    size = (3.7 * len(kinds), 4.4)
    figure, panels = pyplot.subplots(1, len(kinds), figsize=size, sharey=True, layout="constrained", squeeze=False)
    for axes, data in zip(panels[0], kinds, strict=True):
        mine = [row for row in rows if row["data"] == data]
        for index, row in enumerate(mine):
            for error, offset, color in (("total", -0.2, BLUE), ("sum", 0.2, ORANGE)):
                bar = axes.bar(index + offset, row[error]["rms"], 0.38, color=color, edgecolor="white",
                               hatch="" if row["reachable"] else "xx")  # fmt: skip
                axes.bar_label(bar, fmt="%.1e", fontsize=7, rotation=90, padding=3)
        names = [f"{row['scales']}\n{'never' if row['promote'] == 'never' else row['promote']}" for row in mine]
        axes.set_xticks(range(len(mine)), names)
        axes.set(yscale="log", title=NAMES[data], xlabel="scales, promoted every")
        axes.grid(alpha=0.3, axis="y")
        axes.set_axisbelow(True)
    panels[0][0].set_ylabel(RMS)
    low, high = panels[0][0].get_ylim()
    panels[0][0].set_ylim(low, high * 6)
    from matplotlib.patches import Patch

    marks = [Patch(color=BLUE, label="product, quantization included"), Patch(color=ORANGE, label="the sum alone"),
             Patch(facecolor="white", edgecolor=BLACK, hatch="xx", label="beyond the hardware")]  # fmt: skip
    figure.legend(handles=marks, loc="outside lower center", ncols=3, fontsize=9)
    figure.suptitle(f"Tile scales and promotion apart, K = {rows[0]['k']}, sums emulated")
    return figure


def _outliers(rows: Sequence[Row], pyplot: Any) -> Any:
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for axes, column, label in zip(panels, ("flushed", "values"), ("share flushed to zero", "relative rms error"), strict=True):
        for kind, color, marker in (("tile", BLUE, "s"), ("tensor", ORANGE, "o")):
            mine = [row for row in rows if row["scales"] == kind]
            name = "1×128 tiles" if kind == "tile" else "one scale"
            axes.plot([row["factor"] for row in mine], [row[column] for row in mine], color=color, marker=marker, label=name)
        axes.set(xscale="log", yscale="log", xlabel="outlier channel, times larger than the others", ylabel=label)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=9)
    figure.suptitle("E4M3 activations beside an outlier channel (which itself is left out)")
    return figure


FIGURES = {
    "length": _length, "interval": _interval, "cause": _cause, "operands": _operands, "mechanisms": _mechanisms,
    "outliers": _outliers,
}  # fmt: skip
