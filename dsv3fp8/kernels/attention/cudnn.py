"""cuDNN attention through PyTorch, forward and backward, so that backward can read another output than forward gave."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

_forward = torch.ops.aten._scaled_dot_product_cudnn_attention
_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward


@lru_cache
def _no_dropout(device: torch.device) -> tuple[Tensor, Tensor]:
    """Seed and offset that backward asks for and, nothing being dropped, does not read: none need be kept of forward's."""
    return torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int64, device=device)


def attention_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q, k [B, S, H, Dqk], v [B, S, H, Dv], bf16 -> output [B, S, H, Dv] and log-sum-exp fp32 [B, H, S]."""
    out, lse, *_ = _forward(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, True, 0.0, True, False, scale=scale)
    return out.transpose(1, 2), lse.squeeze(-1)


def attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v from the output as it was kept."""
    state = _no_dropout(q.device)
    length = q.shape[1]
    dq, dk, dv = _backward(
        dout.transpose(1, 2),
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        out.transpose(1, 2),
        lse.unsqueeze(-1),
        *state,
        None,  # no bias, no variable lengths
        None,
        None,
        length,
        length,
        0.0,
        True,
        scale=scale,
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
