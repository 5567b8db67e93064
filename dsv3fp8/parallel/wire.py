"""The wire between tokens and experts: codes and scales as bytes, from every rank of a group to every other one.

Rank r of a group of P has experts r * E / P and on. Copies leave in the order of their experts, which is that of the ranks,
and arrive by source rank, then expert, then token; `make_plan` sorts them by expert, so that within one the order is source
rank, then token index. Counts are exchanged and read once a layer, forward; nothing else has the host wait for a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from dsv3fp8.kernels import moe
from dsv3fp8.kernels.exchange.reference import ROWS
from dsv3fp8.ops.exchange import Arrival, Plan, Return
from dsv3fp8.precision.tiles import Operand, QuantizedTensor, ceil_div


@dataclass(frozen=True)
class GroupWire:
    """A `Wire` over a process group. leaving, arriving: copies to and from each of its ranks."""

    group: dist.ProcessGroup
    leaving: list[int]
    arriving: list[int]
    counts: list[int]
    copy: Tensor
    slot: Tensor
    load: Tensor

    @property
    def copies(self) -> int:
        return sum(self.leaving)

    def send(self, rows: Operand) -> Arrival:
        if not isinstance(rows, QuantizedTensor):
            return self._exchange(rows, self.leaving, self.arriving)
        assert rows.tile.rows == 1, f"rows of {rows.tile} tiles share scales: they cannot part"
        codes, scale = (self._exchange(part, self.leaving, self.arriving) for part in (rows.codes, rows.scale))
        # Not of the rows themselves, which are to go as soon as they are sent.
        shell = replace(rows, codes=rows.codes.new_empty(0), scale=rows.scale.new_empty(0))
        return lambda: replace(shell, codes=(there := codes()), scale=scale(), shape=(len(there), shell.shape[1]))

    def send_back(self, rows: Tensor) -> Return:
        return self._exchange(rows, self.arriving, self.leaving)

    def _exchange(self, rows: Tensor, leaving: list[int], arriving: list[int]) -> Return:
        """As bytes: gloo knows no FP8, and none of it is arithmetic."""
        shape, dtype, width = (sum(arriving), *rows.shape[1:]), rows.dtype, prod(rows.shape[1:]) * rows.element_size()
        given = rows.contiguous().view(-1).view(torch.uint8).view(len(rows), width)
        arrived = torch.empty(shape[0], width, dtype=torch.uint8, device=rows.device)
        work = dist.all_to_all_single(arrived, given, arriving, leaving, group=self.group, async_op=True)

        def there() -> Tensor:
            work.wait()
            return arrived.view(-1).view(dtype).view(shape)

        return there


def make_plan(ids: Tensor, experts: int, real: Tensor | None, group: dist.ProcessGroup) -> Plan:
    """`ops.exchange.make_plan` for experts that are dealt out to a group: E are those of this rank."""
    size, device = group.size(), ids.device
    flat = (ids if real is None else torch.where(real[:, None], ids, experts)).flatten()
    by_expert = torch.sort(flat, stable=True)  # then by token: ids of one token are distinct
    load = torch.searchsorted(by_expert.values, torch.arange(experts + 1, device=device)).diff()
    theirs = torch.empty_like(load)  # of each source rank, tokens for each expert of this rank
    dist.all_to_all_single(theirs, load, group=group)
    counts = torch.stack((load, theirs)).view(2, size, experts // size)
    here, there = counts.tolist()  # the host waits, for this alone
    leaving, arriving = [sum(each) for each in here], [sum(each) for each in there]

    order = by_expert.indices[: sum(leaving)]
    slot = torch.full((ids.numel(),), -1, dtype=torch.int32, device=device)
    slot[order] = torch.arange(len(order), dtype=torch.int32, device=device)
    received = [sum(of_expert) for of_expert in zip(*there, strict=True)]
    wire = GroupWire(group, leaving, arriving, received, order.int(), slot.view(ids.shape), load)

    own = torch.arange(experts // size, device=device).repeat(size)
    arrived = own.repeat_interleave(counts[1].flatten(), output_size=sum(arriving))[:, None]
    rows = sum(ceil_div(count, ROWS) * ROWS for count in received)
    return Plan(rows, *moe.lay_out(arrived, experts // size, None, rows), wire=wire)
