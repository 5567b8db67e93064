"""The gradient's norm and clipping, for gradients whose squares leave the range of FP32.

``torch.nn.utils.clip_grad_norm_`` squares in FP32: finite gradients of 1e20 give it an infinite norm, and it then
scales every gradient to zero without a word. Here such a norm is found in FP64 and the gradients are clipped like any
others. Nothing is read back from a GPU.
"""

from collections.abc import Iterable, Sequence

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


def gradient_norm(gradients: list[Tensor], device: torch.device) -> Tensor:
    """Their L2 norm, an FP64 scalar on the device; NaN or inf exactly if a gradient holds one.

    A GPU sums in FP64, as fast as it reads. A CPU sums in FP32, and again where that may have left its range.
    """
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    if device.type == "cuda":
        return _length(torch._foreach_norm(gradients, 2, torch.float64))
    norm = _length(torch._foreach_norm(gradients))
    if SAFE_NORMS[0] <= norm <= SAFE_NORMS[1]:
        return norm
    return _length([torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients])


def _length(norms: Sequence[Tensor]) -> Tensor:
    return torch.linalg.vector_norm(torch.stack(list(norms)), dtype=torch.float64)


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """What scales gradients of this norm down to at most `limit`, an FP64 scalar beside it; a limit of 0 never scales."""
    if not limit:
        return torch.ones_like(norm)
    return torch.where(norm > limit, torch.full_like(norm, limit) / norm, 1.0)
