"""Embedding lookup in torch: the definition of its kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv3fp8.precision.widen import wide


def forward(ids: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of weight [V, D] for ids int64 [T], rounded to dtype."""
    return F.embedding(ids, weight).to(dtype)


def backward(ids: Tensor, dx: Tensor, vocabulary: int) -> Tensor:
    """Gradient of the weight [V, D], FP32 at least: for every id the sum of its rows of dx [T, D]."""
    return torch.ops.aten.embedding_dense_backward(wide(dx), ids, vocabulary, -1, False)
