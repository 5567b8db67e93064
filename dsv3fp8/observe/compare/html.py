"""A comparison as one HTML page that needs nothing else: tables, charts, rules, and where the figures come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from dsv3fp8.observe.compare.charts import Chart, Line, Values
from dsv3fp8.observe.compare.tables import Table, findings, means, rules, subtitle, tables_of, title
from dsv3fp8.observe.map.text import FONTS

# Okabe and Ito's colours, told apart by the colour-blind, and darker or lighter where the page's ground asks for it. The
# baseline has the colour of the text.
LIGHT = ("#1f2430", "#0069a8", "#c4490e", "#007a58", "#a6457f", "#8a6200", "#2f8fc4", "#7a3fb0", "#b3261e", "#4d7a00")
DARK = ("#e6e9ef", "#5fb4ec", "#f39152", "#3fc7a0", "#e29bc6", "#e3b341", "#9ad4f5", "#bf9bea", "#ff8f84", "#a5cf52")
DASHES = ("none", "7 3", "2 3", "9 3 2 3")

_STYLE = """
:root { color-scheme: light dark; --text: #1f2430; --soft: #545c6b; --ground: #fff; --panel: #f6f7f9; --rule: #d9dde4;
  --band: #1f24301f; LIGHT }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ef; --soft: #a2abba; --ground: #14171c; --panel: #1c2027;
  --rule: #343a45; --band: #e6e9ef26; DARK } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1380px; padding: 20px 24px 48px; font: 15px/1.5 FONTS; color: var(--text);
  background: var(--ground); }
h1 { font-size: 25px; line-height: 1.25; margin: 8px 0 2px; } h2 { font-size: 18px; margin: 34px 0 6px; }
p, ul { margin: 6px 0; max-width: 105ch; } .soft { color: var(--soft); } li { margin: 3px 0; }
a { color: inherit; } code, pre { font: 13px/1.45 ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace; }
pre { overflow-x: auto; padding: 8px 12px; background: var(--panel); border-radius: 6px; max-width: 100%; }
.scroll { position: relative; overflow-x: auto; margin: 8px 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.note { color: var(--soft); font-size: 13.5px; max-width: 120ch; }
caption { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
th, td { padding: 5px 12px 5px 0; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
thead th { vertical-align: bottom; color: var(--soft); font-weight: 600; font-size: 13.5px; }
th:first-child, .named th:nth-child(2), .named td:nth-child(2) { text-align: left; } tbody th { font-weight: 600; }
.verdict { font-weight: 600; } .verdict::before { content: "● "; color: var(--soft); }
.outside::before { color: var(--s2); } .within::before { color: var(--s3); }
.diverged::before { content: "▲ "; color: var(--s8); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 560px), 1fr)); gap: 14px; margin: 10px 0; }
figure { margin: 0; padding: 10px 12px 8px; background: var(--panel); border-radius: 8px; min-width: 0; }
figcaption { font-size: 13.5px; color: var(--soft); } figcaption strong { color: var(--text); display: block; font-size: 15px; }
svg { display: block; width: 100%; height: auto; font: 11.5px FONTS; }
.grid { stroke: var(--rule); fill: none; stroke-width: 1; } .axis { stroke: var(--soft); fill: none; }
.zero { stroke: var(--soft); stroke-dasharray: 1 3; } .tick, .label { fill: var(--soft); } .label { font-size: 12px; }
.band { fill: var(--band); stroke: none; } .s path { fill: none; stroke: currentColor; stroke-linejoin: round; }
.s .line { stroke-width: 1.9; } .s .thin { stroke-width: .8; opacity: .55; } .s circle { fill: currentColor; }
.name { fill: currentColor; font-weight: 600; }
nav { position: sticky; top: 0; z-index: 1; padding: 8px 0; background: var(--ground); display: flex; flex-wrap: wrap;
  gap: 4px 6px; }
nav button { font: inherit; font-size: 13.5px; color: var(--text); background: none; border: 1px solid var(--rule);
  border-radius: 14px; padding: 2px 11px; cursor: pointer; } nav button[aria-pressed=true] { background: var(--rule); }
