"""The RoPE box of MLA: rotates the rope part of q and the shared k_rope, and lays q, k, v out for attention.

Pairs are interleaved, (0, 1), (2, 3), ...: the convention of DeepSeek's weights. Backward rotates the other way; the
gradient of k_rope, which all heads share, is summed over heads in fp32 before its one rounding. Nothing is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsv3fp8.precision import ledger
from dsv3fp8.precision.widen import wide


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates interleaved pairs of x [..., R] by angles whose cos and sin [..., R / 2] are given; fp32 in, fp32 out."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def lay_out(q: Tensor, kv: Tensor, k_rope: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`mla_rope` without autograd, for forward and for a backward that makes q, k, v again."""
    rope = k_rope.shape[-1]
    nope = q.shape[-1] - rope
    rotated = rotate(wide(q[..., nope:]), cos[:, :, None], sin[:, :, None]).to(q.dtype)
    shared = rotate(wide(k_rope), cos, sin).to(k_rope.dtype)
    k_nope, v = kv[..., :nope], kv[..., nope:]
    k = torch.cat((k_nope, shared[:, :, None].expand(*k_nope.shape[:-1], rope)), dim=-1)
    return torch.cat((q[..., :nope], rotated), dim=-1), k, v.contiguous()


class _MlaRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, k_rope: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.nope = q.shape[-1] - k_rope.shape[-1]
        out = lay_out(q, kv, k_rope, cos, sin)
        ctx.node = ledger.here("rope")
        if ctx.node:
            reads, emits = {"q": q, "kv": kv, "k_rope": k_rope}, dict(zip("qkv", out, strict=True))
            ctx.node.report("forward", out[0], reads, emits, {"rope_table": (cos, sin)})
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        nope = ctx.nope
        unrotated = rotate(wide(dq[..., nope:]), cos[:, :, None], -sin[:, :, None]).to(dq.dtype)
        dk_rope = rotate(wide(dk[..., nope:]).sum(2), cos, -sin).to(dk.dtype)
        dq_in, dkv = torch.cat((dq[..., :nope], unrotated), -1), torch.cat((dk[..., :nope], dv), -1)
        if ctx.node:
            ctx.node.report("backward", dq, {"dq": dq, "dk": dk, "dv": dv}, {"dq": dq_in, "dkv": dkv, "dk_rope": dk_rope})
        return dq_in, dkv, dk_rope, None, None


def mla_rope(q: Tensor, kv: Tensor, k_rope: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, S, H, nope + rope], kv [B, S, H, nope + v], k_rope [B, S, rope], cos and sin fp32 [B or 1, S, rope / 2].

    Returns q and k [B, S, H, nope + rope] and v [B, S, H, v].
    """
    out: tuple[Tensor, Tensor, Tensor] = _MlaRope.apply(q, kv, k_rope, cos, sin)
    return out
