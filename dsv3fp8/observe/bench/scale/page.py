"""The page of a run over many GPUs, from its JSON alone."""

from __future__ import annotations

from typing import Any

from dsv3fp8.observe.bench.page import MISSING, Shown
from dsv3fp8.observe.bench.scale.exchange import PLAIN
from dsv3fp8.observe.bench.scale.layouts import ONE
from dsv3fp8.observe.bench.scale.traffic import GATHER, REDUCE, ROWS, SCATTER

TITLES = {"launched": "launched kernel by kernel", "graph": "replayed from a CUDA graph"}
PLANNED = (REDUCE, SCATTER, GATHER, *ROWS)
"""What `plan` counts."""
NOTHING = {"calls": 0, "payload": 0, "sent": 0.0}


def page(data: dict[str, Any]) -> str:
    """Markdown."""
    about, settings = data["about"], data["settings"]
    packages = ", ".join(f"{name} {version}" for name, version in about["packages"].items() if version)
    devices = f"{about['devices']} × " if about["devices"] > 1 else ""
    size = (
        f"`{settings['model']}`, vocabulary {settings['vocabulary']:,}; each GPU reads {settings['accumulate']} × "
        f"{settings['batch']} sequences of {settings['context']:,} tokens a step, however many there are."
    )
    head = [
        f"# bench {about['kind']}", "",
        f"{about['started'][:10]} · {devices}{about['device']} · {packages} · commit {about['commit'] or 'unknown'}", "",
        f"    {about['command']}", "",
        f"{size} Medians of {about['rounds']} rounds of three steps after a warm-up, of the slowest rank; one run of "
        f"{about['seconds']:.0f} s.", "",
    ]  # fmt: skip
    failed = [f"{_name(row)}: {row['failed']}" for row in data["rows"] if row["failed"]]
    tables = [_rates(data, mode) for mode in TITLES if any(mode in row["modes"] for row in data["rows"])]
    tables += [_memory(data), _wire(data), _bytes(data), *(_exchange(entry) for entry in data["exchange"])]
    body = [table.markdown() for table in tables if table.rows]
    return "\n".join([*head, *(f"- {note}" for note in (*data["notes"], *failed)), "", *body])


def _rates(data: dict[str, Any], mode: str) -> Shown:
    rows, why = [], []
    alone = {row["recipe"]: _found(row, mode) for row in data["rows"] if row["name"] == str(ONE)}
    for row in data["rows"]:
        found, plan = row["modes"].get(mode), row["plan"]
        if found is None:
            continue
        if found["failed"]:
            why.append(f"{_name(row)}: {found['failed']}")
            continue
        one, rate = alone.get(row["recipe"]), found["tokens_per_second"]
        share = _share(rate / row["gpus"], None if one is None else one["tokens_per_second"])
        planned = None if plan["failed"] else plan["seconds"]
        rows.append(
            [
                _name(row), f"{rate:,.0f}", share, f"{1e3 * found['seconds']:,.1f}", _number(planned, 1e3, ".1f"),
                _deviation(planned, found["seconds"]), _number(row["imbalance"], 1, ".2f"),
            ]
        )  # fmt: skip
    heads = [
        mode, "tokens/s", "efficiency", "ms a step", "planned, ms", "plan against it", "load of the fullest GPU"
    ]  # fmt: skip
    about = (
        f"Steps {TITLES[mode]}. Efficiency: tokens/s of a GPU against one GPU alone under the same recipe, taken likewise. "
        "Load: rows that come to the GPU whose experts get most, over the mean; the plan is made for it."
    )
    return Shown(f"Steps, {TITLES[mode]}", heads, rows, [about, *why])


def _memory(data: dict[str, Any]) -> Shown:
    rows = []
    for row in data["rows"]:
        launched, graph = _found(row, "launched"), _found(row, "graph")
        peak, replayed = (found["peak"] if found else None for found in (launched, graph))
        if peak is None and replayed is None:
            continue
        planned = None if row["plan"]["failed"] else row["plan"]["memory"]
        reserved = launched["reserved"] if launched else None
        rows.append(
            [
                _name(row), _number(peak, 1e-9, ".2f"), _number(planned, 1e-9, ".2f"), _deviation(planned, peak),
                _number(reserved, 1e-9, ".2f"), _number(replayed, 1e-9, ".2f"),
            ]
        )  # fmt: skip
    heads = ["memory of a GPU, GB", "allocated at most", "planned", "plan against it", "reserved", "with a graph, allocated"]
    about = "By torch's allocator, of the fullest GPU, weights and moments included. What a graph keeps is not planned."
    return Shown("Memory", heads, rows, [about])


