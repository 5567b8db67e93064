"""The study as one Markdown page: what the draft claims against what was measured, then every table with its figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dsv3fp8.observe.drift.known import SOURCE
from dsv3fp8.observe.drift.tables import Table

ALT = {
    "length": "error against K, one chain and promoted, U(0,1) and N(0,1), and the share of it that is bias",
    "interval": "error against the promotion interval",
    "cause": "error of one chain, truncated and rounded to nearest",
    "operands": "error of sums of a checkpoint's operands, one chain and promoted",
    "mechanisms": "error of tile and tensor scales, promoted and not",
    "outliers": "flushed share and error beside an outlier channel, tile and tensor scales",
}


def page(data: Mapping[str, Any], tables: Sequence[Table], figures: Sequence[str]) -> str:
    """The text of drift.md. figures: names of the PNG files that lie beside it."""
    about = data["about"]
    parts = [
        "# Drift of partial sums",
        f"{about['date']}, {about['device']}, {about['threads']} CPU threads, torch {about['torch']}, "
        f"commit {_commit(about['commit'])}, {about['seconds']:.0f} s. Size {about['size']}, seed {about['seed']}. Written by",
        f"    {about['command']}",
        *(_sentence(note) for note in data["notes"]),
        "## What the figures say to the draft's claims",
        "The project began from a draft on partial sums. Its claims in our words, a rule for each, and what the "
        "tables below give under it. Errors are relative rms errors unless they say otherwise.",
        *_claims(data["claims"]),
    ]
    drawn: set[str] = set()
    for table in tables:
        parts.append(f"## {table.title}")
        if table.name in figures and table.name not in drawn:
            parts.append(f"![{ALT[table.name]}]({table.name}.png)")
            drawn.add(table.name)
        parts += [table.note, table.markdown()]
    parts.append(known_summary(data["known"]))
    return "\n\n".join(parts) + "\n"


def _claims(claims: Sequence[Mapping[str, str]]) -> list[str]:
    lines = ["| claim | verdict |", "|---|---|", *(f"| {c['claim']} | **{c['verdict']}** |" for c in claims)]
    details = [f"- **{c['name']}: {c['verdict']}.** {_sentence(c['numbers'])} *Rule:* {c['rule']}." for c in claims]
    return ["\n".join(lines), "\n".join(details)]


def _commit(commit: str | None) -> str:
    return f"`{commit}`" if commit else "unknown (not run from a git checkout)"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def known_summary(known: Sequence[Mapping[str, Any]]) -> str:
    """One paragraph: how many of the known figures are met."""
    measured = [row for row in known if row["ours"] is not None]
    missed = [row for row in measured if not row["within"]]
    text = f"{len(measured) - len(missed)} of {len(measured)} {SOURCE} are met within 20 %"
    if missed:
        text += "; not " + ", ".join(f"“{row['what']}” ({row['ratio']:.2f} times)" for row in missed)
        for conditions in dict.fromkeys(row["conditions"] for row in missed if row["conditions"]):
            counts = {row["outputs"] for row in missed if row["conditions"] == conditions and row["outputs"]}
            ours = f"; ours have {' and '.join(f'{n:,}' for n in sorted(counts, reverse=True))} outputs" if counts else ""
            text += f". {conditions}{ours}"
    if len(measured) < len(known):
        text += f". {len(known) - len(measured)} more need a Hopper GPU"
    return text + "."
