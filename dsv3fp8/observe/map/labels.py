"""The words in the drawing: what each box and chip says, as long as it fits, and where exactly it stands."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dsv3fp8.observe.map.geometry import Drawing, Placed
from dsv3fp8.observe.map.layout import Box, Chip
from dsv3fp8.observe.map.observed import Op, Tensor
from dsv3fp8.observe.map.text import longest_that_fits, text_width

PAD = 6
INK, FAINT, DIFFERS, MISSING = "#1f2430", "#5d6675", "#b0107f", "#c40d2e"
# Fill and line of each format, for boxes, chips and tags.
COLORS = {
    "e4m3": ("#d3f0e0", "#157a52"), "e5m2": ("#e2f0b8", "#5f7a10"), "e5m6": ("#e6dcfb", "#6a41bd"),
    "bf16": ("#e9edf3", "#5b6a83"), "fp32": ("#fbdfe2", "#a8394a"), "int64": ("#ffffff", "#5b6a83"),
}  # fmt: skip
PLAIN = ("#ffffff", "#5b6a83")
TAG_HEIGHT, TAG_SIZE = 13, 9


@dataclass(frozen=True)
class Text:
    """x: left end. y: base line. owner: id of the box or chip it stands in, "" for what stands outside of them."""

    text: str
    x: float
    y: float
    size: float
    color: str = INK
    bold: bool = False
    owner: str = ""

    @property
    def area(self) -> tuple[float, float, float, float]:
        """left, top, right, bottom, by the estimate of `text_width`."""
        width = text_width(self.text, self.size, self.bold)
        return self.x, self.y - 0.76 * self.size, self.x + width, self.y + 0.22 * self.size


@dataclass(frozen=True)
class Tag:
    """A dtype worn by a box. colors: fill and line."""

    text: Text
    x: float
    y: float
    width: float
    colors: tuple[str, str]


def colors_of(name: str) -> tuple[str, str]:
    return COLORS.get(name.split("+")[0], PLAIN)


def label(drawing: Drawing, cell: Placed, blue_only: bool) -> tuple[list[Text], list[Tag]]:
    """Texts and tags of one box or chip. blue_only: a chip kept for a weight gradient alone."""
    if isinstance(cell.cell, Box):
        return _box(cell, cell.cell, drawing.other is not None)
    return _chip(drawing, cell, cell.cell, blue_only), []


def casts(op: Op) -> str:
    """`⇒ e4m3 +ᵀ` for the casts that ride on an op, "" for none."""
    formats = list(dict.fromkeys(cast.partition("+")[0] for cast in op.fused))
    turned = " +ᵀ" if any("+" in cast for cast in op.fused) else ""
    return f"⇒ {', '.join(formats)}{turned}" if formats else ""


def tiles(op: Op) -> str:
    """Tiles of an op's quantized operands."""
    return " · ".join(tensor.tile.replace("x", "×") for tensor in op.operands if tensor.tile)


def differs(op: Op | None, other: Op | None) -> bool:
    """Whether an op computed in, or emitted, other dtypes than in the run compared with."""
    if op is None or other is None:
        return op is not other
    return op.computes_in != other.computes_in or [t.in_full() for t in op.outputs] != [t.in_full() for t in other.outputs]


def _box(cell: Placed, box: Box, compared: bool) -> tuple[list[Text], list[Tag]]:
    inner = cell.width - 2 * PAD
    if cell.op is None:
        lines = _fit(("not reported", "missing"), 9, inner)
        size = 10.0
        while size > 8 and text_width(box.label, size, bold=True) > inner:
            size -= 0.5
        return [_text(cell, box.label, 12, size, MISSING, bold=True), _text(cell, lines, 23, 9, MISSING)], []
    op = cell.op
    if ".requant" in box.node:
        made = op.outputs[-1].carried() if op.outputs else op.computes_in
        return [
            _text(cell, box.label, 12, 10, bold=True),
            _text(cell, _fit((made, made.partition(" ")[0]), 9, inner + 4), 23, 9, FAINT),
        ], []
    tags, right = [], cell.right - PAD + 2
    worn = (casts(op), op.fused[0].partition("+")[0] if op.fused else ""), (op.computes_in, op.computes_in)
    for text, name in worn:
        if text:
            tags.append(_tag(cell, text, right, colors_of(name)))
            right = tags[-1].x - 3
    source = _text(cell, box.source, 28, 9, FAINT, right=True)
    changed = compared and differs(op, cell.other_op)
    detail = _fit(_box_details(op, cell.other_op, changed), 9, source.x - cell.x - 2 * PAD)
    size = 11.0
    while size > 8.5 and text_width(box.label, size, bold=True) > right - cell.x - PAD:
        size -= 0.5
    return [
        _text(cell, box.label, 14, size, bold=True),
        _text(cell, detail, 28, 9, DIFFERS if changed else FAINT),
        source,
    ], tags


