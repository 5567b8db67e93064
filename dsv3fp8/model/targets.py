"""What is predicted: next-token and multi-token targets of a window, and how many of them count."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv3fp8.ops.cross_entropy import IGNORED


@dataclass(frozen=True)
class Totals:
    """Valid targets of the next token, of each MTP depth, and sequences; sums over micro-batches with +."""

    targets: int
    mtp: tuple[int, ...]
    sequences: int

    def __add__(self, other: Totals) -> Totals:
        mtp = tuple(a + b for a, b in zip(self.mtp, other.mtp, strict=True))
        return Totals(self.targets + other.targets, mtp, self.sequences + other.sequences)


def targets_at(tokens: Tensor, documents: Tensor | None, depth: int) -> Tensor:
    """Targets int64 [B, S - depth] of positions 0 .. S - depth - 1 of a window [B, S + 1]: token i + 1 + depth.

    depth 0 is the next token. With documents, a target in another document or in padding (-1) is IGNORED; the last
    `depth` positions have no target in the window and are left out.
    """
    ahead = tokens[:, 1 + depth :]
    if documents is None:
        return ahead
    here = documents[:, : max(documents.shape[1] - 1 - depth, 0)]
    there = documents[:, 1 + depth :]
    return torch.where((here == there) & (there >= 0), ahead, IGNORED)


def count_targets(tokens: Tensor, documents: Tensor | None, depth: int) -> Totals:
    """Totals of one micro-batch [B, S + 1] for a model with `depth` MTP modules, counted where the batch lies."""
    batch, window = tokens.shape
    if documents is None:
        counts = [batch * max(0, window - 1 - d) for d in range(depth + 1)]
    else:
        counts = [int((targets_at(tokens, documents, d) != IGNORED).sum()) for d in range(depth + 1)]
    return Totals(counts[0], tuple(counts[1:]), batch)
