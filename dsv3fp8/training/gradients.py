"""The gradient's norm and clipping, for gradients whose squares leave the range of FP32.

``torch.nn.utils.clip_grad_norm_`` squares in FP32: finite gradients of 1e20 give it an infinite norm, and it then
scales every gradient to zero without a word. Here such a norm is found in FP64 and the gradients are clipped like any
others.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

# Sums of squares between these norms neither overflow nor underflow in FP32, whatever the number of elements.
SAFE_NORMS = (1e-15, 1e15)
# Above this norm the optimizer's squared gradient may not fit FP32 any more.
LARGEST_NORM = 1e19


def gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """The gradients there are. They must be FP32, since micro-batches are summed in the gradient's own dtype."""
    found = [parameter.grad for parameter in parameters if parameter.grad is not None]
    assert all(gradient.dtype is torch.float32 for gradient in found), "a gradient is not FP32"
    return found


def fast_norm(gradients: list[Tensor]) -> Tensor:
    """FP64 scalar on the gradients' device: their L2 norm from FP32 sums of squares; inf where those overflow."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)), dtype=torch.float64)


def exact_norm(gradients: list[Tensor], fast: float) -> float:
    """The L2 norm, given the fast one: taken again in FP64 where FP32 sums of squares may have left their range.

    NaN or inf comes out exactly if a gradient holds one.
    """
    if SAFE_NORMS[0] <= fast <= SAFE_NORMS[1] or not gradients:
        return fast
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
    return float(torch.linalg.vector_norm(torch.stack(norms)))


def clip(gradients: list[Tensor], norm: float, limit: float) -> None:
    """Scale the gradients in place so that their norm is at most `limit`; 0 never scales."""
    if limit and norm > limit:
        torch._foreach_mul_(gradients, limit / norm)
