"""Causal attention and its backward in torch, in fp32 arithmetic on BF16 tensors: the specification, runs anywhere.

Works in blocks of queries, so that a long context never holds all of its scores at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv3fp8.kernels.gemm.reference import plain_matmul
from dsv3fp8.precision.widen import wide

QUERY_BLOCK = 512


def attention_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, documents: Tensor | None) -> tuple[Tensor, Tensor]:
    """Causal softmax(q k^T * scale) v.

    Args:
        q, k: [B, S, H, Dqk]; v: [B, S, H, Dv]; documents: int [B, S] or None. A query sees keys of its own document only;
            padding (-1) sees nothing and is not seen.
    Returns:
        output [B, S, H, Dv] in v's dtype and log-sum-exp fp32 [B, H, S]. A query that sees nothing gives 0 and -inf.
    """
    qh, kh, vh = _heads(q), _heads(k), _heads(v)
    out = torch.empty_like(vh)
    lse = vh.new_empty(vh.shape[:3])
    with plain_matmul(q.device):
        for start in range(0, q.shape[1], QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, q.shape[1])
            scores = _scores(qh, kh, start, stop, scale, documents)
            block_lse = torch.logsumexp(scores, dim=-1)
            probabilities = _probabilities(scores, block_lse)
            out[:, :, start:stop] = probabilities @ vh[:, :, :stop]
            lse[:, :, start:stop] = block_lse
    return out.transpose(1, 2).to(v.dtype), lse


def attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, documents: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v in their dtypes, from the output as it was kept (any tensor of its shape)."""
    qh, kh, vh, oh, gh = _heads(q), _heads(k), _heads(v), _heads(out), _heads(dout)
    dq, dk, dv = torch.empty_like(qh), torch.zeros_like(kh), torch.zeros_like(vh)
    delta = (gh * oh).sum(-1, keepdim=True)
    with plain_matmul(q.device):
        for start in range(0, q.shape[1], QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, q.shape[1])
            rows = slice(start, stop)
            p = _probabilities(_scores(qh, kh, start, stop, scale, documents), lse[:, :, rows])
            dv[:, :, :stop] += p.mT @ gh[:, :, rows]
            ds = p * (gh[:, :, rows] @ vh[:, :, :stop].mT - delta[:, :, rows]) * scale
            dq[:, :, rows] = ds @ kh[:, :, :stop]
            dk[:, :, :stop] += ds.mT @ qh[:, :, rows]
    return dq.transpose(1, 2).to(q.dtype), dk.transpose(1, 2).to(k.dtype), dv.transpose(1, 2).to(v.dtype)


def _heads(x: Tensor) -> Tensor:
    return wide(x).transpose(1, 2).contiguous()


def _scores(q: Tensor, k: Tensor, start: int, stop: int, scale: float, documents: Tensor | None) -> Tensor:
    scores = (q[:, :, start:stop] @ k[:, :, :stop].mT) * scale
    positions = torch.arange(stop, device=q.device)
    hidden = positions[None, :] > positions[start:stop, None]
    if documents is not None:
        keys = documents[:, None, :stop]
        hidden = hidden | (documents[:, start:stop, None] != keys) | (keys < 0)
        hidden = hidden[:, None]
    return scores.masked_fill_(hidden, -torch.inf)


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    # exp(-inf - -inf) would be NaN: a query that sees nothing has probabilities 0.
    finite = torch.where(torch.isneginf(lse), 0.0, lse)
    return scores.sub_(finite[..., None]).exp_()
