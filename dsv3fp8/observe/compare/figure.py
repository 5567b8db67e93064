"""The picture of a comparison: loss curves with the baseline's band, and the relative error below."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from dsv3fp8.observe.compare.html import LIGHT, diverged
from dsv3fp8.observe.compare.tables import means, subtitle

STYLES = ("-", "--", ":", "-.")
TITLE_WIDTH = 115  # characters that fit above the curves


def draw(data: Mapping[str, Any], out: Path) -> None:
    """Write the PNG. ImportError where matplotlib is not installed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 7), dpi=130, layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    training, validation = data["curves"]["training"], data["curves"]["validation"]
    baseline, steps = data["settings"]["baseline"], _array(training["step"])
    band = None if training["band"] is None else _array(training["band"])
    held: list[Any] = []  # (axes, values) that have to be in the picture
    if band is not None:
        middle = _array(training["recipes"][baseline]["loss"])
        top.fill_between(steps, middle * (1 - band), middle * (1 + band), color="0.82", linewidth=0)
        held += [(bottom, -100 * band), (bottom, 100 * band)]
        bottom.fill_between(steps, -100 * band, 100 * band, color="0.88", linewidth=0, label=f"seeds of {baseline}")
    for index, (name, curves) in enumerate(training["recipes"].items()):
        free = name in diverged(data)
        style: dict[str, Any] = {"color": LIGHT[index % len(LIGHT)], "linewidth": 1.6}
        style["linestyle"] = "-" if not index else STYLES[(index - 1) % len(STYLES)]
        top.plot(steps, _array(curves["loss"]), label=name, **style)
        checked = _array(validation["recipes"][name]["loss"])
        top.plot(_array(validation["step"]), checked, "o", color=style["color"], markersize=3.5)
        held += [] if free else [(top, _array(curves["loss"])), (top, checked)]
        if name == baseline or curves["error"] is None:
            continue
        for one in curves["error_by_seed"].values():
            bottom.plot(steps, 100 * _array(one), **style | {"linewidth": 0.6, "alpha": 0.5})
            held += [] if free else [(bottom, 100 * _array(one))]
        bottom.plot(steps, 100 * _array(curves["error"]), **style)
    bottom.axhline(0, color="0.3", linewidth=0.6)
    top.set_ylabel("loss, nats a token")
    window = data["settings"]["window"]
    smoothed = f"mean of the last {window:,} steps" if window > 1 else "as logged"
    about = f"{subtitle(data)}\nlines: training, {smoothed}; dots: validation; {means(data)}"
    top.set_title("\n".join(fill(line, TITLE_WIDTH) for line in about.splitlines()), fontsize=8, loc="left")
    bottom.set_ylabel("error of training loss, %")
    bottom.set_xlabel("optimizer step")
    for axes in (top, bottom):
        _show_whole(axes, [values for where, values in held if where is axes])
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    top.legend(fontsize=8, ncols=2, frameon=False)
    if band is not None:
        bottom.legend(fontsize=8, frameon=False)
    FigureCanvasAgg(figure).print_png(out)


def _show_whole(axes: Any, curves: list[Any]) -> None:
    """A range that holds these curves; those of runs that diverged may leave it."""
    values = np.concatenate([*curves, np.zeros(0)])
    values = values[np.isfinite(values)]
    if len(values):
        low, high = values.min(), values.max()
        margin = 0.05 * (high - low) or 0.05
        axes.set_ylim(low - margin, high + margin)


def _array(values: Any) -> Any:
    return np.array([np.nan if value is None else value for value in values], np.float64)
