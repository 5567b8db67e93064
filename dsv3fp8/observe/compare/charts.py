"""Line charts as SVG text: curves with gaps, one shaded band, names at the ends of the lines. Colours come from the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeGuard

from dsv3fp8.observe.map.text import longest_that_fits, text_width

WIDTH, HEIGHT = 640, 330
LEFT, TOP, BOTTOM = 62, 16, 42
"""Pixels around the plane; LEFT grows with the numbers that stand there."""
LABEL = 24
"""Pixels on the left that the name of the y axis takes."""
BAR = 8
"""Pixels of the width of a band with a single point."""
SMALL = 11.5
LONGEST = 170
"""Pixels of the longest name beside a line; the legend has it in full."""
SPACING = 13.5
"""Pixels between names at the ends of lines."""

Values = Sequence[float | None]


@dataclass(frozen=True)
class Line:
    """One curve. series: index of its recipe, which gives colour and dashes. name: at its end, if any. thin: of one seed.

    free: may leave the picture, as a run that diverged does, so that the others can be told apart.
    """

    series: int
    xs: Sequence[float]
    ys: Values
    name: str | None = None
    thin: bool = False
    dots: bool = False
    free: bool = False


@dataclass(frozen=True)
class Chart:
    """title, caption: above it. band: (xs, low, high), shaded. unit: behind the ticks' numbers. key: of its ids in the page.

    last: the x axis goes from 0 to there, in whole numbers.
    """

    key: str
    title: str
    caption: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    last: int
    band: tuple[Sequence[float], Values, Values] | None = None
    logarithmic: bool = False
    zero: bool = False
    unit: str = ""

    def svg(self) -> str:
        """The drawing, or "" if there is no point to draw."""
        held = [line for line in self.lines if not line.free] or self.lines
        ys = [y for line in held for y in line.ys if _drawn(y, self.logarithmic)]
        if not ys:
            return ""
        if self.band:
            ys += [y for side in self.band[1:] for y in side if _drawn(y, self.logarithmic)]
        ys += [0.0] if self.zero and not self.logarithmic else []
        names = [line.name for line in self.lines if line.name]
        right = 14 + min(max((text_width(name, SMALL, bold=True) for name in names), default=0), LONGEST)
        plane = _Plane(self.last, min(ys), max(ys), right, self.logarithmic, self.unit)
        parts = [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{self.key}-t {self.key}-d">',
            f'<title id="{self.key}-t">{escape(self.title)}</title><desc id="{self.key}-d">{escape(self.description)}</desc>',
            f'<clipPath id="{self.key}-c"><path d="{plane.outline}"/></clipPath>',
            *plane.axes(self.x_label, self.y_label),
        ]
        if self.band:
            parts.append(plane.area(*self.band))
        if self.zero:
            parts.append(f'<path class="zero" d="M{plane.left:.1f} {plane.y(0.0):.1f}H{plane.edge:.1f}"/>')
        parts.append(f'<g clip-path="url(#{self.key}-c)">')
        parts += [plane.line(line) for line in sorted(self.lines, key=lambda line: not line.thin)]
        parts += ["</g>", *plane.names(self.lines)]
        return "".join([*parts, "</svg>"])

    @property
    def description(self) -> str:
        """For those who hear the page: what is drawn, and where every named line ends."""
        ends = []
        for line in self.lines:
            last = next((y for y in reversed(line.ys) if _drawn(y, False)), None)
            if line.name and last is not None:
                ends.append(f"{line.name} ends at {last:.4g}{self.unit}")
        return f"{self.caption} {'; '.join(ends)}."


class _Plane:
    """Data to pixels, and what is drawn in them."""

    def __init__(self, last: int, y0: float, y1: float, right: float, logarithmic: bool, unit: str) -> None:
        self.edge = WIDTH - right
        self._logarithmic = logarithmic
        self._last = last
        low, high = self._scaled(y0), self._scaled(y1)
        margin = 0.04 * (high - low) or max(abs(high), 1.0) * 0.05
        self._low, self._high = low - margin, high + margin
        self._ticks = _log_ticks(self._low, self._high) if logarithmic else nice_ticks(self._low, self._high)
        self._texts = [f"{text}{unit}" for text in labels(self._ticks, logarithmic)]
        self.left = max(LEFT, LABEL + max((text_width(text, SMALL) for text in self._texts), default=0))

    @property
    def outline(self) -> str:
        """A path around what lines may fill: to the right of the axis, names and all."""
        return f"M{self.left:.1f} {TOP}H{WIDTH}V{HEIGHT - BOTTOM}H{self.left:.1f}Z"

    def _scaled(self, y: float) -> float:
        return math.log10(y) if self._logarithmic else y

    def x(self, x: float) -> float:
        return self.left + x / self._last * (self.edge - self.left)

    def y(self, y: float) -> float:
        return HEIGHT - BOTTOM - (self._scaled(y) - self._low) / (self._high - self._low) * (HEIGHT - BOTTOM - TOP)

    def axes(self, x_label: str, y_label: str) -> list[str]:
        base, left, parts = HEIGHT - BOTTOM, f"{self.left:.1f}", []
        for tick, text in zip(self._ticks, self._texts, strict=True):
            parts.append(f'<path class="grid" d="M{left} {self.y(tick):.1f}H{self.edge:.1f}"/>')
            at = f'x="{self.left - 6:.1f}" y="{self.y(tick) + 4:.1f}"'
            parts.append(f'<text class="tick" {at} text-anchor="end">{text}</text>')
        for tick in nice_ticks(0, self._last, 6, whole=True):
            parts.append(f'<path class="grid" d="M{self.x(tick):.1f} {base}v4"/>')
            parts.append(f'<text class="tick" x="{self.x(tick):.1f}" y="{base + 17}" text-anchor="middle">{tick:,.0f}</text>')
        middle = (self.left + self.edge) / 2
        parts.append(f'<path class="axis" d="M{left} {TOP}V{base}H{self.edge:.1f}"/>')
        parts.append(f'<text class="label" x="{middle:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
        turn = f'transform="rotate(-90)" x="{-(TOP + base) / 2:.0f}" y="13"'
        parts.append(f'<text class="label" {turn} text-anchor="middle">{escape(y_label)}</text>')
        return parts

    def area(self, xs: Sequence[float], low: Values, high: Values) -> str:
        pieces, run = [], []
        for x, lower, upper in [*zip(xs, low, high, strict=True), (0.0, None, None)]:
            if _drawn(lower, self._logarithmic) and _drawn(upper, self._logarithmic):
                run.append((self.x(x), self.y(lower), self.y(upper)))
            elif run:
                if len(run) == 1:  # a line has no area
                    at, down, up = run[0]
                    sides = max(at - BAR / 2, self.left), min(at + BAR / 2, self.edge)
                    run = [(side, down, up) for side in sides]
                there = "L".join(f"{a:.1f} {up:.1f}" for a, _, up in run)
                back = "L".join(f"{a:.1f} {down:.1f}" for a, down, _ in reversed(run))
                pieces.append(f"M{there}L{back}Z")
                run = []
        return f'<path class="band" d="{"".join(pieces)}"/>'

    def line(self, line: Line) -> str:
        path, open_ = [], False
        points = []
        for x, y in zip(line.xs, line.ys, strict=True):
            if not _drawn(y, self._logarithmic):
                open_ = False
                continue
            at = f"{self.x(x):.1f} {self.y(y):.1f}"
            path.append(f"{'L' if open_ else 'M'}{at}")
            points.append((self.x(x), self.y(y)))
            open_ = True
        kind = "thin" if line.thin else "line"
        shapes = f'<path class="{kind}" d="{"".join(path)}"/>'
        if line.dots:
            shapes += "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{2 if line.thin else 3}"/>' for x, y in points)
        return f'<g class="s s{line.series}" data-series="{line.series}">{shapes}</g>'

    def names(self, lines: Sequence[Line]) -> list[str]:
        """Beside the last point of each named line, moved apart where they would lie on one another."""
        ends = []
        for line in lines:
            last = next((y for y in reversed(line.ys) if _drawn(y, self._logarithmic)), None)
            if line.name and last is not None:
                ends.append((self.y(last), line))
        ends.sort(key=lambda end: end[0])
        places = spread([at for at, _ in ends], SPACING, TOP + 6, HEIGHT - BOTTOM)
        return [
            f'<text class="name s s{line.series}" data-series="{line.series}" x="{self.edge + 6:.1f}" y="{at + 4:.1f}">'
            f"{escape(_shortened(line.name or ''))}</text>"
            for at, (_, line) in zip(places, ends, strict=True)
        ]


def _shortened(name: str) -> str:
    """As much of the name as fits beside a line."""
    cuts = (name, *(f"{name[:length]}…" for length in range(len(name) - 1, 0, -1)))
    return longest_that_fits(cuts, SMALL, LONGEST / 1.15)


def _drawn(y: float | None, logarithmic: bool) -> TypeGuard[float]:
    return y is not None and math.isfinite(y) and (y > 0 or not logarithmic)


def spread(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The sorted places moved apart to at least `gap`, as little as it takes from the first on, then kept below `high`."""
    out: list[float] = []
    for place in places:
        out.append(max(place, low if not out else out[-1] + gap))
    for i in range(len(out) - 1, -1, -1):
        ceiling = high if i == len(out) - 1 else out[i + 1] - gap
        out[i] = min(out[i], ceiling)
    return out


def nice_ticks(low: float, high: float, count: int = 5, whole: bool = False) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten that lie from `low` to `high`, about `count` of them, or fewer if whole."""
    raw = max((high - low) / count, 1.0 if whole else 0.0)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Of a range of logarithms: powers of ten, with 2 and 5 times them where there are few."""
    powers = range(math.floor(low), math.ceil(high) + 1)
    for factors in ((1,), (1, 2, 5), (1, 2, 3, 5, 7)):
        ticks = [factor * 10.0**power for power in powers for factor in factors]
        inside = [tick for tick in ticks if low <= math.log10(tick) <= high]
        if len(inside) >= 3:
            return inside
    return inside or [10 ** ((low + high) / 2)]


def labels(ticks: Sequence[float], logarithmic: bool) -> list[str]:
    """As many digits as tell neighbours apart."""
    if logarithmic or len(ticks) < 2:
        return [f"{tick:.3g}" for tick in ticks]
    digits = max(0, -math.floor(math.log10(ticks[1] - ticks[0]) + 1e-9))
    return [f"{tick:,.{digits}f}".replace("-", "−") for tick in (0.0 if abs(t) < 1e-12 else t for t in ticks)]