def _box_details(op: Op, other: Op | None, changed: bool) -> list[str]:
    """The second line of a box, from the fullest to the shortest."""
    emitted = _formats(op)
    if not changed:
        return [f"{tiles(op)} → {emitted}" if tiles(op) else f"→ {emitted}", tiles(op)]
    if other is None:
        return ["only here"]
    if other.computes_in != op.computes_in:
        return [f"≠ computes in {other.computes_in}", f"≠ {other.computes_in}"]
    return [f"≠ emits {_formats(other)}" if _formats(other) != emitted else "≠ other scales", "≠"]


def _formats(op: Op) -> str:
    return ", ".join(dict.fromkeys(tensor.format for tensor in op.outputs))


def _chip(drawing: Drawing, cell: Placed, chip: Chip, blue_only: bool) -> list[Text]:
    inner = cell.width - 2 * _pad(cell)
    if cell.tensor is None:
        name = _fit((chip.label, chip.label.split(",")[0]), 9.5, inner)
        return [_text(cell, name, 12, 9.5, MISSING, bold=True), _text(cell, _fit(("not reported", "missing"), 9, inner), 23,
                                                                      9, MISSING)]  # fmt: skip
    tensor, tokens = cell.tensor, drawing.observed.tokens
    turned = " +ᵀ" if len(drawing.observed.orientations(chip)) > 1 else ""
    scale = f", {tensor.scale} scales" if tensor.scale else ""
    short = " pow2" if tensor.scale == "pow2" else ""
    carried = [f"{tensor.carried()}{words}{turned}" for words in (scale, short, "")] + [f"{tensor.format}{turned}"]
    color = FAINT
    if drawing.other is not None and _other(cell) != tensor.in_full():
        was = f" ≠ {cell.other_tensor.carried()}" if cell.other_tensor else ", only here"
        carried = [*(f"{text}{was}" for text in carried), f"{tensor.format} ≠", *carried]
        color = DIFFERS
    size = 10.0
    texts = [_text(cell, _fit(carried, 9, inner), 23, 9, color)]
    if cell.kept:
        kept = _per_token(cell.kept.bytes, tokens)
        notes = [f"{kept} B", kept, f"{cell.kept.bytes / tokens / 1000:.2g}k"]
        if drawing.other is not None and cell.other_kept and cell.other_kept.bytes != cell.kept.bytes:
            notes.insert(0, f"{kept} B ≠ {_per_token(cell.other_kept.bytes, tokens)} B")
        room = inner - text_width(chip.label, size, bold=True) - 6
        note = _fit(notes, 9, room)
        if note:
            texts.append(_text(cell, note, 12, 9, "#2559b3" if blue_only else "#8f6400", right=True))
    while size > 7.5 and text_width(chip.label, size, bold=True) > inner:
        size -= 0.5
    return [_text(cell, chip.label, 12, size, bold=True), *texts]


def _other(cell: Placed) -> str:
    other: Tensor | None = cell.other_tensor
    return other.in_full() if other else ""


def _per_token(size: int, tokens: int) -> str:
    return f"{size / tokens:,.4g}" if size / tokens < 1000 else f"{size / tokens:,.0f}"


def _fit(texts: Iterable[str], size: float, width: float) -> str:
    return longest_that_fits(texts, size, width)


def _text(
    cell: Placed, text: str, down: float, size: float, color: str = INK, *, bold: bool = False, right: bool = False
) -> Text:
    pad = _pad(cell)
    x = cell.right - pad - text_width(text, size, bold) if right else cell.x + pad
    return Text(text, x, cell.y + down, size, color, bold, cell.id)


def _pad(cell: Placed) -> float:
    return PAD if cell.width > 100 else 5 if cell.width > 50 else 4


def _tag(cell: Placed, text: str, right: float, colors: tuple[str, str]) -> Tag:
    width = text_width(text, TAG_SIZE, bold=True) + 7
    words = Text(text, right - width + 3.5, cell.y + 14, TAG_SIZE, colors[1], True, cell.id)
    return Tag(words, right - width, cell.y + 4, width, colors)
