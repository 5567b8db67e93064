"""The drawing as SVG text: one file, no scripts, no fonts and nothing from the network."""

from __future__ import annotations

from xml.sax.saxutils import escape, quoteattr

from dsv3fp8.observe.map.details import detail_lines
from dsv3fp8.observe.map.geometry import COLUMNS, WIDTH, Drawing, Path, Placed, Point
from dsv3fp8.observe.map.labels import DIFFERS, FAINT, INK, MISSING, TAG_HEIGHT, Tag, Text, colors_of, differs, label
from dsv3fp8.observe.map.layout import EDGE_KINDS, Box
from dsv3fp8.observe.map.text import FONTS, text_width

EDGE_COLORS = {"flow": "#4a5262", "amber": "#d39a00", "blue": "#2f6fdb", "orange": "#ea5a0c", "gradient": "#a8394a"}
EDGE_WIDTHS = {"flow": 1.2, "amber": 1.6, "blue": 1.6, "orange": 1.6, "gradient": 1.0}
_ORDER = ("gradient", "flow", "blue", "orange", "amber")  # the last on top
HALO = 4.2  # white under a line, so that crossings read as crossings


def render(drawing: Drawing, tooltips: bool = True) -> str:
    """The whole drawing. tooltips: a <title> in each box and chip, which browsers show on hover."""
    height = round(drawing.height)
    stashes = [path for path in drawing.paths if not path.dotted]
    read = {end for path in stashes if path.kind.endswith("amber") for end in path.ends}
    for_wgrad = {path.ends[0] for path in stashes if path.kind == "blue"} - read
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="{FONTS}" role="img" aria-label={quoteattr(title(drawing))}>',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _markers(),
        *(_text(text) for text in (*head(drawing), *notes(drawing))),
        *_legend(drawing),
    ]
    for group in _by_source(drawing.paths):
        # All halos of a source before its lines: its branches stay joined, others cross it with a gap.
        parts += [_line(path, halo=True) for path in group] + [_line(path) for path in group]
    for cell in drawing.placed.values():
        blue_only = cell.id in for_wgrad
        texts, tags = label(drawing, cell, blue_only)
        title_text = f"<title>{escape(chr(10).join(detail_lines(drawing, cell)))}</title>" if tooltips else ""
        parts.append(f'<g class="cell" data-id={quoteattr(cell.id)} tabindex="0">{title_text}')
        parts.append(_outline(drawing, cell, blue_only))
        parts += [_tag(tag) for tag in tags]
        parts += [_text(text) for text in texts if text.text]
        parts.append("</g>")
    return "\n".join((*parts, "</svg>\n"))


def title(drawing: Drawing) -> str:
    seen = drawing.observed
    kind = "MoE" if seen.layer == "moe" else "dense"
    return f"One {kind} block of {seen.model} under recipe {seen.recipe}, as it ran"


def head(drawing: Drawing) -> list[Text]:
    """Title, summary and column heads."""
    seen, other = drawing.observed, drawing.other
    kept = seen.kept_bytes()
    summary = f"{seen.tokens} tokens, forward and backward, observed. Kept for backward: {kept:,.0f} bytes per token"
    if other is not None:
        summary += f"; {other.recipe} keeps {other.kept_bytes():,.0f} ({kept / other.kept_bytes():.3f})"
    texts = [Text(title(drawing), 20, 26, 16, bold=True), Text(summary + ".", 20, 44, 10.5, FAINT)]
    if drawing.missing:
        alarm = f"MISSING: the ledger did not report {len(drawing.missing)} of the boxes and chips below, drawn in red."
        texts.append(Text(alarm, 560, 26, 9.5, MISSING, bold=True))
    heads = ("forward ↓", COLUMNS["f"]), ("backward ↑ (dashed)", COLUMNS["b"]), ("weight gradients", 686)
    return [*texts, *(Text(text, x, 166, 12, INK, bold=True) for text, x in heads)]


def notes(drawing: Drawing) -> list[Text]:
    """Words beside the backward flow."""
    return [Text(words, x, y, 9, FAINT) for words, x, y in drawing.notes]


LEGEND_Y = 62


def legend_texts(drawing: Drawing) -> list[Text]:
    """What boxes, chips and edges mean."""
    words = [
        "box: the dtype the op computes in; ⇒ a cast fused into it; +ᵀ also along the tokens, for wgrad; "
        "§: section of the report; ~: inferred",
        "chip: the dtype the tensor is carried in, tile, scale kind; the chip across is its gradient; "
        "coloured border: kept, bytes per token",
    ]
    texts = [Text(line, 20, LEGEND_Y + 4 + 14 * i, 9.5, FAINT) for i, line in enumerate(words)]
    for (x, y), meaning in zip(_edge_places(), (*EDGE_KINDS.values(), "dotted: not kept but made again"), strict=True):
        texts.append(Text(meaning, x + 30, y + 3.5, 9.5))
    if drawing.other is not None:
        texts.append(Text(f"≠ differs from {drawing.other.recipe}", 780, LEGEND_Y + 4, 9.5, DIFFERS, bold=True))
    return texts


