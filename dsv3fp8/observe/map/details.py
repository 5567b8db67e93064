"""What is known about one box or chip, in full: the text behind hover and focus."""

from __future__ import annotations

from dsv3fp8.observe.map.geometry import COLUMN_NAMES, Drawing, Placed
from dsv3fp8.observe.map.layout import Box
from dsv3fp8.observe.map.observed import Op, Tensor


def detail_lines(drawing: Drawing, cell: Placed) -> list[str]:
    """Name first, then dtype, tile, scale kind, shape, bytes, backend and source, and the run compared with."""
    tokens = drawing.observed.tokens
    if isinstance(cell.cell, Box):
        lines = [f"{cell.cell.node}, {COLUMN_NAMES[cell.column]}"]
        lines += _op(cell.op, tokens) if cell.op else ["NOT REPORTED by the ledger, though this recipe needs it"]
        if drawing.other is not None:
            lines += [f"under {drawing.other.recipe}:"]
            lines += [f"  {line}" for line in (_op(cell.other_op, tokens) if cell.other_op else ["not there"])]
        return [*lines, f"source: {_source(cell.cell.source)}"]
    lines = [f"{cell.cell.label} ({cell.tensor.name if cell.tensor else cell.cell.names[0]})"]
    lines += [tensor_line(cell.tensor, tokens)] if cell.tensor else ["NOT REPORTED by the ledger"]
    if cell.kept:
        lines.append(f"kept for backward: {tensor_line(cell.kept, tokens)}")
    if drawing.other is not None:
        lines.append(
            f"under {drawing.other.recipe}: {tensor_line(cell.other_tensor, tokens) if cell.other_tensor else 'not there'}"
        )
        if cell.other_kept:
            lines.append(f"  kept for backward: {tensor_line(cell.other_kept, tokens)}")
    return [*lines, f"reported by {', '.join(cell.cell.nodes)}"]


def tensor_line(tensor: Tensor, tokens: int) -> str:
    shape = "×".join(map(str, tensor.shape))
    return f"{tensor.in_full()} [{shape}], {tensor.bytes:,} bytes, {tensor.bytes / tokens:,.1f} per token"


def _op(op: Op, tokens: int) -> list[str]:
    lines = [f"computes in {op.computes_in}, backend {op.backend}"]
    if op.fused:
        lines.append(f"casts riding on it: {', '.join(op.fused)}")
    for word, tensors in (("reads", op.operands), ("emits", op.outputs), ("keeps", op.kept)):
        lines += [f"{word} {tensor.name}: {tensor_line(tensor, tokens)}" for tensor in tensors]
    if op.wire:
        lines.append(f"on the wire: {op.wire:,} bytes, {op.wire / tokens:,.1f} per token")
    return lines


def _source(source: str) -> str:
    words = [f"DeepSeek-V3 report {part}" if part.startswith("§") else part for part in source.split()]
    return ", ".join("~ inferred, the report does not say" if word == "~" else word for word in words)
