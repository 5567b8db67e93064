"""The same MoE layer as plain PyTorch would have it in BF16, eager and for torch.compile: the peer of the layer's figures.

Weights, activations and gradients are BF16; the router's scores are FP32. cuDNN attention, F.grouped_mm over rows sorted by
expert. Written to be fast: gate weights multiply inside the experts, where rows are narrow, and rows are moved by gathers in
backward too, where indexing would sort and add. Equations and sizes are those of model/block.py; nothing of its code is used.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dsv3fp8.model.config import ModelConfig
from dsv3fp8.model.rope import positions_of, rope_table, softmax_scale


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape))


class PlainLayer(nn.Module):
    """x [S, D] of one sequence -> x [S, D]. The query latent, sigmoid scores and one group of experts, as V3 has them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.q_latent is not None
        self.config, self.scale = config, softmax_scale(config)
        dim, heads, hidden = config.dim, config.heads, config.expert_ffn
        self.attention_gain, self.ffn_gain = _weight(dim), _weight(dim)
        self.q_gain, self.kv_gain = _weight(config.q_latent), _weight(config.kv_latent)
        self.q_a, self.q_b = _weight(config.q_latent, dim), _weight(heads * config.head_qk, config.q_latent)
        self.kv_a = _weight(config.kv_latent + config.head_rope, dim)
        self.kv_b = _weight(heads * (config.head_nope + config.head_v), config.kv_latent)
        self.out = _weight(dim, heads * config.head_v)
        self.router = _weight(config.experts, dim)
        self.gate_up, self.down = _weight(config.experts, 2 * hidden, dim), _weight(config.experts, dim, hidden)
        shared = config.shared_experts * hidden
        self.shared_gate_up, self.shared_down = _weight(2 * shared, dim), _weight(dim, shared)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self._attention(self._norm(x, self.attention_gain), cos, sin)
        y = self._norm(x, self.ffn_gain)
        return x + self._routed(y) + F.linear(_swiglu(F.linear(y, self.shared_gate_up)), self.shared_down)

    def _norm(self, x: Tensor, gain: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), gain, self.config.norm_eps)

    def _attention(self, y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        config, length = self.config, y.shape[0]
        q = F.linear(self._norm(F.linear(y, self.q_a), self.q_gain), self.q_b).view(length, config.heads, config.head_qk)
        c_kv, k_rope = F.linear(y, self.kv_a).split([config.kv_latent, config.head_rope], -1)
        kv = F.linear(self._norm(c_kv, self.kv_gain), self.kv_b).view(length, config.heads, -1)
        k_nope, v = kv.split([config.head_nope, config.head_v], -1)
        q_nope, q_rope = q.split([config.head_nope, config.head_rope], -1)
        q = torch.cat((q_nope, _rotated(q_rope, cos, sin)), -1)
        k_rope = _rotated(k_rope[:, None], cos, sin).expand(-1, config.heads, -1)
        k = torch.cat((k_nope, k_rope), -1)
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return F.linear(heads[0].transpose(0, 1).flatten(1), self.out)

    def _routed(self, y: Tensor) -> Tensor:
        config = self.config
        scores = torch.sigmoid(F.linear(y.float(), self.router.float()))
        top = scores.topk(config.top_k, -1)
        gate = top.values / top.values.sum(-1, keepdim=True) * config.route_scale
        expert = top.indices.flatten()
        order = torch.sort(expert, stable=True).indices
        bounds = torch.arange(config.experts, device=y.device)
        ends = torch.searchsorted(expert[order], bounds, right=True).to(torch.int32)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=y.device))
        rows: Tensor = _Dispatched.apply(y, order, back, config.top_k)
        weight: Tensor = _Permuted.apply(gate.flatten().to(y.dtype)[:, None], order, back)
        h = _swiglu(F.grouped_mm(rows, self.gate_up.transpose(1, 2), offs=ends)) * weight
        out: Tensor = _Permuted.apply(F.grouped_mm(h, self.down.transpose(1, 2), offs=ends), back, order)
        return out.view(y.shape[0], config.top_k, -1).sum(1)


class _Dispatched(torch.autograd.Function):
    """x [T, D] copied to `copies` rows a token, in `order`; back: where each of a token's rows lies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.copies = copies
        return x[order // copies]

    @staticmethod
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        return drows[back].view(-1, ctx.copies, drows.shape[1]).sum(1), None, None, None


class _Permuted(torch.autograd.Function):
    """Rows in another order, of which `inverse` is the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return drows[inverse], None, None


def _swiglu(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on adjacent pairs of x [S, H, R]; cos, sin [S, R / 2]."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    c, s = cos[:, None], sin[:, None]
    return torch.stack((even * c - odd * s, even * s + odd * c), -1).flatten(-2).to(x.dtype)


class PlainSubject:
    """The plain layer with its input and the gradient that comes in; compiled: under torch.compile."""

    def __init__(self, config: ModelConfig, tokens: int, device: torch.device, compiled: bool) -> None:
        with device:
            layer = PlainLayer(config).to(torch.bfloat16)
        with torch.no_grad():
            for parameter in layer.parameters():
                _ = parameter.fill_(1.0) if parameter.dim() == 1 else parameter.normal_(std=0.02)
        cos, sin = rope_table(config, positions_of(None, 1, tokens, device))
        self.layer, self.tables = layer, (cos[0], sin[0])
        self._run = torch.compile(layer) if compiled else layer
        self._on_gpu = device.type == "cuda"
        self.x = torch.empty(tokens, config.dim, dtype=torch.bfloat16, device=device).normal_().requires_grad_()
        self.dy = torch.empty_like(self.x).normal_() / tokens

    def forward(self) -> tuple[Tensor, ...]:
        # No other of torch's takes unequal head sizes at this speed.
        if not self._on_gpu:
            return (self._run(self.x, *self.tables),)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return (self._run(self.x, *self.tables),)

    def forward_backward(self) -> object:
        return torch.autograd.grad(self.forward(), [self.x, *self.layer.parameters()], [self.dy])
