"""Dispatch and combine: from token order to expert order and back, on one rank.

Rows of an expert are consecutive, ordered by token, and start at a multiple of 128, so that a 128-token tile never
holds two experts. Rows in between are inert: code 0, scale 1, gate weight 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv3fp8.precision.tiles import Operand, QuantizedTensor, ceil_div
from dsv3fp8.precision.widen import wide, widened

ROWS = 128


@dataclass(frozen=True)
class Plan:
    """Where every (token, choice) goes.

    counts, starts: rows of each expert and its first row, on the host. rows: total rows, a multiple of 128.
    token: int64 [rows], the token in each row; live: bool [rows], False for inert rows.
    slot: int64 [T, K], the row of each choice; sent: bool [T, K], False for choices that go nowhere (padding tokens).
    groups: int64 [rows / 128], the expert of each block of 128 rows.
    blocks: int32 [E + 1], each expert's first block of 128 rows, and the end of the last.
    """

    counts: list[int]
    starts: list[int]
    rows: int
    token: Tensor
    choice: Tensor
    live: Tensor
    slot: Tensor
    sent: Tensor
    groups: Tensor
    blocks: Tensor


def make_plan(ids: Tensor, experts: int, real: Tensor | None) -> Plan:
    """The plan of expert ids [T, K]; tokens with real False are sent nowhere. Copies the counts to the host once."""
    tokens, top_k = ids.shape
    device = ids.device
    sent = torch.ones_like(ids, dtype=torch.bool) if real is None else real[:, None].expand_as(ids)
    flat = torch.where(sent, ids, experts).flatten()
    order = torch.sort(flat, stable=True).indices  # by expert, then token: ids of one token are distinct
    counts_device = torch.bincount(flat, minlength=experts + 1)[:experts]
    padded = (counts_device + ROWS - 1) // ROWS * ROWS
    ends = padded.cumsum(0)
    counts = counts_device.tolist()
    starts, rows = [], 0
    for count in counts:
        starts.append(rows)
        rows += ceil_div(count, ROWS) * ROWS
    order = order[: sum(counts)]
    expert = flat[order]
    first = counts_device.cumsum(0) - counts_device
    row = (ends - padded)[expert] + torch.arange(order.numel(), device=device) - first[expert]
    token = torch.zeros(rows, dtype=torch.int64, device=device)
    choice = torch.zeros(rows, dtype=torch.int64, device=device)
    live = torch.zeros(rows, dtype=torch.bool, device=device)
    token[row], choice[row], live[row] = order // top_k, order % top_k, True
    slot = torch.zeros(tokens * top_k, dtype=torch.int64, device=device)
    slot[order] = row
    # With its length given it need not ask the device for it.
    groups = torch.repeat_interleave(torch.arange(experts, device=device), padded // ROWS, output_size=rows // ROWS)
    blocks = torch.cat((ends.new_zeros(1), ends // ROWS)).to(torch.int32)
    return Plan(counts, starts, rows, token, choice, live, slot.view(tokens, top_k), sent, groups, blocks)


def dispatch(x: Operand, plan: Plan) -> Operand:
    """Rows of x [T, D] in expert order, [rows, D]: codes and scales as they are, nothing is rounded on the way."""
    if not isinstance(x, QuantizedTensor):
        return torch.where(plan.live[:, None], x[plan.token], 0)
    raw = x.codes.view(torch.uint8)[plan.token]
    codes = torch.where(plan.live[:, None], raw, 0).view(x.codes.dtype)
    shape = (plan.rows, x.shape[1])
    if x.tile.rows is None:
        return replace(x, codes=codes, shape=shape)
    scale = x.expanded_rows()[plan.token]
    scale = torch.where(plan.live[:, None], scale, 1.0)
    return replace(x, codes=codes, scale=scale, shape=shape, tile=replace(x.tile, rows=1))


def wire_bytes(rows: Operand, plan: Plan) -> int:
    """Bytes of the live rows [rows, D]: codes and their scales as stored. Gate weights and indices are not counted."""
    parts = [rows]
    if isinstance(rows, QuantizedTensor):  # one scale for all rows is known to both sides
        parts = [rows.codes] if rows.tile.rows is None else [rows.codes, rows.scale]
    return sum(plan.counts) * sum(part.shape[-1] * part.element_size() for part in parts if isinstance(part, Tensor))


def dispatch_copies(x: Tensor, plan: Plan) -> Tensor:
    """One value per (token, choice), [T, K] -> [rows] in expert order; 0 in inert rows."""
    return torch.where(plan.live, x[plan.token, plan.choice], 0)


def combine(rows: Tensor, plan: Plan, weights: Tensor | None = None) -> Tensor:
    """Sums each token's K rows [rows, D] in fp32, in order of choice, optionally weighted by fp32 [T, K]; one rounding."""
    total = rows.new_zeros(plan.slot.shape[0], rows.shape[1], dtype=widened(rows.dtype))
    if plan.rows == 0:
        return total.to(rows.dtype)
    for choice in range(plan.slot.shape[1]):
        part = wide(rows[plan.slot[:, choice]])
        if weights is not None:
            part = part * weights[:, choice, None]
        total = total + torch.where(plan.sent[:, choice, None], part, 0)
    return total.to(rows.dtype)


def collect_copies(rows: Tensor, plan: Plan) -> Tensor:
    """One value per row -> [T, K]; 0 for choices that went nowhere. Inverse of `dispatch_copies`."""
    if plan.rows == 0:
        return rows.new_zeros(plan.slot.shape)
    return torch.where(plan.sent, rows[plan.slot], 0)
