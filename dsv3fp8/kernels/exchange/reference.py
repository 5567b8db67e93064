"""Dispatch and combine in torch, to expert order and back: the definition of every exchange kernel.

A copy is a (token, choice), numbered token * K + choice. `copy` says which copy each row holds, `slot` which row each copy
has; -1 in either is none. Nothing here copies from the device to the host.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from dsv3fp8.kernels.quantize.reference import quantize
from dsv3fp8.precision.formats import Format
from dsv3fp8.precision.tiles import ROW_128, Operand, QuantizedTensor
from dsv3fp8.precision.widen import wide, widened

ROWS = 128


class Layout(NamedTuple):
    """copy int32 [rows]; slot int32 [T, K]; groups int64 [rows / 128]; blocks int32 [E + 1]; load int32 [E].

    groups: the expert of each block of 128 rows, -1 beyond the last. blocks: each expert's first block, and the end of the
    last. load: tokens of each expert.
    """

    copy: Tensor
    slot: Tensor
    groups: Tensor
    blocks: Tensor
    load: Tensor


def capacity(tokens: int, top_k: int, experts: int) -> int:
    """Rows that hold any choice of top_k different experts by so many tokens: the least that suffices."""
    copies = tokens * top_k
    used = min(experts, copies)  # an expert's first copy begins a block, and 128 more of them every other one
    return ROWS * min(used + (copies - used) // ROWS, experts * -(-tokens // ROWS))


def lay_out(ids: Tensor, experts: int, real: Tensor | None, rows: int) -> Layout:
    """Where the copies of expert ids [T, K] go, in `rows` rows, at least `capacity`; tokens with real False go nowhere.

    Rows of an expert are consecutive, ordered by token, and start at a multiple of 128.
    """
    device = ids.device
    flat = (ids if real is None else torch.where(real[:, None], ids, experts)).flatten()
    by_expert = torch.sort(flat, stable=True)  # then by token: ids of one token are distinct
    first = torch.searchsorted(by_expert.values, torch.arange(experts + 1, device=device))
    load = first.diff()
    blocks = torch.nn.functional.pad(((load + ROWS - 1) // ROWS).cumsum(0), (1, 0))
    row = (blocks * ROWS - first)[by_expert.values] + torch.arange(flat.numel(), device=device)
    row = torch.where(by_expert.values < experts, row, rows)  # what goes nowhere shares one row behind the last
    copy = torch.full((rows + 1,), -1, dtype=torch.int32, device=device)
    copy[row] = by_expert.indices.int()
    slot = torch.empty(flat.numel(), dtype=torch.int32, device=device)
    slot[by_expert.indices] = torch.where(row < rows, row, -1).int()
    groups = torch.searchsorted(blocks[1:], torch.arange(rows // ROWS, device=device), right=True)
    groups = torch.where(groups < experts, groups, -1)
    return Layout(copy[:rows], slot.view(ids.shape), groups, blocks.int(), load.int())


def dispatch(x: Operand, copy: Tensor, slot: Tensor) -> Operand:
    """Rows of x [T, D] in expert order, [rows, D]: codes and scales as they are. Inert rows: code 0, scale 1; or zeros."""
    token, live = _token(copy, slot.shape[1]), (copy >= 0)[:, None]
    if not isinstance(x, QuantizedTensor):
        return torch.where(live, x[token], 0)
    codes = torch.where(live, x.codes.view(torch.uint8)[token], 0).view(x.codes.dtype)
    shape = (len(copy), x.shape[1])
    if x.tile.rows is None:
        return replace(x, codes=codes, shape=shape)
    scale = torch.where(live, x.expanded_rows()[token], 1.0)
    return replace(x, codes=codes, scale=scale, shape=shape, tile=replace(x.tile, rows=1))


def pick(values: Tensor, index: Tensor) -> Tensor:
    """values, flattened, at each index; 0 where it is -1."""
    if values.numel() == 0:
        return values.new_zeros(index.shape)
    return torch.where(index >= 0, values.flatten()[index.clamp(min=0)], 0)


def combine(rows: Tensor, slot: Tensor, weights: Tensor | None = None) -> Tensor:
    """Sums each token's rows of [rows, D] in fp32, in order of choice, optionally weighted by fp32 [T, K]; one rounding."""
    total = rows.new_zeros(slot.shape[0], rows.shape[1], dtype=widened(rows.dtype))
    for choice in range(slot.shape[1] if len(rows) else 0):
        part = wide(rows[slot[:, choice].clamp(min=0)])
        if weights is not None:
            part = part * weights[:, choice, None]
        total = total + torch.where(slot[:, choice, None] >= 0, part, 0)
    return total.to(rows.dtype)


def weigh(dy: Tensor, copy: Tensor, slot: Tensor, weights: Tensor, out: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Backward of a combine that weighs: (dY [T, D] of each row times its weight [T, K], in dtype; the weights' gradient).

    out: [rows, D], what was combined.
    """
    given = torch.where((copy >= 0)[:, None], wide(dy)[_token(copy, slot.shape[1])], 0)
    return (given * pick(weights, copy)[:, None]).to(dtype), pick((given * wide(out)).sum(-1), slot)


def weigh_cast(
    dy: Tensor, copy: Tensor, slot: Tensor, weights: Tensor, out: Tensor, fmt: Format, kind: str
) -> tuple[QuantizedTensor, Tensor]:
    """`weigh` with its first result cast in 1x128 tiles."""
    weighted, dweights = weigh(dy, copy, slot, weights, out, widened(dy.dtype))
    return quantize(weighted, fmt, ROW_128, kind), dweights


def _token(copy: Tensor, top_k: int) -> Tensor:
    return copy.clamp(min=0) // max(top_k, 1)
