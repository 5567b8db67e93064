"""Building bricks: a module whose parameters stay FP32 masters, a linear under the recipe, and a norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from dsv3fp8.ops import report
from dsv3fp8.ops.linear import linear
from dsv3fp8.ops.norm import norm
from dsv3fp8.ops.quantizers import LinearQuantizers
from dsv3fp8.ops.recompute import Projection, norm_again
from dsv3fp8.ops.slot import GradientSlot
from dsv3fp8.ops.stash import Activation, Stash, keep
from dsv3fp8.ops.weights import WeightCodes
from dsv3fp8.precision import ledger
from dsv3fp8.precision.recipe import Recipe
from dsv3fp8.precision.tiles import Operand


class Masters(nn.Module):
    """A module whose parameters and buffers are masters: `.to(bfloat16)`, `.half()` move nothing below FP32.

    What is computed in fewer bits is the recipe's business; a wrapper that narrows a module would silently break it.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def keep_wide(t: Tensor) -> Tensor:
            out = fn(t)
            narrowed = t.is_floating_point() and out.dtype.itemsize < t.dtype.itemsize
            return t.to(out.device) if narrowed else out

        return super()._apply(keep_wide, recurse)


class Linear(Masters):
    """A bias-free linear [in -> out] whose three GEMMs follow the recipe's op. parts: fused halves (gate, up) of out."""

    def __init__(self, recipe: Recipe, op: str, in_features: int, out_features: int, parts: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.quantizers = LinearQuantizers(recipe, op)
        self.codes = WeightCodes(self.quantizers, row_parts=parts)
        self.parts = parts

    def forward(self, x: Activation, residual: Tensor | None = None, slot: GradientSlot | None = None) -> Tensor:
        return linear(x, self.weight, self.quantizers, self.codes, residual=residual, out_parts=self.parts, slot=slot)

    def slot(self) -> GradientSlot:
        """For one call and the op that alone reads its output."""
        return GradientSlot(self.quantizers)

    def projection(self, x: Activation) -> Projection:
        """This linear of x for a backward that runs it again."""
        return Projection(x.stash, self.weight, self.quantizers, self.codes)


class RMSNorm(Masters):
    """RMSNorm with its junction: see ops.norm."""

    def __init__(self, dim: int, eps: float, recipe: Recipe, name: str) -> None:
        super().__init__()
        self.name = name
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps, self.recompute = eps, recipe.recompute != "none"

    def forward(self, x: Tensor, readers: tuple[torch.dtype, ...]) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """(rail, y, one edge per reader)."""
        return norm(x, self.weight, self.eps, readers, self.name)

    def stash(self, x: Tensor, operand: Operand, reader: LinearQuantizers | None = None) -> Stash:
        """What one reader of norm(x) keeps of it for wgrad: its operand, or the norm's input to make it again from.

        reader: the quantizers that minted the operand from y; None where the operand is y itself.
        """
        return norm_again(x, self.weight, self.eps, operand, reader) if self.recompute else keep(operand)


def mint(y: Tensor, readers: list[LinearQuantizers]) -> list[Operand]:
    """y [T, D] as the operand of each linear that reads it, quantized once where they agree on how."""
    operands: list[Operand] = []
    with torch.no_grad():
        for i, reader in enumerate(readers):
            same = next((j for j in range(i) if _agree(readers[j], reader)), None)
            operands.append(reader.quantize("input", y, 1) if same is None else operands[same])
    if ledger.active() is not None:
        report.minted([reader.gemm.op for reader in readers], operands)
    return operands


def _agree(a: LinearQuantizers, b: LinearQuantizers) -> bool:
    # Kept scales (delayed, static) belong to one linear each: those quantize on their own.
    return a.gemm.input == b.gemm.input and "input" not in a.states and "input" not in b.states
