"""What one op hands the next: an autograd edge, the GEMM operand, and what is kept of it for backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dsv3fp8.precision.tiles import Operand, QuantizedTensor


@dataclass(frozen=True)
class Stash:
    """Tensors kept for backward and how the operand comes back from them (decoded, re-quantized or recomputed)."""

    tensors: tuple[Tensor, ...]
    restore: Callable[[tuple[Tensor, ...]], Operand]


@dataclass(frozen=True)
class Activation:
    """A tensor on its way into one or more linears.

    edge: carries shape and gradient, its values are never read (see `edge_of`).
    operand: what fprop reads.
    stash: how wgrad gets its operand back; by default the operand itself is kept.
    """

    edge: Tensor
    operand: Operand
    stash: Stash = field(default=None)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.stash is None:
            object.__setattr__(self, "stash", keep(self.operand))


def keep(operand: Operand) -> Stash:
    """Keeps the operand as it is: codes and scales, or the plain tensor."""
    if not isinstance(operand, QuantizedTensor):
        return Stash((operand,), lambda saved: saved[0])
    shell = replace(operand, codes=_nothing(operand.codes), scale=_nothing(operand.scale))
    return Stash((operand.codes, operand.scale), lambda saved: replace(shell, codes=saved[0], scale=saved[1]))


def edge_of(shape: torch.Size | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A stand-in of this shape and dtype that takes one element of memory: autograd needs a tensor, nobody its values."""
    return torch.empty((), dtype=dtype, device=device).expand(shape)


def _nothing(x: Tensor) -> Tensor:
    # A shell must not hold the storage alive behind autograd's back.
    return x.new_empty(0)
