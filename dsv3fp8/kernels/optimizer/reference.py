"""AdamW in torch: the definition of its kernel. In FP32 it takes the very operations of torch.optim.AdamW in their order."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rates:
    """What one update multiplies with; scalars. steps: the number of this update, from 1, for the bias correction."""

    lr: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    steps: int


def update(weights: list[Tensor], gradients: list[Tensor], first: list[Tensor], second: list[Tensor], rates: Rates) -> None:
    """Move FP32 weights and their moments, FP32 or BF16, by FP32 gradients, all in place but the gradients."""
    beta1, beta2 = rates.betas
    # In FP32 these are the moments themselves, updated in place; in BF16 working copies.
    m, v = [t.float() for t in first], [t.float() for t in second]
    if rates.weight_decay:
        torch._foreach_mul_(weights, 1 - rates.lr * rates.weight_decay)
    torch._foreach_lerp_(m, gradients, 1 - beta1)
    torch._foreach_mul_(v, beta2)
    torch._foreach_addcmul_(v, gradients, gradients, 1 - beta2)
    denominators = torch._foreach_sqrt(v)
    torch._foreach_div_(denominators, math.sqrt(1 - beta2**rates.steps))
    torch._foreach_add_(denominators, rates.eps)
    torch._foreach_addcdiv_(weights, m, denominators, -rates.lr / (1 - beta1**rates.steps))
    if m[0] is not first[0]:
        torch._foreach_copy_(first, m)
        torch._foreach_copy_(second, v)