def _wire(data: dict[str, Any]) -> Shown:
    rows = []
    found = [(row, *each) for row in data["rows"] if row["gpus"] > 1 for each in row["wire"].items()]
    for row, mode, wire in found:
        if not wire["span_ms"]:
            continue
        planned = None if row["plan"]["failed"] else row["plan"]["wire_seconds"]
        rows.append(
            [
                f"{_name(row)}, {mode}", f"{wire['span_ms']:.1f}", f"{wire['compute_ms']:.1f}", f"{wire['wire_ms']:.1f}",
                _share(wire["wire_ms"], wire["span_ms"]), _share(wire["hidden_ms"], wire["wire_ms"]),
                _number(wire["moving_ms"], 1, ".1f"), _number(planned, 1e3, ".1f"),
            ]
        )  # fmt: skip
    heads = [
        "a profiled step", "ms", "computing, ms", "on the wire, ms", "of the step", "of that behind computing",
        "without waiting, ms", "planned, ms",
    ]  # fmt: skip
    about = (
        "One step under the profiler on all ranks at once, means over the ranks: the wire is NCCL's kernels, which also wait "
        "for the rank that comes last; without waiting, the least time of each kernel over the ranks."
    )
    return Shown("On the wire", heads, rows, [about])


def _bytes(data: dict[str, Any]) -> Shown:
    rows, beside = [], 0.0
    for row in data["rows"]:
        traffic, planned = row["traffic"], {} if row["plan"]["failed"] else row["plan"]["payload"]
        beside = max(beside, sum(found["payload"] for what, found in traffic.items() if what not in PLANNED))
        for what in PLANNED if traffic else ():
            found, told = traffic.get(what, NOTHING), planned.get(what)
            if found is NOTHING and told is None:
                continue
            timed = row["by_what"].get(what)
            rows.append(
                [
                    f"{_name(row)}: {what}", f"{found['calls']:,}", f"{found['payload']:,.0f}", _number(told, 1, ".0f"),
                    _deviation(told, found["payload"]), f"{found['sent']:,.0f}", _number(timed and timed["ms"], 1, ".2f"),
                    _number(timed and timed["sent"] / timed["ms"], 1e-6, ".0f"),
                ]
            )  # fmt: skip
    heads = [
        "bytes of a step and GPU", "calls", "payload", "planned", "plan against it", "leave the GPU", "ms", "GB/s"
    ]  # fmt: skip
    about = (
        "Counted where torch dispatches each collective, means over the ranks. A sum over ranks counts twice, as it goes round "
        "twice. ms and GB/s: kernels of the profiled launched step without waiting, and what leaves the GPU in that time."
    )
    return Shown(
        "Bytes", heads, rows, [about, f"beside these {beside:,.0f} bytes at most: counts, gate weights, losses, loads"]
    )


def _exchange(entry: dict[str, Any]) -> Shown:
    size, ways = entry["size"], entry["ways"]
    plain = ways[PLAIN]["ms"]
    rows = [
        [name, f"{way['ms']:.3f}", f"{plain / way['ms']:.2f}", f"{way['sent']:,}", f"{way['rate']:,.0f}"]
        for name, way in ways.items()
    ]
    about = (
        f"{size['tokens']:,} tokens of {size['dim']} on each GPU, each to {size['top_k']} of {size['experts']} experts, which "
        "random ids choose evenly. GB/s: what leaves the GPU over the time of all of it, gathering and laying out rows too."
    )
    notes = [about]
    if not all(way["captured"] for way in ways.values()):
        notes.append("launched by the host, whose time counts")
    heads = [f"{entry['gpus']} GPUs", "ms", "times the speed of BF16's dispatch", "bytes that leave a GPU", "GB/s"]
    return Shown(f"Dispatch and combine of {size['name']}, {entry['gpus']} expert ranks", heads, rows, notes)


def _name(row: dict[str, Any]) -> str:
    return f"{row['recipe']}, {row['name']}"


def _found(row: dict[str, Any], mode: str) -> dict[str, Any] | None:
    found = row["modes"].get(mode)
    return None if found is None or found["failed"] else found


def _number(value: float | None, times: float, form: str) -> str:
    return MISSING if value is None else f"{value * times:,{form}}"


def _share(part: float, whole: float | None) -> str:
    return f"{100 * part / whole:.0f} %" if whole else MISSING


def _deviation(planned: float | None, measured: float | None) -> str:
    return f"{100 * (planned / measured - 1):+.1f} %" if planned is not None and measured else MISSING
