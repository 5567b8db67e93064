"""Dispatch and combine: from token order to expert order and back.

Rows of an expert are consecutive, ordered by token, and start at a multiple of 128, so that a 128-token tile never
holds two experts. Rows in between are inert: code 0, scale 1, gate weight 0.

Where the experts lie on several ranks, rows travel over a wire: dispatch puts the copies of a rank's tokens in the order of
their experts and sends them, and lays out what arrives; combine goes the same way back, and sums where the tokens are. What
is sent is on its way when `send_…` returns, and there when what that has given is called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Protocol

from torch import Tensor

from dsv3fp8.kernels import moe
from dsv3fp8.kernels.exchange.reference import ROWS, capacity
from dsv3fp8.precision import ledger
from dsv3fp8.precision.tiles import Operand, QuantizedTensor, ceil_div

Arrival = Callable[[], Operand]
Return = Callable[[], Tensor]
"""What waits for something on its way, on a GPU the stream alone, and gives it. To be called once."""


class Wire(Protocol):
    """Between this rank's tokens and the experts of all ranks: n copies of its tokens leave, R copies of any arrive.

    copies: n, on the host. counts: the copies that arrive for each expert of this rank, on the host. copy: int32 [n], in the
    order in which they leave. slot: int32 [T, K], where each choice stands among them; -1 for choices that go nowhere.
    load: int [E], the tokens of this rank for each of all experts.
    """

    @property
    def copies(self) -> int: ...

    @property
    def counts(self) -> list[int]: ...

    @property
    def copy(self) -> Tensor: ...

    @property
    def slot(self) -> Tensor: ...

    @property
    def load(self) -> Tensor: ...

    def send(self, rows: Operand) -> Arrival:
        """[n, D] of this rank's tokens -> [R, D] for its experts, by source rank, then expert, then token; or [n] -> [R]."""
        ...

    def send_back(self, rows: Tensor) -> Return:
        """[R, D] -> [n, D], or [R] -> [n]: the same way back."""
        ...


@dataclass(frozen=True)
class Plan:
    """Where every copy goes: (token, choice), numbered token * K + choice. With a wire, where every copy that arrived goes.

    rows: total rows, a multiple of 128. On a GPU they are as many as any choice of experts may need, so that the host need
    not know the counts; those beyond the last expert's are inert.
    copy: int32 [rows], the copy in each row, -1 in inert rows.
    slot: int32 [T, K], the row of each choice; -1 for choices that go nowhere (padding tokens).
    groups: int64 [rows / 128], the expert of each block of 128 rows; -1 beyond the last.
    blocks: int32 [E + 1], each expert's first block of 128 rows, and the end of the last.
    load: int32 [E], tokens of each expert.
    wire: to the experts of other ranks; E are then those of this rank, T the copies that arrived and K is 1.
    """

    rows: int
    copy: Tensor
    slot: Tensor
    groups: Tensor
    blocks: Tensor
    load: Tensor
    wire: Wire | None = None

    @property
    def here(self) -> Plan | Wire:
        """Where this rank's own copies go first, and come back to: copy, slot and load of its own tokens."""
        return self.wire or self

    @property
    def copies(self) -> int:
        """Copies of this rank's tokens, on the host."""
        return self.wire.copies if self.wire else sum(self.counts)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that it holds."""
        own = (self.copy, self.slot, self.groups, self.blocks, self.load)
        return (*own, self.wire.copy, self.wire.slot, self.wire.load) if self.wire else own

    @cached_property
    def counts(self) -> list[int]:
        """Rows of each expert, on the host: the one place where it waits for a GPU. A wire has read them already."""
        return self.wire.counts if self.wire else self.load.tolist()

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
    return send_rows(x, plan)()


def send_rows(x: Operand, plan: Plan) -> Arrival:
    """Sets out for `dispatch`."""
    return send_copies(moe.dispatch(x, plan.here.copy, plan.here.slot), plan)


def send_copies(rows: Operand, plan: Plan) -> Arrival:
    """Rows in the order in which they leave this rank -> [rows, D] where their experts are."""
    if plan.wire is None:
        return lambda: rows
    on_their_way = plan.wire.send(rows)
    return lambda: moe.dispatch(on_their_way(), plan.copy, plan.slot)


def wire_bytes(rows: Operand, plan: Plan) -> int:
    """Bytes of all copies of this rank's tokens as such rows: codes and scales as stored. Gate weights are not counted."""
    parts = [rows]
    if isinstance(rows, QuantizedTensor):  # one scale for all rows is known to both sides
        parts = [rows.codes] if rows.tile.rows is None else [rows.codes, rows.scale]
    return plan.copies * sum(part.shape[-1] * part.element_size() for part in parts if isinstance(part, Tensor))


def dispatch_copies(x: Tensor, plan: Plan) -> Tensor:
    """One value per (token, choice), [T, K] -> [rows] in expert order; 0 in inert rows."""
    return send_values(x, plan)()


def send_values(x: Tensor, plan: Plan) -> Return:
    """Sets out for `dispatch_copies`."""
    copies = moe.pick(x, plan.here.copy)
    if plan.wire is None:
        return lambda: copies
    on_their_way = plan.wire.send(copies)

    def arrive() -> Tensor:
        arrived = on_their_way()
        assert isinstance(arrived, Tensor)
        return moe.pick(arrived, plan.copy)

    return arrive


def combine(rows: Tensor, plan: Plan, weights: Tensor | None = None) -> Tensor:
    """Sums each token's K rows [rows, D] in fp32, in order of choice, optionally weighted by fp32 [T, K]; one rounding."""
    return combine_here(send_back(rows, plan)(), plan, weights)


def send_back(rows: Tensor, plan: Plan) -> Return:
    """Rows [rows, D] where their experts are -> rows where their tokens are, as `combine_here` reads them."""
    return plan.wire.send_back(moe.combine(rows, plan.slot)) if plan.wire else lambda: rows


def combine_here(rows: Tensor, plan: Plan, weights: Tensor | None = None) -> Tensor:
    """`combine` of rows that `send_back` has given."""
    return moe.combine(rows, plan.here.slot, weights)


def collect_copies(rows: Tensor, plan: Plan) -> Tensor:
    """One value per row -> [T, K]; 0 for choices that went nowhere. Inverse of `dispatch_copies`."""
    return send_values_back(rows, plan)()


def send_values_back(rows: Tensor, plan: Plan) -> Return:
    """Sets out for `collect_copies`."""
    if plan.wire is None:
        return lambda: moe.pick(rows, plan.slot)
    on_their_way = plan.wire.send_back(moe.pick(rows, plan.slot.flatten()))
    return lambda: moe.pick(on_their_way(), plan.here.slot)
