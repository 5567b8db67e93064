"""loss.png: whole at any time, and never in the way."""

import itertools
import math
import time
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dsv3fp8.errors import UserError
from dsv3fp8.training.loggers import plot
from dsv3fp8.training.loggers.plot import LossPlot


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Axes]:
    """The axes of every picture that is drawn."""
    seen: list[Axes] = []
    real = Figure.add_subplot

    def add_subplot(self: Figure, *arguments: Any, **named: Any) -> Any:
        seen.append(real(self, *arguments, **named))
        return seen[-1]

    monkeypatch.setattr(Figure, "add_subplot", add_subplot)
    return seen


def test_the_picture_has_both_curves_the_baseline_and_a_title(tmp_path: Path, drawn: list[Axes]) -> None:
    history = [{"step": 1, "loss": 5.0}, {"step": 2, "loss": 4.0, "validation_loss": 4.5}]
    logger = LossPlot(tmp_path / "loss.png", "tiny · dsv3", bigram_loss=2.4763, history=history)
    logger.log({"step": 3, "loss": math.nan})
    logger.log({"step": 4, "loss": 3.0, "validation_loss": 3.5})
    logger.close()
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]
    (axes,) = drawn
    assert (axes.get_title(), axes.get_xlabel()) == ("tiny · dsv3", "optimizer step")
    curves = {str(line.get_label()): line for line in axes.get_lines()}
    assert list(curves) == ["training", "validation (3.500)", "bigram model (2.476)"]
    assert curves["training"].get_xydata().tolist() == [[1, 5], [2, 4], [4, 3]]  # a gap where it was NaN
    assert curves["validation (3.500)"].get_xydata().tolist() == [[2, 4.5], [4, 3.5]]


def test_drawing_takes_a_fiftieth_of_the_time_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    logger = LossPlot(tmp_path / "loss.png", "t", None, [])
    drawings = []
    real = plot.LossPlot.draw

    def slow_draw(self: LossPlot) -> None:
        drawings.append(now[0])
        monkeypatch.setattr(time, "monotonic", lambda: now.__setitem__(0, now[0] + 0.5) or now[0])
        real(self)
        monkeypatch.setattr(time, "monotonic", lambda: now[0])

    monkeypatch.setattr(plot.LossPlot, "draw", slow_draw)
    for step in range(1, 200):
        now[0] += 1
        logger.log({"step": step, "loss": 1.0})
    gaps = [later - earlier for earlier, later in itertools.pairwise(drawings)]
    assert drawings[0] == 1010.0
    assert gaps
    # Reading the clock twice takes 0.5 s each here, so a drawing takes half a second.
    assert all(gap >= 0.5 / plot.TIME_SHARE for gap in gaps)


def test_a_long_curve_is_thinned_and_keeps_its_end() -> None:
    steps, values = plot._columns([(step, step / 7) for step in range(1, 100_001)])
    assert len(steps) <= plot.MOST_POINTS
    assert steps[-1] == 100_000
    assert values[-1] == 100_000 / 7


def test_a_run_that_logged_nothing_draws_nothing(tmp_path: Path) -> None:
    LossPlot(tmp_path / "loss.png", "t", None, []).close()
    assert not (tmp_path / "loss.png").exists()


def test_a_disk_that_does_not_take_the_picture_is_one_line_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K10: an error here, while a run ends for want of space, would hide the one that names the checkpoint."""
    said: list[str] = []
    logger = LossPlot(tmp_path / "loss.png", "t", None, [{"step": 1, "loss": 5.0}], said.append)

    def print_png(self: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FigureCanvasAgg, "print_png", print_png)
    logger.close()
    assert said == [f"{tmp_path}/loss.png was not drawn (No space left on device); metrics.jsonl has the curve"]
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"logging\.plot=false"):
        LossPlot(tmp_path / "loss.png", "t", None, [])
