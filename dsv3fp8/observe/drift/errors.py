"""How far a result is from its float64 reference, in four numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Error:
    """Errors of a set of outputs, e = got - want.

    rms: ‖e‖ / ‖want‖ (relative Frobenius). largest: max|e| / rms(want).
    signed: Σ e · sign(want) / Σ |want|; below 0 the results are too small in magnitude.
    common: the share of Σ e² that one common factor on all outputs explains, ⟨e, want⟩² / (‖e‖² ‖want‖²): 1 where every
    output is off by the same fraction, near 0 where errors cancel over the outputs.
    """

    rms: float
    largest: float
    signed: float
    common: float

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def measure(got: Tensor, want: Tensor) -> Error:
    """The errors of got (any float dtype) against want (float64), same shape. Without any error all four are 0."""
    got, want = got.double(), want.double()
    error = got - want
    squares, size = float((error * error).sum()), float((want * want).sum())
    if squares == 0:
        return Error(0.0, 0.0, 0.0, 0.0)
    across = float((error * want).sum())
    return Error(
        rms=(squares / size) ** 0.5,
        largest=float(error.abs().max()) / (size / want.numel()) ** 0.5,
        signed=float((error * torch.sign(want)).sum() / want.abs().sum()),
        common=across * across / (squares * size),
    )


def per_row(got: Tensor, want: Tensor) -> Tensor:
    """‖e‖ / ‖want‖ of every row, float64 [R]; 0 for rows that are exact."""
    want = want.double()
    norms = torch.linalg.vector_norm(want, dim=1)
    errors = torch.linalg.vector_norm(got.double() - want, dim=1)
    return torch.where(errors == 0, 0.0, errors / norms)
