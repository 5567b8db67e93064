"""Cross-entropy of given logits in torch: the definition of its kernels. Arithmetic is that of the logits, fp32 or fp64."""

from __future__ import annotations

import torch
from torch import Tensor

IGNORED = -100


def forward(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(loss [T], log-sum-exp [T]) of logits [T, V] and targets int64 [T]; the loss is 0 where a target is IGNORED."""
    lse = torch.logsumexp(logits, -1)
    picked = logits.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    return torch.where(targets == IGNORED, 0.0, lse - picked), lse


def backward(logits: Tensor, lse: Tensor, targets: Tensor, dloss: Tensor, dtype: torch.dtype) -> Tensor:
    """Gradient of the logits [T, V] from the loss's, dloss [T] of any stride: softmax minus one-hot, scaled, rounded once."""
    dlogits = (logits - lse[:, None]).exp_()
    index = targets.clamp(min=0)[:, None]
    dlogits.scatter_add_(1, index, torch.full_like(index, -1, dtype=dlogits.dtype))
    scale = torch.where(targets == IGNORED, 0.0, dloss)
    return dlogits.mul_(scale[:, None]).to(dtype)
