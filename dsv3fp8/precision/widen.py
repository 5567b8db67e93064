"""What sums and arithmetic are done in: FP32 at least. The one place that says so for tensors and for dtypes."""

from __future__ import annotations

import torch
from torch import Tensor


def widened(dtype: torch.dtype) -> torch.dtype:
    """The dtype sums are kept in before their one rounding: at least FP32, FP64 if it is that already."""
    return torch.promote_types(dtype, torch.float32)


def wide(x: Tensor) -> Tensor:
    """x for arithmetic, in the widened dtype."""
    return x.to(widened(x.dtype))
