"""Building bricks: a module whose parameters stay FP32 masters, a linear under the recipe, and a norm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from dsv3fp8.ops import report
from dsv3fp8.ops.latent import latent_norm
from dsv3fp8.ops.linear import linear
from dsv3fp8.ops.norm import norm
from dsv3fp8.ops.quantizers import Cast, LinearQuantizers
from dsv3fp8.ops.recompute import Projection, norm_again
from dsv3fp8.ops.slot import GradientSlot
from dsv3fp8.ops.stash import Activation, Stash, keep
from dsv3fp8.ops.weights import WeightCodes
from dsv3fp8.precision import ledger
from dsv3fp8.precision.recipe import Recipe
from dsv3fp8.precision.tiles import Operand, QuantizedTensor


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


class Reader(NamedTuple):
    """Who reads a norm's output: the quantizers that make a linear's operand of it, None for one that reads it as it is.

    gradient: the dtype its gradient comes in.
    """

    quantizers: LinearQuantizers | None
    gradient: torch.dtype


class RMSNorm(Masters):
    """RMSNorm with its junction, see ops.norm, and the operands of who reads it."""

    def __init__(self, dim: int, eps: float, recipe: Recipe, name: str) -> None:
        super().__init__()
        self.name = name
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps, self.recompute = eps, recipe.recompute != "none"

    def forward(self, x: Tensor, readers: Sequence[Reader]) -> tuple[Tensor, list[Activation]]:
        """(rail, norm(x) as each reader takes it)."""
        quantizers, gradients = [reader.quantizers for reader in readers], tuple(reader.gradient for reader in readers)
        cast, keep_y = _shared_cast(quantizers)
        rail, y, codes, edges = norm(x, self.weight, self.eps, gradients, self.name, cast=cast, keep=keep_y)
        operands = _mint(quantizers, y, cast, codes)
        return rail, [Activation(*rest) for rest in zip(edges, operands, self._stashes(x, operands, quantizers), strict=True)]

    def latent(self, x: Tensor, reader: LinearQuantizers, slot: GradientSlot) -> tuple[Activation, Tensor]:
        """(the norm of a down-projection's first columns as its one reader takes it, the columns behind them).

        slot: that of the projection x [T, C + R] comes from.
        """
        cast, keep_y = _shared_cast([reader])
        made = latent_norm(x, self.weight, self.eps, self.name, cast=cast, keep=keep_y, slot=slot)
        operands = _mint([reader], made.y, cast, made.codes)
        return Activation(made.edge, operands[0], *self._stashes(made.latent, operands, [reader])), made.beside

    def _stashes(self, x: Tensor, operands: Sequence[Operand], readers: Sequence[LinearQuantizers | None]) -> list[Stash]:
        return [self.stash(x, operand, reader) for operand, reader in zip(operands, readers, strict=True)]

    def stash(self, x: Tensor, operand: Operand, reader: LinearQuantizers | None) -> Stash:
        """What one reader of norm(x) keeps of it for wgrad: its operand, or the norm's input to make it again from."""
        return norm_again(x, self.weight, self.eps, operand, reader) if self.recompute else keep(operand)


def _shared_cast(readers: Sequence[LinearQuantizers | None]) -> tuple[Cast | None, bool]:
    """(the cast that rides on the norm, whether anyone reads what it does not give)."""
    casts = [reader.rides("input") if reader is not None else None for reader in readers]
    first = next((cast for cast in casts if cast is not None), None)
    return first, any(cast is None or cast != first for cast in casts)


def _mint(
    readers: Sequence[LinearQuantizers | None], y: Tensor | None, cast: Cast | None, codes: QuantizedTensor | None
) -> list[Operand]:
    """A norm's output as the operand of each reader, quantized once where they agree on how; codes: as `cast` has it."""
    operands: list[Operand] = []
    for i, reader in enumerate(readers):
        if reader is not None and codes is not None and reader.rides("input") == cast:
            operands.append(codes)
            continue
        assert y is not None
        same = next((j for j in range(i) if _agree(readers[j], reader)), None)
        if same is not None:
            operands.append(operands[same])
        else:
            operands.append(y if reader is None else reader.quantize("input", y, 1))
    if ledger.active() is not None:
        minted = [(reader.gemm.op, operand) for reader, operand in zip(readers, operands, strict=True) if reader is not None]
        report.minted([op for op, _ in minted], [operand for _, operand in minted])
    return operands


def _agree(a: LinearQuantizers | None, b: LinearQuantizers | None) -> bool:
    if a is None or b is None:
        return a is b
    # Kept scales (delayed, static) belong to one linear each: those quantize on their own.
    return a.gemm.input == b.gemm.input and "input" not in a.states and "input" not in b.states
