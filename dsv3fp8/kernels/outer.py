"""What lies outside the layers on the backend that `choose` takes: Triton on Hopper, else torch.

Signatures are those of kernels/{embedding,cross_entropy}/reference.py, which define the results. AdamW is launched by
ops/adamw.py: its backends want the scalars of an update in different places.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv3fp8.kernels.backend import Choice, against_triton, triton_kernels, triton_or_torch
from dsv3fp8.kernels.cross_entropy import reference as cross_entropy_reference
from dsv3fp8.kernels.embedding import reference as embedding_reference


def choose(kernels: str, device: torch.device, dtype: torch.dtype) -> Choice:
    """The backend of "embedding", "cross_entropy" or "optimizer". dtype: of its output, its logits or its moments."""
    return triton_or_torch(against_triton(device), kernels, "one kernel, fp32 arithmetic", dtype)


def embedding_forward(ids: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    taken = choose("embedding", weight.device, dtype).backend == "triton" and weight.dtype == torch.float32
    return (triton_kernels("embedding") if taken else embedding_reference).forward(ids, weight, dtype)


def embedding_backward(ids: Tensor, dx: Tensor, vocabulary: int) -> Tensor:
    taken = choose("embedding", dx.device, dx.dtype).backend == "triton"
    return (triton_kernels("embedding") if taken else embedding_reference).backward(ids, dx, vocabulary)


def cross_entropy_forward(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return _cross_entropy(logits).forward(logits, targets)


def cross_entropy_backward(logits: Tensor, lse: Tensor, targets: Tensor, dloss: Tensor, dtype: torch.dtype) -> Tensor:
    return _cross_entropy(logits).backward(logits, lse, targets, dloss, dtype)


def _cross_entropy(logits: Tensor) -> Any:
    taken = choose("cross_entropy", logits.device, logits.dtype).backend == "triton"
    return triton_kernels("cross_entropy") if taken else cross_entropy_reference


def explain(device: torch.device, dtype: torch.dtype) -> list[tuple[str, Choice]]:
    """(op, choice); dtype: the recipe's compute dtype."""
    fp32 = torch.float32
    ops = {"embedding": ("embedding", dtype), "loss": ("cross_entropy", fp32), "optimizer": ("optimizer", fp32)}
    return [(op, choose(kernels, device, of)) for op, (kernels, of) in ops.items()]
