"""Embedding lookup and the joint of multi-token prediction: both outside FP8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsv3fp8.kernels import outer
from dsv3fp8.ops.stash import edge_of
from dsv3fp8.ops.weights import compute_dtype, table
from dsv3fp8.precision import ledger


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.vocabulary = weight.shape[0]
        return outer.embedding_forward(ids, table(weight), dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[None, Tensor, None]:
        (ids,) = ctx.saved_tensors
        return None, outer.embedding_backward(ids, dx, ctx.vocabulary), None


def embedding(ids: Tensor, weight: Tensor, compute: str) -> Tensor:
    """Rows of the FP32 master [V, D] for ids int64 [T], rounded to the compute dtype. Its gradient sums in FP32.

    Of a master cut over ranks all rows were rounded before they were gathered.
    """
    out: Tensor = _Embedding.apply(ids, weight, compute_dtype(compute, weight))
    if node := ledger.here("embedding"):
        node.report("forward", out, {"ids": ids, "w_embedding": table(weight)}, {"x0": out}, {"ids": ids})
    return out


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        ctx.width = left.shape[-1]
        return edge_of((*left.shape[:-1], left.shape[-1] + right.shape[-1]), left.dtype, left.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad[..., : ctx.width], grad[..., ctx.width :]


def join_edges(left: Tensor, right: Tensor) -> Tensor:
    """The autograd edge of [left | right], without its values."""
    out: Tensor = _Join.apply(left, right)
    return out
