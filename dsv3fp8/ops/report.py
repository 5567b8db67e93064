"""What several ops tell the ledger in the same way: casts that ride on another op, re-tiled operands, expert rows."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dsv3fp8.precision import ledger
from dsv3fp8.precision.ledger import Node
from dsv3fp8.precision.nodes import GRADIENT_CAST_ON, INPUT_CAST_ON, names
from dsv3fp8.precision.tiles import Operand, QuantizedTensor


def minted(readers: Sequence[str], operands: Sequence[Operand]) -> None:
    """The operands of these linears, cast from a norm's output: the cast rides on the norm."""
    node = ledger.here(INPUT_CAST_ON.get(readers[0], "")) if readers else None
    distinct = [x for i, x in enumerate(operands) if isinstance(x, QuantizedTensor) and all(x is not y for y in operands[:i])]
    if not node or not distinct:
        return
    routed = readers[0] == "expert_gate_up"  # the router reads the BF16 output beside the payload
    name = "payload" if routed else names(readers[0]).input
    dropped = None if routed or len(distinct) < len(set(map(id, operands))) else name
    ledger.amend(node, "forward", {name: distinct}, instead_of=dropped, fused=tuple(x.format.name for x in distinct))


def gradient_cast(node: Node, dy: Tensor | None, along_n: Operand, along_tokens: Operand | None) -> None:
    """dY of a linear, cast for dgrad and wgrad: on the op before it, or as a junction cast of its own (of dy, then)."""
    if not isinstance(along_n, QuantizedTensor):
        return
    dname, host = names(node.name).doutput, GRADIENT_CAST_ON.get(node.name)
    both = [along_n, along_tokens] if along_tokens is not None and along_tokens is not along_n else [along_n]
    if host is None:
        node.at(f"{node.name}.cast").report("backward", along_n, {dname: dy}, {dname: both})
    else:
        tag = along_n.format.name + ("+T" if len(both) == 2 else "")
        ledger.amend(node.at(host), "backward", {dname: both}, instead_of=dname, fused=(tag,))


def retiled(node: Node, name: str, kept: Operand, operand: Operand, suffix: str = "") -> None:
    """A kept operand as wgrad reads it: a box of its own wherever it is not the kept one itself."""
    if operand is not kept:
        node.at(f"{node.name}.requant{suffix}").report("wgrad", operand, {name: kept}, {name: operand})
