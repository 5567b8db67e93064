"""Two runs of one block, node by node: what computes in another dtype, emits another one, or keeps other bytes."""

from __future__ import annotations

from dataclasses import dataclass

from dsv3fp8.observe.map.observed import Observed, Op


@dataclass(frozen=True)
class Change:
    """One node of one column. here, there: what it computes in and emits, "" where it is not there. Bytes per token."""

    column: str
    node: str
    here: str
    there: str
    kept_here: float
    kept_there: float

    @property
    def equal(self) -> bool:
        return self.here == self.there and self.kept_here == self.kept_there


def compare(this: Observed, other: Observed) -> list[Change]:
    """Every node of either run, in the order this one reported them; those of the other alone come last."""
    keys = dict.fromkeys((*this.ops, *other.ops))
    return [
        Change(
            *key, describe(this.ops.get(key)), describe(other.ops.get(key)),
            _kept(this, key), _kept(other, key),
        )
        for key in keys
    ]  # fmt: skip


def describe(op: Op | None) -> str:
    """`e4m3 → bf16`: what an op computes in and what it emits."""
    if op is None:
        return ""
    emitted = ", ".join(dict.fromkeys(tensor.carried() for tensor in op.outputs))
    return f"{op.computes_in} → {emitted}" if emitted else op.computes_in


def _kept(observed: Observed, key: tuple[str, str]) -> float:
    op = observed.ops.get(key)
    return op.kept_bytes / observed.tokens if op else 0.0
