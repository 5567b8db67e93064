"""The drawing as one page that needs nothing else: details of a box or chip on hover, focus or touch."""

from __future__ import annotations

import json
from html import escape

from dsv3fp8.observe.map.details import detail_lines
from dsv3fp8.observe.map.difference import Change
from dsv3fp8.observe.map.geometry import WIDTH, Drawing
from dsv3fp8.observe.map.svg import render, title
from dsv3fp8.observe.map.text import FONTS

_STYLE = """
body { margin: 0; font: 14px/1.45 FONTS; color: #1f2430; background: #fff; }
main { display: flex; align-items: flex-start; gap: 16px; padding: 8px; }
main > svg { flex: none; width: WIDTHpx; max-width: 100%; height: auto; }
aside { position: sticky; top: 8px; flex: 1; min-width: 260px; max-width: 440px; max-height: 95vh; overflow: auto;
  border: 1px solid #c9cfda; border-radius: 6px; padding: 8px 12px; background: #fff; }
aside h2 { font-size: 15px; margin: 0 0 4px; } aside p { margin: 2px 0; overflow-wrap: anywhere; }
.cell { cursor: pointer; outline: none; } .cell.chosen > rect:first-of-type { stroke-width: 3px; }
.dim .edge { opacity: .18; } .dim .edge.lit { opacity: 1; stroke-width: 2.6px; }
table { border-collapse: collapse; margin: 8px; }
th, td { text-align: left; padding: 2px 10px; border-bottom: 1px solid #e3e7ee; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
@media (max-width: 1290px) { main { display: block; }
  aside { position: fixed; top: auto; bottom: 0; left: 0; right: 0; max-width: none; max-height: 40vh; } }
"""

_SCRIPT = """
const details = JSON.parse(document.getElementById("details").textContent);
const panel = document.querySelector("aside"), drawing = document.querySelector("main > svg");
function show(cell) {
  const id = cell.dataset.id, [name, ...lines] = details[id];
  panel.replaceChildren(...[["h2", name], ...lines.map(line => ["p", line])].map(([tag, text]) => {
    const element = document.createElement(tag); element.textContent = text; return element;
  }));
  document.querySelectorAll(".cell.chosen").forEach(other => other.classList.remove("chosen"));
  cell.classList.add("chosen"); drawing.classList.add("dim");
  document.querySelectorAll(".edge").forEach(edge =>
    edge.classList.toggle("lit", edge.dataset.from === id || edge.dataset.to === id));
}
document.querySelectorAll(".cell").forEach(cell => {
  for (const event of ["mouseenter", "focus", "click"]) cell.addEventListener(event, () => show(cell));
});
drawing.addEventListener("mouseleave", () => drawing.classList.remove("dim"));
"""


def page(drawing: Drawing, changes: list[Change]) -> str:
    """The HTML text. changes: the differences listed below the drawing, none without a run to compare with."""
    details = {name: detail_lines(drawing, cell) for name, cell in drawing.placed.items()}
    # "<" could end the script element early; JSON reads the escape as the same text.
    data = json.dumps(details, ensure_ascii=False).replace("<", "\\u003c")
    style = _STYLE.replace("FONTS", FONTS).replace("WIDTH", str(WIDTH))
    name = escape(title(drawing))
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{name}</title>\n'
        '<meta name="viewport" content="width=device-width">\n<link rel="icon" href="data:,">\n'
        f"<style>{style}</style>\n</head>\n<body>\n<main>\n{render(drawing, tooltips=False)}"
        "<aside><h2>Details</h2><p>Point at a box or a chip, or walk through them with the Tab key.</p></aside>\n</main>\n"
        f"{_differences(drawing, changes)}"
        f'<script type="application/json" id="details">{data}</script>\n<script>{_SCRIPT}</script>\n</body>\n</html>\n'
    )


def _differences(drawing: Drawing, changes: list[Change]) -> str:
    if drawing.other is None:
        return ""
    here, there = escape(drawing.observed.recipe), escape(drawing.other.recipe)
    rows = "\n".join(
        f"<tr><td>{c.node}</td><td>{c.column}</td><td>{c.here or '—'}</td><td>{c.there or '—'}</td>"
        f'<td class="n">{c.kept_here:,.1f}</td><td class="n">{c.kept_there:,.1f}</td></tr>'
        for c in changes
        if not c.equal
    )
    return (
        f"<table>\n<tr><th>node</th><th>column</th><th>{here}</th><th>{there}</th>"
        f'<th class="n">kept B/token, {here}</th><th class="n">{there}</th></tr>\n{rows}\n</table>\n'
    )
