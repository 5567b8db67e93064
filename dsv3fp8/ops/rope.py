"""The RoPE box of MLA: rotates the rope part of q and the shared k_rope, and lays q, k, v out for attention.

Pairs are interleaved, (0, 1), (2, 3), ...: the convention of DeepSeek's weights. Backward rotates the other way; the
gradient of k_rope, which all heads share, is summed over heads in fp32 before its one rounding. Nothing is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsv3fp8.kernels.elementwise import rope_forward
from dsv3fp8.kernels.rope.reference import backward
from dsv3fp8.precision import ledger


class _MlaRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, k_rope: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
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
        dq_in, dkv, dk_rope = backward(dq, dk, dv, cos, sin)
        if ctx.node:
            ctx.node.report("backward", dq, {"dq": dq, "dk": dk, "dv": dv}, {"dq": dq_in, "dkv": dkv, "dk_rope": dk_rope})
        return dq_in, dkv, dk_rope, None, None


def mla_rope(q: Tensor, kv: Tensor, k_rope: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, S, H, nope + rope], kv [B, S, H, nope + v], k_rope [B, S, rope], cos and sin fp32 [B or 1, S, rope / 2].

    Returns q and k [B, S, H, nope + rope] and v [B, S, H, v].
    """
    out: tuple[Tensor, Tensor, Tensor] = _MlaRope.apply(q, kv, k_rope, cos, sin)
    return out
