"""The RoPE box of MLA: rotates the rope part of q and the shared k_rope, and lays q, k, v out for attention.

Pairs are interleaved, (0, 1), (2, 3), ...: the convention of DeepSeek's weights. Backward rotates the other way; the
gradient of k_rope, which all heads share, is summed over heads in fp32 before its one rounding. Nothing is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsv3fp8.kernels.elementwise import choose_rope, rope_backward, rope_backward_cast, rope_forward
from dsv3fp8.ops.slot import GradientSlot
from dsv3fp8.ops.stash import edge_of
from dsv3fp8.precision import ledger

Slots = tuple[GradientSlot | None, GradientSlot | None]


class _MlaRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, k_rope: Tensor, cos: Tensor, sin: Tensor, slots: Slots
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.slots = slots
        out = rope_forward(q, kv, k_rope, cos, sin)
        ctx.node = ledger.here("rope")
        if ctx.node:
            reads, emits = {"q": q, "kv": kv, "k_rope": k_rope}, dict(zip("qkv", out, strict=True))
            ctx.node.report("forward", out[0], reads, emits, {"rope_table": (cos, sin)})
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        dq_in = dkv = None
        for_q, for_kv = ctx.slots
        if for_q and for_q.cast and for_kv and for_kv.cast and choose_rope(dq, for_q.cast[0]).backend == "triton":
            q_codes, kv_codes, dk_rope = rope_backward_cast(dq, dk, dv, cos, sin, for_q.cast, for_kv.cast)
            for_q.fill(*q_codes)
            for_kv.fill(*kv_codes)
            kv_width = dk.shape[-1] - dk_rope.shape[-1] + dv.shape[-1]
            edges = edge_of(dq.shape, dq.dtype, dq.device), edge_of((*dk.shape[:-1], kv_width), dk.dtype, dk.device)
        else:
            dq_in, dkv, dk_rope = rope_backward(dq, dk, dv, cos, sin)
            edges = dq_in, dkv
        if ctx.node:
            ctx.node.report("backward", dq, {"dq": dq, "dk": dk, "dv": dv}, {"dq": dq_in, "dkv": dkv, "dk_rope": dk_rope})
        return *edges, dk_rope, None, None, None


def mla_rope(
    q: Tensor, kv: Tensor, k_rope: Tensor, cos: Tensor, sin: Tensor, slots: Slots = (None, None)
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, S, H, nope + rope], kv [B, S, H, nope + v], k_rope [B, S, rope], cos and sin fp32 [B or 1, S, rope / 2].

    slots: of the linears that q and kv, as matrices [B * S, H * D], come from.
    Returns q and k [B, S, H, nope + rope] and v [B, S, H, v].
    """
    out: tuple[Tensor, Tensor, Tensor] = _MlaRope.apply(q, kv, k_rope, cos, sin, slots)
    return out
