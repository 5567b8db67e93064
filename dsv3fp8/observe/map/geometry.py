"""From layout and ledger to places: which box stands where, what it says, and the way every edge takes.

Everything is orthogonal. An edge that leaves its column runs in a vertical lane of its own kind; a stash of the
weight-gradient column crosses the backward column in the gap below its chip's row, where only vertical lines pass.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from dsv3fp8.observe.map.layout import Box, Cell, Chip, Edge, Row, Slot, block_layout
from dsv3fp8.observe.map.observed import Observed, Op, Tensor

WIDTH = 1000
TOP = 176  # below title, legend and column heads
BOX_HEIGHT, CHIP_HEIGHT, GAP = 34, 28, 14
COLUMN_WIDTH = 220
COLUMNS = {"f": 58, "b": 404}
COLUMN_NAMES = {"f": "forward", "b": "backward", "w": "wgrad"}
RETILE, WGRAD, GRADIENT = (686, 70), (778, 132), (924, 66)  # x and width in the weight-gradient column
LANES: dict[str, float] = {
    "left1": 20, "left2": 38, "right1": 290, "right2": 302, "amber1": 318, "amber2": 332, "bleft1": 366, "bleft2": 384,
    "bright1": 636, "bright2": 648, "blue1": 662, "blue2": 674, "dy": 852,
}  # fmt: skip
CHANNEL = 10.5  # below a row of chips: where stashes cross, clear of the arrow heads
LEFT_WIDTH = 0.48  # of a column, for its left slot


@dataclass(frozen=True)
class Placed:
    """A box or chip with its place. x, y: the upper left corner. op or tensor: what was reported, None if missing.

    other: the same of the run compared with. kept: a chip's stash. found: reported in this run.
    """

    id: str
    cell: Cell
    x: float
    y: float
    width: float
    height: float
    column: str
    op: Op | None = None
    tensor: Tensor | None = None
    kept: Tensor | None = None
    other_op: Op | None = None
    other_tensor: Tensor | None = None
    other_kept: Tensor | None = None

    @property
    def found(self) -> bool:
        return self.op is not None or self.tensor is not None

    @property
    def middle(self) -> float:
        return self.x + self.width / 2

    @property
    def level(self) -> float:
        return self.y + self.height / 2

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def bottom(self) -> float:
        return self.y + self.height


Point = tuple[float, float]


@dataclass(frozen=True)
class Path:
    """An edge as a polyline. kind: as in layout.EDGE_KINDS, or "link" between chips that share a stash edge.

    dotted: the tensor is not kept but recomputed. ends: ids at its ends.
    """

    kind: str
    points: tuple[Point, ...]
    ends: tuple[str, str]
    dotted: bool = False


@dataclass
class Drawing:
    """Places of one map. missing: ids of what the ledger should have reported and did not.

    notes: words beside the backward flow, with the left end of their base line.
    """

    observed: Observed
    other: Observed | None
    placed: dict[str, Placed] = field(default_factory=dict)
    paths: list[Path] = field(default_factory=list)
    notes: list[tuple[str, float, float]] = field(default_factory=list)
    height: float = TOP

    @property
    def missing(self) -> list[str]:
        return [cell.id for cell in self.placed.values() if not cell.found]


def arrange(observed: Observed, other: Observed | None = None) -> Drawing:
    """Place everything that this run reported or should have reported."""
    rows, edges = block_layout(observed.layer, observed.latent, observed.shared)
    drawing = Drawing(observed, other)
    tracks: dict[tuple[str, Slot], list[Placed | None]] = {(c, s): [] for c in "fb" for s in ("left", "right")}
    y = float(TOP)
    for row in rows:
        cells = {column: _present(drawing, column, _cells(row, column)) for column in "fbw"}
        if not any(cells.values()) and not row.broken:
            continue
        height = BOX_HEIGHT if row.kind == "ops" else CHIP_HEIGHT
        for column in "fbw":
            placed = _place(drawing, column, cells[column], y, height)
            drawing.placed |= {cell.id: cell for cell in placed}
            for slot in ("left", "right") if column != "w" else ():
                track = tracks[column, slot]
                if column in row.broken:
                    track.append(None)
                track += [cell for cell in placed if cell.cell.slot in ("full", slot)]
        if row.note and cells["f"]:
            drawing.notes.append((row.note, COLUMNS["b"] + COLUMN_WIDTH / 2 + 7, y + height / 2 + 3))
        y += height + GAP
    drawing.height = y + 4
    for (column, _), track in tracks.items():
        drawing.paths += [path for path in _flows(column, track) if path not in drawing.paths]
    for edge in edges:
        drawing.paths += _route(drawing, edge)
    for gemm in [cell for cell in drawing.placed.values() if cell.id.startswith("w:")]:
        chip = drawing.placed.get(f"w:dw_{gemm.cell.key}")
        if chip is not None:
            drawing.paths.append(Path("gradient", ((gemm.right, gemm.level), (chip.x, gemm.level)), (gemm.id, chip.id)))
    return drawing


def _cells(row: Row, column: str) -> tuple[Cell, ...]:
    return {"f": row.forward, "b": row.backward, "w": row.wgrad}[column]


def _present(drawing: Drawing, column: str, cells: tuple[Cell, ...]) -> list[Cell]:
    """Without what this recipe does not have."""
    observed = drawing.observed
    found: list[Cell] = []
    for cell in cells:
        if isinstance(cell, Box):
            if observed.op(COLUMN_NAMES[column], cell) is not None or observed.expects(COLUMN_NAMES[column], cell):
                found.append(cell)
        elif cell.when == "always" or observed.tensor(cell) is not None:
            found.append(cell)
    return found


def _place(drawing: Drawing, column: str, cells: list[Cell], y: float, height: float) -> list[Placed]:
    placed = []
    for slot in ("full", "left", "right"):
        group = [cell for cell in cells if cell.slot == slot] if column != "w" else []
        if group:
            x, width = _slot(column, slot)
            gap = 4.0
            each = (width - gap * (len(group) - 1)) / len(group)
            placed += [_cell(drawing, column, c, x + i * (each + gap), y, each, height) for i, c in enumerate(group)]
    if column == "w":
        for cell in cells:
            x, width = GRADIENT if isinstance(cell, Chip) else RETILE if cell.when == "wgrad" else WGRAD
            tall = height if isinstance(cell, Box) else CHIP_HEIGHT
            placed.append(_cell(drawing, column, cell, x, y + (height - tall) / 2, width, tall))
    return placed


def _slot(column: str, slot: str) -> tuple[float, float]:
    left, gap = COLUMNS[column], 6
    if slot == "full":
        return left, COLUMN_WIDTH
    width = COLUMN_WIDTH * LEFT_WIDTH
    return (left, width) if slot == "left" else (left + width + gap, COLUMN_WIDTH - width - gap)


def _cell(drawing: Drawing, column: str, cell: Cell, x: float, y: float, width: float, height: float) -> Placed:
    this, other = drawing.observed, drawing.other
    where = (f"{column}:{cell.key}", cell, x, y, width, height, column)
    if isinstance(cell, Box):
        name = COLUMN_NAMES[column]
        return Placed(*where, op=this.op(name, cell), other_op=other.op(name, cell) if other else None)
    return Placed(
        *where, tensor=this.tensor(cell), kept=this.kept(cell),
        other_tensor=other.tensor(cell) if other else None, other_kept=other.kept(cell) if other else None,
    )  # fmt: skip


def _flows(column: str, track: list[Placed | None]) -> list[Path]:
    """Straight lines between neighbours of a column: down in the forward column, up in the backward one."""
    rows: list[list[Placed] | None] = []
    for cell in track:
        last = rows[-1] if rows else None
        if cell is None:
            rows.append(None)
        elif last and last[0].y == cell.y:
            last.append(cell)
        else:
            rows.append([cell])
    paths = []
    for above, below in itertools.pairwise(rows):
        if above is None or below is None:
            continue
        for upper in (cell for cell in above if not (isinstance(cell.cell, Chip) and cell.cell.loose)):
            for lower in below:
                x = min((upper, lower), key=lambda cell: cell.width).middle
                if upper.x <= x <= upper.right and lower.x <= x <= lower.right:
                    line = ((x, upper.bottom), (x, lower.y))
                    paths.append(
                        Path("flow", line, (upper.id, lower.id))
                        if column == "f"
                        else Path("flow", line[::-1], (lower.id, upper.id))
                    )
    return paths


def _route(drawing: Drawing, edge: Edge) -> list[Path]:
    """The way of an edge that leaves its column; nothing if one of its ends is not in this recipe's run."""
    target = drawing.placed.get(edge.target)
    if target is None and ".requant" in edge.target:  # no cast in this recipe: the GEMM reads what is kept
        target = drawing.placed.get(edge.target.partition(".requant")[0])
    if target is None and edge.target.endswith(".cast"):
        target = drawing.placed.get(edge.target.removesuffix(".cast"))
    there = [drawing.placed[name] for name in edge.sources if name in drawing.placed]
    stash = edge.kind in ("amber", "blue")
    kept = [cell for cell in there if cell.kept] if stash else there
    source = next(iter(kept or there), None)
    if target is None or source is None or not _happens(edge, source, target, bool(kept)):
        return []
    beside = [drawing.placed[name] for name in edge.with_source if name in drawing.placed]
    chain = [source, *(cell for cell in beside if cell.kept or not stash)]
    y = source.level + edge.leave
    links = [
        Path(f"link-{edge.kind}", ((left.right, y), (right.x, y)), (left.id, right.id))
        for right, left in itertools.pairwise(chain)
    ]
    points = _points(edge, source, target)
    paths = [Path(edge.kind, points, (source.id, target.id), dotted=stash and not kept), *links]
    if ".requant" in target.id:
        gemm = drawing.placed.get(target.id.partition(".requant")[0])
        if gemm is not None:
            paths.append(Path(edge.kind, _from_retile(target, gemm), (target.id, gemm.id), paths[0].dotted))
    return paths


