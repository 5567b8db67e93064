"""The map as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from dsv3fp8.observe.map.difference import Change
from dsv3fp8.observe.map.geometry import Drawing
from dsv3fp8.observe.map.observed import Observed, Tensor

COLUMNS = {"forward": "Forward", "backward": "Backward, from the output up", "wgrad": "Weight gradients"}


def map_table(observed: Observed) -> str:
    """Every op that was reported, in order, by column."""
    heads = ("node", "computes in", "reads", "emits", "kept B/token", "backend")
    rows: list[Sequence[str]] = []
    for column, name in COLUMNS.items():
        rows.append((name, *[""] * 5))
        for op in observed.ops.values():
            if op.column == column:
                kept = f"{op.kept_bytes / observed.tokens:,.1f}" if op.kept_bytes else ""
                rows.append((f"  {op.node}", op.computes_in, _carried(op.operands), _carried(op.outputs), kept, op.backend))
    rows.append(("kept by the block", "", "", "", f"{observed.kept_bytes():,.1f}", ""))
    return _aligned(heads, rows, right=(4,))


def difference_table(changes: list[Change], this: Observed, other: Observed) -> str:
    """The nodes that differ, with bytes kept per token, and the sums of all nodes."""
    heads = ("node", "column", this.recipe, other.recipe, "kept B/token", other.recipe)
    rows: list[Sequence[str]] = [
        (c.node, c.column, c.here or "—", c.there or "—", _size(c.kept_here), _size(c.kept_there))
        for c in changes
        if not c.equal
    ]
    equal = sum(change.equal for change in changes)
    share = f" ({this.kept_bytes() / other.kept_bytes():.3f} of it)" if other.kept_bytes() else ""
    rows.append(("kept by the block", "", "", "", f"{this.kept_bytes():,.1f}", f"{other.kept_bytes():,.1f}{share}"))
    return f"{_aligned(heads, rows, right=(4,))}\n{equal} more nodes are the same under both."


def missing_notice(drawing: Drawing) -> str:
    """One line with what the ledger should have reported and did not, "" if nothing."""
    if not drawing.missing:
        return ""
    return f"MISSING from the ledger: {', '.join(drawing.missing)}. The drawing shows them in red."


def _carried(tensors: tuple[Tensor, ...]) -> str:
    return " · ".join(dict.fromkeys(tensor.carried() for tensor in tensors))


def _size(value: float) -> str:
    return f"{value:,.1f}" if value else ""


def _aligned(heads: Sequence[str], rows: list[Sequence[str]], right: tuple[int, ...]) -> str:
    widths = [max(len(row[i]) for row in (heads, *rows) if row[1] or row[4] or i) for i in range(len(heads))]
    lines = []
    for row in (heads, ["─" * width for width in widths], *rows):
        cells = [text.rjust(w) if i in right else text.ljust(w) for i, (text, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