def _edge_places() -> list[tuple[float, float]]:
    """Left ends of the legend's lines: the kinds of edges, and last a dotted one."""
    return [(20 + 400 * (i % 2), LEGEND_Y + 34 + 16 * (i // 2)) for i in range(len(EDGE_KINDS) + 1)]


def _legend(drawing: Drawing) -> list[str]:
    parts = [_text(text) for text in legend_texts(drawing)]
    kinds = (*EDGE_KINDS, "blue")
    for i, ((x, y), kind) in enumerate(zip(_edge_places(), kinds, strict=True)):
        parts.append(_line(Path(kind, ((x, y), (x + 24, y)), ("", ""), dotted=i == len(EDGE_KINDS))))
    if drawing.other is not None:
        parts.append(f'<circle cx="772" cy="{LEGEND_Y + 1}" r="3.5" fill="{DIFFERS}"/>')
    for i, name in enumerate(("e4m3", "e5m2", "e5m6", "bf16", "fp32")):
        fill, line = colors_of(name)
        left = 760 + 46 * i
        parts.append(f'<rect x="{left}" y="{LEGEND_Y + 50}" width="42" height="15" rx="4" fill="{fill}" stroke="{line}"/>')
        parts.append(_text(Text(name, left + 21 - text_width(name, 9, True) / 2, LEGEND_Y + 61, 9, line, True)))
    return parts


def _markers() -> str:
    heads = "".join(
        f'<marker id="head-{kind}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0.8 8 4 0 7.2Z" fill="{color}"/></marker>'
        for kind, color in EDGE_COLORS.items()
    )
    return f"<defs>{heads}</defs>"


def _by_source(paths: list[Path]) -> list[list[Path]]:
    """Paths in groups of one kind and source, in drawing order."""
    groups: dict[tuple[int, Point], list[Path]] = {}
    for path in paths:
        groups.setdefault((_ORDER.index(path.kind.removeprefix("link-")), path.points[0]), []).append(path)
    return [groups[key] for key in sorted(groups)]


def _line(path: Path, *, halo: bool = False) -> str:
    kind = path.kind.removeprefix("link-")
    places = " ".join(f"{x:g},{y:g}" for x, y in path.points)
    line = f'<polyline points="{places}" fill="none" stroke-linejoin="round"'
    if halo:
        return f'{line} stroke="#ffffff" stroke-width="{HALO}"/>'
    dash = ' stroke-dasharray="2 3"' if path.dotted else ""
    head_of = "" if path.kind.startswith("link-") else f' marker-end="url(#head-{kind})"'
    ends = f" data-from={quoteattr(path.ends[0])} data-to={quoteattr(path.ends[1])}" if path.ends[0] else ""
    role = f"edge {kind}" if path.ends[0] else "key"
    style = f'class="{role}"{ends} stroke="{EDGE_COLORS[kind]}" stroke-width="{EDGE_WIDTHS[kind]}"'
    return f"{line} {style}{dash}{head_of}/>"


def _outline(drawing: Drawing, cell: Placed, blue_only: bool) -> str:
    if not cell.found:
        fill, line, width, dash = "#fff0f2", MISSING, 2.0, ' stroke-dasharray="6 2 2 2"'
    elif isinstance(cell.cell, Box):
        assert cell.op is not None
        fill, line = colors_of(cell.op.computes_in)
        width, dash = 1.3, ' stroke-dasharray="5 3"' if cell.column != "f" else ""
    else:
        assert cell.tensor is not None
        fill, line = colors_of(cell.tensor.format)
        width, dash = 0.8, ""
        if cell.kept:
            line, width = EDGE_COLORS["blue" if blue_only else "amber"], 2.0
    radius = 4 if isinstance(cell.cell, Box) else 10
    changed = cell.found and drawing.other is not None and _changed(cell)
    mark = f'<circle cx="{cell.right - 1:g}" cy="{cell.y + 1:g}" r="3.5" fill="{DIFFERS}"/>' if changed else ""
    return (
        f'<rect x="{cell.x:g}" y="{cell.y:g}" width="{cell.width:g}" height="{cell.height:g}" rx="{radius}" fill="{fill}" '
        f'stroke="{line}" stroke-width="{width}"{dash}/>{mark}'
    )


def _changed(cell: Placed) -> bool:
    if isinstance(cell.cell, Box):
        return differs(cell.op, cell.other_op)
    before, now = cell.other_tensor, cell.tensor
    return (before.in_full() if before else "") != (now.in_full() if now else "")


def _tag(tag: Tag) -> str:
    fill, line = tag.colors
    return (
        f'<rect x="{tag.x:.1f}" y="{tag.y:g}" width="{tag.width:.1f}" height="{TAG_HEIGHT}" rx="3" fill="{fill}" '
        f'stroke="{line}" stroke-width="0.9"/>{_text(tag.text)}'
    )


def _text(text: Text) -> str:
    weight = ' font-weight="bold"' if text.bold else ""
    style = f'font-size="{text.size:g}" fill="{text.color}"{weight}'
    return f'<text x="{text.x:.1f}" y="{text.y:g}" {style}>{escape(text.text)}</text>'
