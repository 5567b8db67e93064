"""The charts of a report: axes that all of them share, and what one point looks like."""

import re
from collections.abc import Sequence

import pytest

from dsv3fp8.observe.compare.charts import BAR, HEIGHT, Chart, Line, nice_ticks
from dsv3fp8.observe.map.text import text_width


def chart(xs: Sequence[int], ys: Sequence[float], last: int, **about: object) -> Chart:
    return Chart("k", "Title", "Caption.", "step", "loss", [Line(0, xs, ys, "bf16", dots=True)], last, **about)  # type: ignore[arg-type]


def x_ticks(svg: str) -> dict[str, float]:
    """{text: x in pixels} below the plane."""
    return {text: float(x) for x, text in re.findall(r'class="tick" x="([\d.]+)" y="305" text-anchor="middle">([^<]+)<', svg)}


@pytest.mark.parametrize(
    ("last", "texts"),
    [
        (1, ["0", "1"]),
        (4, ["0", "1", "2", "3", "4"]),
        (41, ["0", "10", "20", "30", "40"]),
        (3000, ["0", "500", "1,000", "1,500", "2,000", "2,500", "3,000"]),
    ],
)
def test_ticks_of_the_steps_are_whole_and_told_apart(last: int, texts: list[str]) -> None:
    svg = chart([last], [2.0], last).svg()
    assert re.findall(r'y="305" text-anchor="middle">([^<]+)<', svg) == texts


def test_charts_of_few_points_and_of_many_have_the_same_steps_below_them() -> None:
    one, many = (chart(xs, [2.0] * len(xs), 40).svg() for xs in ([40], range(5, 41)))
    assert x_ticks(one) == x_ticks(many)
    (dot,) = re.findall(r'<circle cx="([\d.]+)"', one)
    assert float(dot) == x_ticks(one)["40"]


def test_a_band_of_one_point_is_a_bar() -> None:
    svg = chart([20], [2.0], 40, band=([20], [1.5], [2.5])).svg()
    (path,) = re.findall(r'class="band" d="([^"]+)"', svg)
    corners = [tuple(map(float, pair.split())) for pair in re.findall(r"[\d.]+ [\d.]+", path)]
    (left, right), (top, bottom) = (sorted({corner[axis] for corner in corners}) for axis in (0, 1))
    assert right - left == pytest.approx(BAR, abs=0.1)
    assert 0 < top < bottom < HEIGHT
    assert bottom - top > HEIGHT / 2


def test_a_bar_at_the_last_step_stays_within_the_axes() -> None:
    svg = chart([40], [2.0], 40, band=([40], [1.5], [2.5])).svg()
    (path,) = re.findall(r'class="band" d="([^"]+)"', svg)
    assert max(float(pair.split()[0]) for pair in re.findall(r"[\d.]+ [\d.]+", path)) == x_ticks(svg)["40"]


@pytest.mark.parametrize("ys", [(0.00012, 0.00031), (1.0, 2.0)])
def test_numbers_beside_the_axis_leave_room_for_its_name(ys: tuple[float, float]) -> None:
    svg = chart([1, 2], ys, 2, logarithmic=True, unit=" %").svg()
    ticks = re.findall(r'class="tick" x="([\d.]+)" y="[\d.]+" text-anchor="end">([^<]+)<', svg)
    assert ticks
    assert all(float(x) - text_width(text, 11.5) > 17 for x, text in ticks)  # the name's baseline is at 13


def test_ticks_need_not_be_whole() -> None:
    assert nice_ticks(0.0, 1.0) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])


def test_a_logarithmic_chart_tells_of_a_zero_at_the_end_and_draws_nothing_of_zeros_alone() -> None:
    drawn = chart([1, 2, 3], [0.0, 0.5, 0.0], 3, logarithmic=True)
    assert "bf16 ends at 0." in drawn.svg()
    assert chart([1, 2, 3], [0.0, 0.0, 0.0], 3, logarithmic=True).svg() == ""