nav svg { display: inline-block; width: 26px; height: 10px; vertical-align: middle; margin-right: 6px; }
.dim .s { opacity: .13; } .dim .s.lit { opacity: 1; }
SERIES
@media print { nav { display: none; } figure { break-inside: avoid; } }
"""

_SCRIPT = """
const buttons = [...document.querySelectorAll("nav button")];
buttons.forEach(button => button.addEventListener("click", () => {
  button.setAttribute("aria-pressed", button.getAttribute("aria-pressed") !== "true");
  const chosen = buttons.filter(each => each.getAttribute("aria-pressed") === "true").map(each => each.dataset.series);
  document.body.classList.toggle("dim", chosen.length > 0);
  document.querySelectorAll(".charts .s").forEach(mark => mark.classList.toggle("lit", chosen.includes(mark.dataset.series)));
}));
"""


def page(data: Mapping[str, Any]) -> str:
    """The HTML text. data: of the study, with `about` beside it."""
    names = [recipe["name"] for recipe in data["recipes"]]
    verdicts, costs, runs = tables_of(data)
    parts = [
        f"<h1>{escape(title(data))}</h1>",
        f'<p class="soft">{escape(subtitle(data))}</p>',
        _list(findings(data)),
        "<h2>Verdicts</h2>",
        _table(verdicts, named=True),
        "<details><summary>Rules</summary>",
        _list(rules(data)),
        "</details>",
        "<h2>Curves</h2>",
        f'<p class="soft">{escape(_smoothing(data))}</p>',
        _legend(names),
        f'<div class="charts">{"".join(map(_figure, charts(data)))}</div>',
        *_skipped(data),
        "<h2>Cost and behaviour</h2>",
        _table(costs),
        "<h2>Runs</h2>",
        _table(runs, named=True),
        "<h2>Settings and origin</h2>",
        *_origin(data),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title(data))}</title><style>{_style(len(names))}</style></head>\n"
        f"<body><main>{chr(10).join(parts)}</main>\n<script>{_SCRIPT}</script></body></html>\n"
    )


def charts(data: Mapping[str, Any]) -> list[Chart]:
    """All that have anything to show."""
    found = [
        _losses(data, "training", "Training loss", dots=False),
        _losses(data, "validation", "Validation loss", dots=True),
        _errors(data, "training", "Relative error of training loss", dots=False),
        _errors(data, "validation", "Relative error of validation loss", dots=True),
        _plain(data, "grad_norm", "grad-norm", "Gradient norm", "L2 norm before clipping", logarithmic=True),
        _plain(data, "expert_load_max", "busiest", "Expert balance: the busiest", "tokens over the mean"),
        _plain(data, "expert_load_entropy", "entropy", "Expert balance: entropy", "entropy of the shares, 1 is even"),
        _plain(data, "flushed_share", "flushed", "Values flushed to zero", "share of nonzero values", True, 100, " %"),
        _plain(
            data, "saturated_share", "saturated", "Values beyond the largest code", "share of nonzero values", True, 100, " %"
        ),
    ]
    return [chart for chart in found if chart.svg()]


def _losses(data: Mapping[str, Any], key: str, name: str, dots: bool) -> Chart:
    curves, baseline = data["curves"][key], data["settings"]["baseline"]
    lines: list[Line] = []
    for index, (recipe, each) in enumerate(curves["recipes"].items()):
        free = recipe in diverged(data)
        if len(each["loss_by_seed"]) > 1:
            lines += [Line(index, curves["step"], ys, thin=True, free=free) for ys in each["loss_by_seed"].values()]
        lines.append(Line(index, curves["step"], each["loss"], recipe, dots=dots, free=free))
    band = None
    if curves["band"]:
        middle = curves["recipes"][baseline]["loss"]
        band = curves["step"], _around(middle, curves["band"], -1), _around(middle, curves["band"], 1)
    return Chart(
        key, name, _caption(data, band is not None), "optimizer step", "nats a token", lines, data["settings"]["steps"], band
    )


def _errors(data: Mapping[str, Any], key: str, name: str, dots: bool) -> Chart:
    curves, baseline = data["curves"][key], data["settings"]["baseline"]
    lines: list[Line] = []
    for index, (recipe, each) in enumerate(curves["recipes"].items()):
        if recipe == baseline or each["error"] is None:
            continue
        free = recipe in diverged(data)
        if len(each["error_by_seed"]) > 1:
            pairs = [_times(ys, 100) for ys in each["error_by_seed"].values()]
            lines += [Line(index, curves["step"], ys, thin=True, free=free) for ys in pairs]
        lines.append(Line(index, curves["step"], _times(each["error"], 100), recipe, dots=dots, free=free))
    band = None
    if curves["band"]:
        half = _times(curves["band"], 100)
        band = curves["step"], _times(half, -1), half
    caption = f"Against {baseline} of the same seed. {_caption(data, band is not None)}"
    return Chart(
        f"{key}-error",
        name,
        caption,
        "optimizer step",
        "relative error",
        lines,
        data["settings"]["steps"],
        band,
        zero=True,
        unit=" %",
    )


def _caption(data: Mapping[str, Any], band: bool) -> str:
    parts = []
    if any(len(recipe["runs"]) > 1 for recipe in data["recipes"]):
        parts.append(f"{means(data)[0].upper()}{means(data)[1:]}; thin: each seed.")
    if band:
        parts.append(f"Shaded: the seed-to-seed band of {data['settings']['baseline']}.")
    if diverged(data):
        parts.append(f"The scale leaves out what diverged ({', '.join(diverged(data))}).")
    return " ".join(parts) or "One seed."


def diverged(data: Mapping[str, Any]) -> list[str]:
    """Recipes whose curves may leave a picture."""
    return [recipe["name"] for recipe in data["recipes"] if recipe["verdict"] == "diverged"]


def _plain(
    data: Mapping[str, Any],
    field: str,
    key: str,
    name: str,
    y_label: str,
    logarithmic: bool = False,
    factor: float = 1,
    unit: str = "",
) -> Chart:
    curves, last = data["curves"][field], data["settings"]["steps"]
    named = enumerate(curves["recipes"].items())
    lines = [Line(index, curves["step"], _times(ys, factor), recipe) for index, (recipe, ys) in named]
    scale = ", on a logarithmic scale, which has no place for zero" if logarithmic else ""
    caption = f"{y_label[0].upper()}{y_label[1:]}{scale}; {means(data)}."
    return Chart(key, name, caption, "optimizer step", y_label, lines, last, logarithmic=logarithmic, unit=unit)


def _around(middle: Values, half: Values, sign: int) -> list[float | None]:
    return [None if m is None or h is None else m * (1 + sign * h) for m, h in zip(middle, half, strict=True)]


def _times(ys: Values, factor: float) -> list[float | None]:
    return [None if y is None else factor * y for y in ys]


def _figure(chart: Chart) -> str:
    caption = f"<strong>{escape(chart.title)}</strong>{escape(chart.caption)}"
    return f"<figure><figcaption>{caption}</figcaption>{chart.svg()}</figure>"


def _legend(names: Sequence[str]) -> str:
    buttons = "".join(
        f'<button type="button" aria-pressed="false" data-series="{index}">'
        f'<svg viewBox="0 0 26 10" aria-hidden="true"><g class="s s{index}"><path class="line" d="M0 5H26"/></g></svg>'
        f"{escape(name)}</button>"
        for index, name in enumerate(names)
    )
    return f'<nav aria-label="Recipes; press one to make it stand out in all charts">{buttons}</nav>'


def _smoothing(data: Mapping[str, Any]) -> str:
    window, span = data["settings"]["window"], data["settings"]["band_span"]
    text = "Validation loss, flushed and saturated values are as they were measured."
    if window > 1:
        smoothed = "Training loss, gradient norm and expert balance are means over the last"
        text = f"{smoothed} {window:,} steps, for every run alike, and begin at step {window:,}. {text}"
    return text if data["curves"]["training"]["band"] is None else f"{text} The band looks back over {span:,} steps."


def _skipped(data: Mapping[str, Any]) -> list[str]:
    counts = {recipe["name"]: sum(run["skipped"] for run in recipe["runs"]) for recipe in data["recipes"]}
    if not any(counts.values()):
        return ['<p class="soft">No run skipped a step.</p>']
    listed = ", ".join(f"{name} {count:,}" for name, count in counts.items() if count)
    return [f"<p>Skipped steps, all seeds: {escape(listed)}.</p>"]


def _table(table: Table, named: bool = False) -> str:
    """named: the second column holds words."""
    heads = "".join(f'<th scope="col">{escape(head)}</th>' for head in table.heads)
    rows = []
    for first, *rest in table.rows:
        cells = [f"<td>{_verdict(cell) if named and index == 0 else escape(cell)}</td>" for index, cell in enumerate(rest)]
        rows.append(f'<tr><th scope="row">{escape(first)}</th>{"".join(cells)}</tr>')
    kind = ' class="named"' if named else ""
    note = f"about-{table.title.split()[0].lower()}"
    return (
        f'<p class="note" id="{note}">{escape(table.note)}</p>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.title)}">'
        f'<table{kind} aria-describedby="{note}"><caption>{escape(table.title)}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _verdict(text: str) -> str:
    return f'<span class="verdict {text.split()[0]}">{escape(text)}</span>'


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def _origin(data: Mapping[str, Any]) -> list[str]:
    settings, about = data["settings"], data["about"]
    corpus = settings["corpus"]
    facts = (
        f"Model {settings['model']}. Learning rate {settings['lr']:g}, {settings['warmup']:,} steps of warm-up, schedule "
        f"{settings['schedule']}; sequences of {settings['context']:,} tokens. Corpus sha256 {corpus['sha256'][:16]}, "
        f"{corpus['training_tokens']:,} training and {corpus['validation_tokens']:,} validation tokens."
    )
    if corpus["bigram_loss"] is not None:
        facts += f" A bigram model has {corpus['bigram_loss']:.4f} nats a token on the validation split."
    origin = (
        f"Trained on {'; '.join(about['machines'])}. One seed is one set of initial weights and one order of the data, the "
        f"same for every recipe. Report of {about['date']}, dsv3fp8 {about['dsv3fp8']}."
    )
    commands = "\n".join(about["commands"])
    return [f"<p>{escape(facts)}</p>", f"<p>{escape(origin)}</p>", f'<pre tabindex="0">{escape(commands)}</pre>']


def _style(count: int) -> str:
    colours = [
        " ".join(f"--s{index}: {palette[index % len(palette)]};" for index in range(max(count, 10)))
        for palette in (LIGHT, DARK)
    ]
    series = "\n".join(
        f".s{index} {{ color: var(--s{index}); }} .s{index} .line {{ stroke-dasharray: {_dashes(index)}; }}"
        for index in range(count)
    )
    text = _STYLE.replace("LIGHT", colours[0]).replace("DARK", colours[1]).replace("SERIES", series)
    return text.replace("FONTS", FONTS)


def _dashes(index: int) -> str:
    return "none" if index == 0 else DASHES[(index - 1) % len(DASHES)]
