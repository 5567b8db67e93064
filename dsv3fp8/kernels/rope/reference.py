"""MLA's RoPE in torch, forward and backward, with the casts of the projections behind it: the definition of the kernels.

Pairs are interleaved, (0, 1), (2, 3), ...: the convention of DeepSeek's weights. Arithmetic is fp32, rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv3fp8.kernels.quantize.reference import quantize
from dsv3fp8.precision.formats import Format
from dsv3fp8.precision.tiles import COLUMN_128, ROW_128, QuantizedTensor
from dsv3fp8.precision.widen import wide

Cast = tuple[Format, str]  # format and scale kind
Both = tuple[QuantizedTensor, QuantizedTensor]  # 1x128 and 128x1 tiles of one matrix


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates interleaved pairs of x [..., R] by angles whose cos and sin [..., R / 2] are given; fp32 in, fp32 out."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def forward(q: Tensor, kv: Tensor, k_rope: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, S, H, nope + rope], kv [B, S, H, nope + v], k_rope [B, S, rope], cos and sin fp32 [B or 1, S, rope / 2].

    Returns q and k [B, S, H, nope + rope] and v [B, S, H, v], as attention reads them.
    """
    rope = k_rope.shape[-1]
    nope = q.shape[-1] - rope
    rotated = rotate(wide(q[..., nope:]), cos[:, :, None], sin[:, :, None]).to(q.dtype)
    shared = rotate(wide(k_rope), cos, sin).to(k_rope.dtype)
    k_nope, v = kv[..., :nope], kv[..., nope:]
    k = torch.cat((k_nope, shared[:, :, None].expand(*k_nope.shape[:-1], rope)), dim=-1)
    return torch.cat((q[..., :nope], rotated), dim=-1), k, v.contiguous()


def backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(gradients of q, kv and k_rope); that of k_rope is summed over heads in fp32 before its rotation and rounding."""
    nope = dq.shape[-1] - 2 * cos.shape[-1]
    unrotated = rotate(wide(dq[..., nope:]), cos[:, :, None], -sin[:, :, None]).to(dq.dtype)
    dk_rope = rotate(wide(dk[..., nope:]).sum(2), cos, -sin).to(dk.dtype)
    return torch.cat((dq[..., :nope], unrotated), -1), torch.cat((dk[..., :nope], dv), -1), dk_rope


def backward_cast(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, q_cast: Cast, kv_cast: Cast
) -> tuple[Both, Both, Tensor]:
    """As `backward`, the gradients of q and kv as matrices [B * S, H * D] in 1x128 and in 128x1 tiles."""
    dq_in, dkv, dk_rope = backward(dq, dk, dv, cos, sin)
    (q_row, q_col), (kv_row, kv_col) = (
        tuple(quantize(x.flatten(0, 1).flatten(1), fmt, tile, kind) for tile in (ROW_128, COLUMN_128))
        for x, (fmt, kind) in ((dq_in, q_cast), (dkv, kv_cast))
    )
    return (q_row, q_col), (kv_row, kv_col), dk_rope
