"""The tables of a run, for the terminal and as a Markdown page, from the JSON alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv3fp8.errors import UserError
from dsv3fp8.observe.bench.rates import TIMES
from dsv3fp8.observe.output import writable_directory

MISSING = "–"


@dataclass(frozen=True)
class Shown:
    """A table as text. notes: what its marks mean."""

    title: str
    heads: list[str]
    rows: list[list[str]]
    notes: list[str]

    def markdown(self) -> str:
        lines = [f"## {self.title}", "", *self.notes[:1], "", _line(self.heads), "|---" + "|--:" * (len(self.heads) - 1) + "|"]
        lines += [_line(row) for row in self.rows]
        return "\n".join([*lines, "", *(f"- {note}" for note in self.notes[1:])]).rstrip() + "\n"


def shown(data: dict[str, Any]) -> list[Shown]:
    """Every table of the run."""
    tables = [_rates(table) for table in data["tables"]]
    if data.get("roofline"):
        tables.append(_roofline(data["roofline"]))
    for name, found in data["breakdowns"].items():
        if "kernels" in found:  # else a note says why
            tables += [_kinds(name, found), _kernels(name, found)]
    return tables


def page(data: dict[str, Any]) -> str:
    """The Markdown page of one run."""
    about = data["about"]
    packages = ", ".join(f"{name} {version}" for name, version in about["packages"].items() if version)
    head = [
        f"# bench {about['kind']}", "",
        f"{about['started'][:10]} · {about['device']} · {packages} · commit {about['commit'] or 'unknown'}", "",
        f"    {about['command']}", "",
        f"Medians of {about['rounds']} rounds in which all ways of a row take turns, in one run of {about['seconds']:.0f} s.",
        "In brackets: times the speed of the peer named above the table. † the host launches each kernel, and its time counts.",
        "",
    ]  # fmt: skip
    return "\n".join([*head, *(f"- {note}" for note in data["notes"]), "", *(table.markdown() for table in shown(data))])


def rewrite(directory: Path, pages_of: Mapping[str, Callable[[dict[str, Any]], str]]) -> list[Path]:
    """The page of every run whose JSON lies in a directory, beside it; JSON of other things is left alone.

    pages_of: what makes the page of each kind. UserError, before any is written, for what cannot be read or lacks something.
    """
    pages: dict[Path, bytes] = {}
    for source in sorted(path for path in directory.glob("*.json") if path.is_file()):
        found = _read(source)
        about = found.get("about") if isinstance(found, dict) else None
        if not isinstance(about, dict) or about.get("kind") not in [*pages_of]:
            continue
        try:
            pages[source.with_suffix(".md")] = pages_of[about["kind"]](found).encode()
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            said = f"it has no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())[:160]
            raise UserError(f"{source} is no whole bench {about['kind']}: {said}; {_REMEDY}") from error
    if not pages:
        raise UserError(f"out={directory}: there is no JSON of a bench in it; give the directory that one was written to")
    writable_directory(directory, *(target.name for target in pages))
    for target, text in pages.items():
        target.write_bytes(text)
    return [*pages]


_REMEDY = "measure it again, or move the file to another directory"


def _read(source: Path) -> Any:
    try:
        return json.loads(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{source} cannot be read: {error.strerror}; {_REMEDY}") from error
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise UserError(f"{source} is not JSON: {error}; {_REMEDY}") from error


def _rates(table: dict[str, Any]) -> Shown:
    names = list(dict.fromkeys(name for case in table["cases"] for name in case["ways"]))
    peer, unit = table["peer"], table["unit"]
    rows, why = [], []
    for case in table["cases"]:
        rows.append([case["case"], *(_cell(case["ways"].get(name), name == peer, unit) for name in names)])
        if case["failed"]:
            why.append(f"{case['case']}: {case['failed']}")
        why += [f"{case['case']}, {name}: {way['failed']}" for name, way in case["ways"].items() if way["failed"]]
    for name in names:  # one backend for all rows is said once
        notes = {case["ways"][name]["note"] for case in table["cases"] if name in case["ways"]} - {""}
        why += [f"{name}: {note}" for note in sorted(notes)]
        hosts = {case["ways"][name]["host_included"] for case in table["cases"] if name in case["ways"]} - {""}
        why += [f"† {name}: {host}" for host in sorted(hosts)]
    heads = [table["name"], *(f"{name}, {unit}" for name in names)]
    against = f"; peer: {peer}" if peer in names and len(names) > 1 else ""
    return Shown(table["title"], heads, rows, [f"{table['about']}{against}.", *why])


def _cell(way: dict[str, Any] | None, is_peer: bool, unit: str) -> str:
    if way is None or way["rate"] is None:
        return MISSING
    text = f"{way['rate']:,.2f}" if unit in TIMES else f"{way['rate']:,.0f}"
    if way["ratio"] is not None and not is_peer:
        text += f" ({way['ratio']:.2f})"
    return text + ("†" if way["host_included"] else "")


def _roofline(found: dict[str, Any]) -> Shown:
    once = found["once_a_step"]
    total = {"part": "all of them", "work": "", "rates": "", "ms": found["ms"]}
    rows = [[part["part"], part["work"], part["rates"], _ms(part["ms"])] for part in (*found["parts"], total)]
    notes = [
        "A yardstick, not a bound: GEMMs at the best rate of each in this run (fprop / dgrad / wgrad), attention at cuDNN's "
        "time, each measured alone, and what lies between them at the rate of a copy: forward + backward under dsv3.",
        *(f"{name}: {_ms(s['ms'])} ms, {_percent(s['share'])} of the roofline" for name, s in found["shares"].items()),
        f"once an optimizer step and not in the sum: {once['part']}, {once['work']}, {_ms(once['ms'])} ms",
    ]
    return Shown("Roofline of the layer", ["part", "work", "TFLOP/s, GB/s", "ms"], rows, notes)


def _ms(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return MISSING if value is None else f"{100 * value:.0f} %"


def _kinds(name: str, found: dict[str, Any]) -> Shown:
    rows = [[kind, f"{part['ms']:.2f}", f"{100 * part['share']:.1f} %"] for kind, part in found["kinds"].items()]
    facts = [f"{found['launches']:,} kernel launches, {found['copies_and_fills']:,} copies and fills"]
    if found["busy_share"] is not None:
        facts.append(f"a kernel runs in {100 * found['busy_share']:.0f} % of the time ({found['busy_ms']:.2f} ms)")
    if found.get("peak_gb") is not None:
        facts.append(f"{found['peak_gb']:.1f} GB allocated at most, above what lies there before")
    if found.get("kept_bytes_per_token") is not None:
        facts.append(f"{found['kept_bytes_per_token']:,.0f} bytes a token kept for backward")
    return Shown(f"{name}: time by kind", ["kind", "ms", "share"], rows, ["; ".join(facts) + "."])


def _kernels(name: str, found: dict[str, Any]) -> Shown:
    rows = []
    for kernel in found["kernels"]:
        called = f"`{kernel['name']}`".replace("|", "\\|")
        rows.append([called, kernel["kind"], str(kernel["count"]), f"{kernel['ms']:.2f}", f"{100 * kernel['share']:.1f} %"])
    note = f"the longest, {100 * found['shown_share']:.0f} % of {found['kernel_ms']:.2f} ms of kernels."
    return Shown(f"{name}: time by kernel", ["kernel", "kind", "count", "ms", "share"], rows, [note])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
