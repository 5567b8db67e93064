"""Dispatch and combine: from token order to expert order and back, on one rank.

Rows of an expert are consecutive, ordered by token, and start at a multiple of 128, so that a 128-token tile never
holds two experts. Rows in between are inert: code 0, scale 1, gate weight 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from torch import Tensor

from dsv3fp8.kernels import moe
from dsv3fp8.kernels.exchange.reference import ROWS, capacity
from dsv3fp8.precision import ledger
from dsv3fp8.precision.tiles import Operand, QuantizedTensor, ceil_div


@dataclass(frozen=True)
class Plan:
    """Where every copy goes: (token, choice), numbered token * K + choice.

    rows: total rows, a multiple of 128. On a GPU they are as many as any choice of experts may need, so that the host need
    not know the counts; those beyond the last expert's are inert.
    copy: int32 [rows], the copy in each row, -1 in inert rows.
    slot: int32 [T, K], the row of each choice; -1 for choices that go nowhere (padding tokens).
    groups: int64 [rows / 128], the expert of each block of 128 rows; -1 beyond the last.
    blocks: int32 [E + 1], each expert's first block of 128 rows, and the end of the last.
    load: int32 [E], tokens of each expert.
    """

    rows: int
    copy: Tensor
    slot: Tensor
    groups: Tensor
    blocks: Tensor
    load: Tensor

    @cached_property
    def counts(self) -> list[int]:
        """Rows of each expert, on the host: the one place where it waits for a GPU."""
        return self.load.tolist()

    @property
    def starts(self) -> list[int]:
        """Each expert's first row, on the host."""
        return [0, *accumulate(_whole(count) for count in self.counts[:-1])]

    def exact(self) -> Plan:
        """The same without rows beyond the last expert's."""
        rows = sum(map(_whole, self.counts))
        return replace(self, rows=rows, copy=self.copy[:rows], groups=self.groups[: rows // ROWS])


def _whole(count: int) -> int:
    return ceil_div(count, ROWS) * ROWS


def make_plan(ids: Tensor, experts: int, real: Tensor | None) -> Plan:
    """The plan of expert ids [T, K], different for one token; tokens with real False are sent nowhere.

    Exact where nothing need wait for the counts, on the CPU, and where a ledger counts bytes.
    """
    rows = capacity(ids.shape[0], ids.shape[1], experts)
    plan = Plan(rows, *moe.lay_out(ids, experts, real, rows))
    return plan if ids.device.type == "cuda" and ledger.active() is None else plan.exact()


def dispatch(x: Operand, plan: Plan) -> Operand:
    """Rows of x [T, D] in expert order, [rows, D]: codes and scales as they are, nothing is rounded on the way."""
    return moe.dispatch(x, plan.copy, plan.slot)


def wire_bytes(rows: Operand, plan: Plan) -> int:
    """Bytes of the live rows [rows, D]: codes and their scales as stored. Gate weights and indices are not counted."""
    parts = [rows]
    if isinstance(rows, QuantizedTensor):  # one scale for all rows is known to both sides
        parts = [rows.codes] if rows.tile.rows is None else [rows.codes, rows.scale]
    return sum(plan.counts) * sum(part.shape[-1] * part.element_size() for part in parts if isinstance(part, Tensor))


def dispatch_copies(x: Tensor, plan: Plan) -> Tensor:
    """One value per (token, choice), [T, K] -> [rows] in expert order; 0 in inert rows."""
    return moe.pick(x, plan.copy)


def combine(rows: Tensor, plan: Plan, weights: Tensor | None = None) -> Tensor:
    """Sums each token's K rows [rows, D] in fp32, in order of choice, optionally weighted by fp32 [T, K]; one rounding."""
    return moe.combine(rows, plan.slot, weights)


def collect_copies(rows: Tensor, plan: Plan) -> Tensor:
    """One value per row -> [T, K]; 0 for choices that went nowhere. Inverse of `dispatch_copies`."""
    return moe.pick(rows, plan.slot)
