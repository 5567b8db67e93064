"""Causal attention in Triton, forward and backward, with the same bits in every run, and documents kept apart where asked.

`reference.py` with P and dS rounded to BF16 for the tensor core. No atomics: every sum has one program, which adds in one
order. Before a program's own block (behind it, for keys) only what lies between the first and the last token is read whose
document may be one of its own.

Passes: forward reads q once, and k and v once for each block of queries that sees them; backward reads all four once for each
block of keys, and once for each of queries.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from dsv3fp8.kernels.attention.triton_backward import (
    _attention_keys_kernel,
    _attention_queries_kernel,
    _attention_rows_kernel,
)
from dsv3fp8.kernels.attention.triton_forward import _attention_forward_kernel
from dsv3fp8.precision.tiles import ceil_div

_WIDEST = (192, 128)  # heads of q and k, and of v, whose blocks fit in registers
_FORWARD: dict[str, Any] = {"QUERIES": 128, "KEYS": 64, "num_warps": 8, "num_stages": 3}
_FOR_QUERIES: dict[str, Any] = {"QUERIES": 128, "KEYS": 64, "num_warps": 8, "num_stages": 2}
_FOR_KEYS: dict[str, Any] = {"QUERIES": 32, "KEYS": 128, "num_warps": 8, "num_stages": 3}
_ROWS = 64
_PADDED = 128  # rows of the largest block


def reason_against(dtype: torch.dtype, qk: int, v: int) -> str | None:
    """Why these kernels cannot take heads of qk and v values, or None when they can."""
    if dtype != torch.bfloat16:
        return f"the Triton attention takes bf16, not {str(dtype).removeprefix('torch.')}"
    if not (0 < qk <= _WIDEST[0] and 0 < v <= _WIDEST[1]):
        return f"the Triton attention takes heads of up to {_WIDEST[0]} and {_WIDEST[1]} values, not {qk} and {v}"
    return None


def attention_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, documents: Tensor | None) -> tuple[Tensor, Tensor]:
    """`reference.attention_forward` in bf16. scale: above 0. documents: ids of at most 32 bits."""
    q, k, v = map(_dense, (q, k, v))
    _refuse(q, k, v, scale)
    batch, length, heads, qk = q.shape
    out = v.new_empty(v.shape)
    lse = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)
    if out.numel():
        padded = ceil_div(length, _PADDED) * _PADDED
        _attention_forward_kernel[ceil_div(length, _FORWARD["QUERIES"]), heads, batch](
            q, k, v, _ids(documents, q, padded, lse), out, lse, scale, length, padded, heads, *_strides(q, k, v),
            **_widths(qk, v.shape[-1]), ISOLATED=documents is not None, **_FORWARD,
        )  # fmt: skip
    return out, lse


def attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, documents: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.attention_backward` in bf16."""
    dout, q, k, v, out, lse = *map(_dense, (dout, q, k, v, out)), lse.contiguous()
    _refuse(q, k, v, scale)
    batch, length, heads, qk = q.shape
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    if not dq.numel():
        return dq, dk, dv
    padded = ceil_div(length, _PADDED) * _PADDED
    shift, delta = torch.empty(2, batch, heads, padded, dtype=torch.float32, device=q.device)
    widths, isolated, ids = _widths(qk, v.shape[-1]), documents is not None, _ids(documents, q, padded, lse)
    _attention_rows_kernel[padded // _ROWS, heads, batch](
        dout, out, lse, shift, delta, length, padded, heads, *_strides(dout, out),
        V=widths["V"], V_2=widths["V_2"], QUERIES=_ROWS, num_warps=4,
    )  # fmt: skip
    given = (dout, q, k, v, ids, shift, delta)
    sizes = (scale, length, padded, heads, *_strides(dout, q, k, v))
    _attention_keys_kernel[ceil_div(length, _FOR_KEYS["KEYS"]), heads, batch](
        *given, dk, dv, *sizes, **widths, ISOLATED=isolated, CUT=length % _FOR_KEYS["KEYS"] != 0, **_FOR_KEYS
    )
    _attention_queries_kernel[ceil_div(length, _FOR_QUERIES["QUERIES"]), heads, batch](
        *given, dq, *sizes, **widths, ISOLATED=isolated, **_FOR_QUERIES
    )
    return dq, dk, dv


def _widths(qk: int, v: int) -> dict[str, int]:
    """Widths of heads, and of the powers of two that hold them; REST is 0 where one does. The tensor core takes 16 and more."""
    whole = max(triton.next_power_of_2(qk), 16)
    first = whole // 2
    rest = max(triton.next_power_of_2(qk - first), 16)
    split = qk > first >= 16 and first + rest < whole
    return {
        "QK": qk, "FIRST": first if split else whole, "REST": rest if split else 0,
        "V": v, "V_2": max(triton.next_power_of_2(v), 16),
    }  # fmt: skip


def _strides(*tensors: Tensor) -> list[int]:
    """Of batch, token and head."""
    return [stride for x in tensors for stride in x.stride()[:3]]


def _dense(x: Tensor) -> Tensor:
    """x with its last dimension contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _ids(documents: Tensor | None, q: Tensor, padded: int, unread: Tensor) -> Tensor:
    """int32 [B, padded], -1 for all padding and behind the sequence, so that whole blocks can be read."""
    if documents is None:
        return unread
    ids = documents.expand(q.shape[:2]).to(torch.int32).clamp(min=-1)
    return F.pad(ids, (0, padded - q.shape[1]), value=-1)


def _refuse(q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
    reasons = (reason_against(x.dtype, q.shape[-1], v.shape[-1]) for x in (q, k, v))
    reason = next((reason for reason in reasons if reason is not None), None)
    if reason is None and not scale > 0:
        reason = f"the Triton attention takes a scale above 0, not {scale}"
    if reason is not None:
        raise ValueError(reason)