def _happens(edge: Edge, source: Placed, target: Placed, kept: bool) -> bool:
    if edge.when == "kept" or (edge.when == "reads" and edge.kind == "amber" and not kept):
        return kept
    if edge.when == "reads":
        return target.op is not None and isinstance(source.cell, Chip) and _names(target.op.operands, source.cell)
    if edge.when == "emits":
        return source.op is not None and isinstance(target.cell, Chip) and _names(source.op.outputs, target.cell)
    return True


def _names(tensors: tuple[Tensor, ...], chip: Chip) -> bool:
    return any(tensor.name in chip.names for tensor in tensors)


def _points(edge: Edge, source: Placed, target: Placed) -> tuple[Point, ...]:
    start, end = source.level + edge.leave, target.level + edge.enter
    if not edge.lane:
        return (source.right, start), (target.x, start)
    lane = LANES[edge.lane]
    if edge.kind == "orange":
        if target.x < lane < target.right:  # into the GEMM from below
            return (source.right, start), (lane, start), (lane, target.bottom)
        return (source.right, start), (target.x, start)
    if edge.kind == "blue" or edge.below:
        port, channel = source.right - 10, source.bottom + CHANNEL
        return (port, source.bottom), (port, channel), (lane, channel), (lane, end), (target.x, end)
    if "left" in edge.lane:
        return (source.x, start), (lane, start), (lane, end), (target.x, end)
    if "amber" in edge.lane:
        return (source.right, start), (lane, start), (lane, end), (target.x, end)
    return (source.right, start), (lane, start), (lane, end), (target.right, end)


def _from_retile(retile: Placed, gemm: Placed) -> tuple[Point, ...]:
    """From the re-tiling box beside and above (a stash) or below (dY) the GEMM into it."""
    if retile.y > gemm.y:
        x = LANES["dy"]
        return (retile.right, retile.level), (x, retile.level), (x, gemm.bottom)
    x = (retile.right + gemm.x) / 2
    return (retile.right, retile.level), (x, retile.level), (x, gemm.level), (gemm.x, gemm.level)
