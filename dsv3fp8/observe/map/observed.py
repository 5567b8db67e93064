"""What the ledger of one block says, looked up by column and node: the only place dtypes in the drawing come from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dsv3fp8.observe.map.layout import Box, Chip
from dsv3fp8.precision.ledger import OpRecord, TensorRecord

FP8 = ("e4m3", "e5m2")


@dataclass(frozen=True)
class Tensor(TensorRecord):
    """One tensor as it lay in memory; of its bytes, rows that belong to no token are left out."""

    def carried(self) -> str:
        """Such as `e4m3 1×128` or `bf16`."""
        return f"{self.format} {self.tile.replace('x', '×')}" if self.tile else self.format

    def in_full(self) -> str:
        """Such as `e4m3 1×128, pow2 scales`."""
        return f"{self.carried()}, {self.scale} scales" if self.scale else self.carried()


@dataclass(frozen=True)
class Op(OpRecord):
    """One op as it ran."""

    operands: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    kept: tuple[Tensor, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        return self.column, self.node

    def joined(self, more: Op) -> Op:
        """This op and another report of the same node, such as the re-tiling of the other operand."""
        names = ("operands", "outputs", "kept")
        both = {name: getattr(self, name) + getattr(more, name) for name in names}
        return replace(self, wire=self.wire + more.wire, fused=self.fused + more.fused, **both)

    @property
    def kept_bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.kept if not tensor.again)


class Observed:
    """The records of one block. tokens: how many the block ran on; layer: dense or moe."""

    def __init__(self, ops: Iterable[Op], tokens: int, layer: str, recipe: str, model: str) -> None:
        self.ops: dict[tuple[str, str], Op] = {}
        for op in ops:
            known = self.ops.get(op.key)
            self.ops[op.key] = known.joined(op) if known else op
        self.tokens, self.layer, self.recipe, self.model = tokens, layer, recipe, model

    @staticmethod
    def from_records(records: Iterable[Mapping[str, Any]], tokens: int, layer: str, recipe: str, model: str) -> Observed:
        """records: the plain containers of the ledger's JSON, of one block."""
        return Observed((_op(record) for record in records), tokens, layer, recipe, model)

    @property
    def latent(self) -> bool:
        return ("forward", "q_b") in self.ops

    @property
    def shared(self) -> bool:
        return ("forward", "shared_gate_up") in self.ops

    def op(self, column: str, box: Box) -> Op | None:
        return self.ops.get((column, box.node))

    def expects(self, column: str, box: Box) -> bool:
        """Whether this recipe's run must have reported the box."""
        if box.when in ("wgrad", "dgrad"):
            gemm = self.ops.get(("wgrad" if box.when == "wgrad" else "backward", box.of))
            cast = gemm is not None and gemm.computes_in in FP8
            return self.op(column, box) is not None or (cast and (box.when == "dgrad" or self._needs_retiling(box)))
        return box.when == "always" or self.op(column, box) is not None

    def _needs_retiling(self, box: Box) -> bool:
        """Whether the codes that fprop (of dY: dgrad) read have scales of single rows, of no use along the tokens."""
        reader = self.ops.get(("backward" if box.node.endswith("_dy") else "forward", box.of))
        tile = reader.operands[0].tile if reader and reader.operands else None
        return tile is not None and tile.startswith("1x")

    def tensor(self, chip: Chip) -> Tensor | None:
        """The chip's tensor: as the first op emitted, kept or read it; of two orientations the one for dgrad."""
        return next(iter(self.orientations(chip)), None)

    def orientations(self, chip: Chip) -> list[Tensor]:
        """The chip's tensor in each of the tilings that its op reported: two where it serves dgrad and wgrad."""
        for column, node in (place.split("/") for place in chip.nodes):
            op = self.ops.get((column, node))
            for tensors in (op.outputs, op.kept, op.operands) if op else ():
                for name in chip.names:
                    found = [tensor for tensor in tensors if tensor.name == name]
                    if found:
                        return found
        return []

    def kept(self, chip: Chip) -> Tensor | None:
        """The chip's tensor as it was kept for backward; None if it was not, or is made again from what another op keeps."""
        for column, node in (place.split("/") for place in chip.nodes):
            op = self.ops.get((column, node))
            found = [tensor for tensor in op.kept if tensor.name in chip.names and not tensor.again] if op else []
            if found:
                return found[0]
        return None

    def kept_bytes(self) -> float:
        """Bytes kept per token by the whole block."""
        return sum(op.kept_bytes for op in self.ops.values()) / self.tokens


def _op(record: Mapping[str, Any]) -> Op:
    tensors = {name: tuple(map(_tensor, record[name])) for name in ("operands", "outputs", "kept", "held")}
    return Op(**{**record, **tensors, "fused": tuple(record["fused"])})


def _tensor(record: Mapping[str, Any]) -> Tensor:
    size = record["bytes"] - record["padding"]
    return Tensor(**{**record, "shape": tuple(record["shape"]), "bytes": size, "padding": 0})
