"""loss.png, kept fresh while the run goes on and never at the price of the run.

The picture is drawn again at most so often that drawing takes a fiftieth of the time, and is replaced by a rename, so
that a viewer never reads half of it.
"""

import importlib.util
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsv3fp8.errors import UserError

MIN_INTERVAL = 10.0  # seconds between pictures, at least
TIME_SHARE = 0.02  # of the run's time that drawing may take
MOST_POINTS = 4000  # drawn per curve; a longer one is thinned


class LossPlot:
    """Training and validation loss over the steps, with the bigram model's loss as a line."""

    def __init__(
        self,
        path: Path,
        title: str,
        bigram_loss: float | None,
        history: list[dict[str, Any]],
        say: Callable[[str], None] = print,
    ) -> None:
        """`history`: the records of the run so far, from before a restart; `say`: shows a line on the terminal."""
        if importlib.util.find_spec("matplotlib") is None:
            raise UserError("logging.plot=true needs matplotlib: install it or set logging.plot=false")
        self._path = path
        self._title = title
        self._bigram = bigram_loss
        self._say = say
        self._train: list[tuple[int, float]] = []
        self._validation: list[tuple[int, float]] = []
        for record in history:
            self._add(record)
        self._next = time.monotonic() + MIN_INTERVAL

    def _add(self, record: dict[str, Any]) -> None:
        for points, name in ((self._train, "loss"), (self._validation, "validation_loss")):
            value = record.get(name)
            if value is not None and math.isfinite(value):
                points.append((record["step"], value))

    def log(self, record: dict[str, Any]) -> None:
        """Take one record, and draw if it is time."""
        self._add(record)
        if time.monotonic() >= self._next:
            self.draw()

    def draw(self) -> None:
        """Draw now and set the time of the next picture. A disk that does not take it is told of, and ends nothing."""
        # Imported here: it costs a second that a run should not wait for before its first step. The figure is made
        # without pyplot, which keeps a global list of figures and may look for a display.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        began = time.monotonic()
        figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
        axes = figure.add_subplot()
        if self._train:
            axes.plot(*_columns(self._train), linewidth=0.9, alpha=0.8, label="training")
        if self._validation:
            last = self._validation[-1][1]
            axes.plot(*_columns(self._validation), linewidth=1.6, marker="o", ms=3, label=f"validation ({last:.3f})")
        if self._bigram is not None:
            axes.axhline(self._bigram, color="grey", ls="--", lw=1, label=f"bigram model ({self._bigram:.3f})")
        axes.set(title=self._title, xlabel="optimizer step", ylabel="loss (nats per token)")
        axes.grid(alpha=0.25)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
        temporary = self._path.with_name(f".{self._path.name}.writing")
        try:
            FigureCanvasAgg(figure).print_png(temporary)
            temporary.replace(self._path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            self._say(f"{self._path} was not drawn ({error.strerror or error}); metrics.jsonl has the curve")
        now = time.monotonic()
        self._next = now + max(MIN_INTERVAL, (now - began) / TIME_SHARE)

    def close(self) -> None:
        """Draw the finished curve."""
        if self._train or self._validation:
            self.draw()


def _columns(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """Steps and values of at most MOST_POINTS points, the last one among them."""
    stride = -(-len(points) // MOST_POINTS)
    thinned = points[::-1][::stride][::-1]
    return [step for step, _ in thinned], [value for _, value in thinned]
