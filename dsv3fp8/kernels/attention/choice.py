"""Attention on the backend that `choose` takes: cuDNN, our own kernels where cuDNN will not do, or torch.

Signatures are those of reference.py, which defines the results. Backward is given the backend that forward took.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv3fp8.kernels.attention import cudnn, reference
from dsv3fp8.kernels.backend import Choice, against_triton, device_capability, triton_kernels


def choose(device: torch.device, dtype: torch.dtype, widths: tuple[int, int], masked: bool) -> Choice:
    """The backend of attention. widths: of a head's q and k, and of its v; masked: documents are isolated from one another."""
    if device.type != "cuda":
        return Choice("reference", f"{device.type}: torch, fp32 softmax")
    if dtype != torch.bfloat16:
        return Choice("reference", f"attention's kernels take bf16, not {str(dtype).removeprefix('torch.')}")
    if masked:
        why = "isolated documents need another mask than cuDNN's causal one"
    elif torch.are_deterministic_algorithms_enabled():
        why = "training.deterministic=true: cuDNN's backward adds in whatever order"
    elif device_capability(device.index or 0)[0] < 9:
        return Choice("reference", "cuDNN attention with unequal head sizes needs sm_90")
    else:
        return Choice("cudnn", "cuDNN through PyTorch")
    against = against_triton(device) or triton_kernels("attention").reason_against(dtype, *widths)
    if against is not None:
        return Choice("reference", f"{why}; {against}")
    return Choice("triton", f"{why}; every sum in one order")


def forward(backend: str, q: Tensor, k: Tensor, v: Tensor, scale: float, documents: Tensor | None) -> tuple[Tensor, Tensor]:
    if backend == "cudnn":
        return cudnn.attention_forward(q, k, v, scale)
    kernels = triton_kernels("attention") if backend == "triton" else reference
    return kernels.attention_forward(q, k, v, scale, documents)


def backward(
    backend: str,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    documents: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if backend == "cudnn":
        return cudnn.attention_backward(dout, q, k, v, out, lse, scale)
    kernels = triton_kernels("attention") if backend == "triton" else reference
    return kernels.attention_backward(dout, q, k, v, out, lse, scale, documents)
