"""What one op hands the next: an autograd edge, the GEMM operand, and what is kept of it for backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dsv3fp8.precision.tiles import Operand, QuantizedTensor, values_of


@dataclass(frozen=True)
class Stash:
    """Tensors kept for backward and how the operand comes back from them (decoded, re-quantized or recomputed).

    Autograd owns the tensors (save_for_backward); `restore` must hold none of its own, or they outlive their use.
    shell: what the first two tensors are, where they are codes and scales. name: the ledger's, where it is not the operand's.
    """

    tensors: tuple[Tensor, ...]
    restore: Callable[[tuple[Tensor, ...]], Operand]
    shell: QuantizedTensor | None = None
    name: str | None = None

    def kept(self, operand: str) -> dict[str, Sequence[Operand]]:
        """The tensors as they are kept, by the ledger's names. operand: the name of what comes back from them."""
        name = self.name or operand
        if self.shell is None:
            return {name: self.tensors}
        codes, scale, *known = self.tensors
        return {name: [replace(self.shell, codes=codes, scale=scale)], f"{operand}_scale": known}


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


def keep(operand: Operand, name: str | None = None) -> Stash:
    """Keeps the operand as it is: codes and scales, or the plain tensor."""
    if not isinstance(operand, QuantizedTensor):
        return Stash((operand,), lambda saved: saved[0], name=name)
    shell = replace(operand, codes=_nothing(operand.codes), scale=_nothing(operand.scale))
    return Stash((operand.codes, operand.scale), lambda saved: replace(shell, codes=saved[0], scale=saved[1]), shell, name)


def together(*stashes: Stash | None) -> tuple[list[Tensor], Callable[[list[Tensor]], list[Operand | None]]]:
    """Several stashes as one list of tensors to save, and how each operand comes back from it (None for None)."""
    parts = [(len(stash.tensors), stash.restore) if stash else None for stash in stashes]

    def restore(saved: list[Tensor]) -> list[Operand | None]:
        rest, operands = tuple(saved), []
        for part in parts:
            operands.append(part[1](rest[: part[0]]) if part else None)
            rest = rest[part[0] :] if part else rest
        return operands

    return [tensor for stash in stashes if stash for tensor in stash.tensors], restore


def beside(left: Stash, right: Stash) -> Stash:
    """Two stashes of unquantized operands as one of [left | right], which is not kept beside its parts."""
    tensors, restore = together(left, right)

    def joined(saved: tuple[Tensor, ...]) -> Operand:
        parts = restore(list(saved))
        return torch.cat([values_of(part) for part in parts if part is not None], -1)

    return Stash(tuple(tensors), joined)


def edge_of(shape: torch.Size | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A stand-in of this shape and dtype that takes one element of memory: autograd needs a tensor, nobody its values."""
    return torch.empty_strided(shape, [0] * len(shape), dtype=dtype, device=device)


def _nothing(x: Tensor) -> Tensor:
    # A shell must not hold the storage alive behind autograd's back.
    return x.new_empty(0)
