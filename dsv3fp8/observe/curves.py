"""Loss curves of several runs in one picture: python -m dsv3fp8.observe.curves out=curves.png RUN_DIR RUN_DIR …

The pages in docs/results are drawn with it, from the metrics.jsonl that lies beside them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from dsv3fp8.errors import UserError
from dsv3fp8.training.metrics import read_metrics


def records_of(run: Path) -> list[dict[str, Any]]:
    """The records of a run directory, or of a metrics file itself; a half-written last line is left out."""
    path = run / "metrics.jsonl" if run.is_dir() else run
    if not path.is_file():
        raise UserError(f"{path} does not exist: give a run directory or a metrics.jsonl")
    records = read_metrics(path)
    if not records:
        raise UserError(f"{path} holds no step yet: let the run log one")
    return records


def smoothed(values: list[float], weight: float) -> list[float]:
    """Exponential moving average without the bias of its start."""
    out, average, mass = [], 0.0, 0.0
    for value in values:
        average = weight * average + (1 - weight) * value
        mass = weight * mass + (1 - weight)
        out.append(average / mass)
    return out


def draw_curves(
    runs: dict[str, list[dict[str, Any]]], out: Path, weight: float = 0.9, pairs: list[tuple[str, str]] | None = None
) -> None:
    """Training loss (thin as it came, thick smoothed) and validation loss (dots); below, the difference of pairs of runs.

    pairs: (run, what it is compared with); by default every run with the first.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(8, 6.6), sharex=True, height_ratios=(3, 1.2), layout="constrained")
    curves: dict[str, dict[int, float]] = {}
    for index, (name, records) in enumerate(runs.items()):
        trained = [(r["step"], r["loss"]) for r in records if r.get("loss") is not None]
        steps = [step for step, _ in trained]
        average = smoothed([loss for _, loss in trained], weight)
        color, dashes = f"C{index}", (None, None) if index % 2 == 0 else (4, 3)
        top.plot(steps, [loss for _, loss in trained], color=color, alpha=0.25, linewidth=0.8)
        top.plot(steps, average, color=color, label=f"{name}, training, smoothed", linewidth=1.6, dashes=dashes)
        validated = [(r["step"], r["validation_loss"]) for r in records if r.get("validation_loss") is not None]
        top.plot(
            [step for step, _ in validated],
            [loss for _, loss in validated],
            "o",
            color=color,
            markersize=5,
            label=f"{name}, validation",
        )
        curves[name] = dict(zip(steps, average, strict=True))
    first, *others = curves
    for name, other in pairs if pairs is not None else [(name, first) for name in others]:
        common = sorted(curves[other].keys() & curves[name].keys())
        relative = [100 * (curves[name][step] / curves[other][step] - 1) for step in common]
        bottom.plot(common, relative, color=f"C{list(curves).index(name)}", label=f"{name} against {other}")
    bottom.axhline(0, color="black", linewidth=0.6)
    top.set_ylabel("loss, nats a token")
    bottom.set_ylabel("difference, %")
    bottom.set_xlabel("step")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    top.legend(fontsize=8)
    if bottom.get_legend_handles_labels()[0]:  # below the axes: every curve there is to be seen whole
        bottom.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.35))
    figure.savefig(out, dpi=130)
    pyplot.close(figure)


def main(arguments: list[str]) -> int:
    """out=PNG and the runs, each with an optional NAME= before it; compare=NAME:OTHER, once or more, picks what is compared."""
    out, runs, pairs = None, {}, []
    for argument in arguments:
        name, equals, value = argument.rpartition("=")
        if name == "out":
            out = Path(value)
        elif name == "compare":
            pairs.append(value)
        else:
            runs[name if equals else Path(value).name] = records_of(Path(value))
    if out is None or not runs:
        raise UserError("give out=PICTURE.png and at least one run directory")
    draw_curves(runs, out, pairs=[_pair(text, list(runs)) for text in pairs] or None)
    print(out)
    return 0


def _pair(text: str, names: list[str]) -> tuple[str, str]:
    name, _, other = text.partition(":")
    for each in (name, other):
        if each not in names:
            raise UserError(f"compare={text}: there is no run {each!r}; give NAME:OTHER of {', '.join(names)}")
    return name, other


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"dsv3fp8: error: {error}")
