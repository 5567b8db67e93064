"""A plan as text for the terminal, from its JSON alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

NAMES = {
    "masters": "master weights, FP32", "moments": "moments of AdamW", "codes": "weights as GEMMs read them",
    "gradients": "gradients, FP32", "stash": "kept for backward", "transient": "work, gathered weights, gradients on their way",
}  # fmt: skip
TIMES = {
    "gemm": "GEMMs", "attention": "attention", "passes": "all else between them", "update": "norm, AdamW, casts",
    "exposed": "wire, not hidden", "hidden": "(wire, hidden)",
}  # fmt: skip


def plan_text(data: dict[str, Any]) -> str:
    """Every table of a plan, then what it assumed."""
    parallel, gpus = data["parallel"], f"{data['gpus']} GPU{'s' if data['gpus'] > 1 else ''}"
    head = (
        f"{data['model']} under {data['recipe']}: {data['parameters'] / 1e9:,.2f} B parameters on {gpus} "
        f"(dp_replicate {parallel['dp_replicate']}, dp_shard {parallel['dp_shard']}, expert {parallel['expert']})\n"
        f"a step: {data['tokens']:,} tokens, of a GPU {data['accumulate']} × {data['tokens_of_gpu']:,}"
    )
    notes = "\n".join(f"note: {note}" for note in data["notes"])
    return "\n\n".join(part for part in (head, _memory(data["memory"]), _wire(data["wire"]), _time(data), notes) if part)


def _memory(memory: dict[str, Any]) -> str:
    rows = [(NAMES[part], _gb(size), _gb(memory["whole"][part])) for part, size in memory["peak"].items()]
    rows.append((f"peak, at the {memory['moment']}", _gb(memory["total"]), ""))
    rows.append(("a GPU has", _gb(memory["limit"]), ""))
    return aligned(("memory of a GPU, GB", "at the peak", "at most"), rows)


def _wire(wire: list[dict[str, Any]]) -> str:
    if not wire:
        return ""
    rows: list[Sequence[str]] = [
        (t["what"], f"{t['size']} ({t['local']})", _gb(t["payload"]), _gb(t["sent"]), _gb(t["network"]), _ms(t["seconds"]))
        for t in wire
    ]
    rows.append(("sum", "", *(_gb(sum(t[key] for t in wire)) for key in ("payload", "sent", "network")), ""))
    heads = ("on the wire, GB a step and GPU", "GPUs (of a node)", "payload", "leaves the GPU", "leaves the node", "ms")
    return aligned(heads, rows)


def _time(data: dict[str, Any]) -> str:
    time, rates = data["time"], data["rates"]
    rows = [(name, _ms(time[key])) for key, name in TIMES.items() if time[key] or key not in ("hidden", "exposed")]
    rows.append(("step", _ms(time["step"])))
    rows.append(("tokens/s", f"{time['tokens_per_second']:,.0f}"))
    rows.append(("tokens/s of a GPU", f"{time['tokens_per_second'] / data['gpus']:,.0f}"))
    lines = aligned(("time of a step, ms", ""), rows)
    return (
        f"{lines}\n"
        f"rates: {rates['gemm']:,.0f} TFLOP/s in GEMMs, {rates['attention']:,.0f} in attention, {rates['passes']:,.0f} GB/s "
        f"between them, from {rates['source']};\n"
        f"head {rates['head']:,.0f} TFLOP/s, copy {rates['copy']:,.0f} GB/s; NVLink {rates['nvlink']:,.0f} and network "
        f"{rates['network']:,.0f} GB/s a GPU and direction"
    )


def aligned(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns under their heads; all but the first to the right."""
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    lines = []
    for row in (heads, ["─" * width for width in widths], *rows):
        cells = [text.rjust(width) if i else text.ljust(width) for i, (text, width) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _gb(size: float) -> str:
    return f"{size / 1e9:,.3f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"
