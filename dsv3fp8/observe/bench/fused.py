"""Norm, SwiGLU and RoPE with the casts that ride on them, by the bytes of their stated passes, beside a device copy."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from dsv3fp8.kernels import elementwise as ops
from dsv3fp8.observe.bench.casts import COPY, copy_way
from dsv3fp8.observe.bench.operands import Setting, random
from dsv3fp8.observe.bench.rates import Case, Table, Way
from dsv3fp8.precision.formats import E4M3

EPS = 1e-6
CODE = 1 + 4 / 128
"""Bytes of an E4M3 code with its share of a tile's fp32 scale."""


def fused_tables(setting: Setting) -> list[Table]:
    """One row for each kernel, on tensors larger than the L2 cache."""
    rows, dim = setting.sizes.cast
    latent_rows, latent = setting.sizes.latent
    third, beside = latent // 3, latent // 24  # as wide as kv_a's parts where latent is q_a's
    outputs = math.prod(setting.sizes.swiglu)
    heads, length, qk, v = setting.sizes.attention
    q, kv, k_rope = length * heads * qk, length * heads * (qk - qk // 3 + v), length * (qk // 3)  # elements
    kv_out = length * heads * (qk + v)
    cases = [
        _case(setting, "norm → E4M3", rows * dim * (2 + CODE), lambda: _norm_forward(setting, keep=False)),
        _case(setting, "norm → E4M3 and BF16", rows * dim * (4 + CODE), lambda: _norm_forward(setting, keep=True)),
        _case(setting, "norm backward, 3 readers, residual", rows * dim * 12, lambda: _norm_backward(setting)),
        _case(
            setting, f"norm backward of {latent} → E4M3 both ways", latent_rows * latent * (8 + 2 * CODE),
            lambda: _norm_backward_cast(setting, latent, 0),
        ),
        _case(
            setting, f"norm backward of {third} with {beside} beside → E4M3 both ways",
            latent_rows * (third * (8 + 2 * CODE) + beside * (6 + 2 * CODE)),
            lambda: _norm_backward_cast(setting, third, beside),
        ),
        _case(setting, "SwiGLU → cache and E4M3", outputs * (4 + 3 * CODE), lambda: _swiglu(setting, "forward")),
        _case(setting, "SwiGLU again, from the cache", outputs * 3 * CODE, lambda: _swiglu(setting, "again")),
        _case(setting, "SwiGLU backward → E4M3 both ways", outputs * (2 + 6 * CODE), lambda: _swiglu(setting, "backward")),
        _case(setting, "RoPE", 2 * (2 * q + kv + k_rope + kv_out), lambda: _rope(setting, backward=False)),
        _case(
            setting, "RoPE backward → E4M3 both ways",
            2 * (q + kv_out + k_rope) + 2 * CODE * (q + kv), lambda: _rope(setting, backward=True),
        ),
    ]  # fmt: skip
    about = "bytes of the passes that the kernels' modules state, scales included; the ratio is the share of a copy's rate"
    return [Table("fused", "Fused kernels", "GB/s", COPY, about, cases)]


def _case(setting: Setting, name: str, work: float, make: Callable[[], tuple[Callable[[], object], str]]) -> Case:
    def build() -> list[Way]:
        call, note = make()
        return [Way("ours", lambda: [call], note=note), copy_way(setting)]

    return Case(name, work, build)


def _norm_forward(setting: Setting, keep: bool) -> tuple[Callable[[], object], str]:
    rows, dim = setting.sizes.cast
    x, gamma = random(setting, rows, dim), torch.ones(dim, device=setting.device)
    return lambda: ops.norm_forward_cast(x, gamma, EPS, E4M3, "fp32", keep), str(ops.choose_norm(x, fmt=E4M3))


def _norm_backward(setting: Setting) -> tuple[Callable[[], object], str]:
    rows, dim = setting.sizes.cast
    x, rail, *grads = (random(setting, rows, dim) for _ in range(5))
    gamma = torch.ones(dim, device=setting.device)
    return lambda: ops.norm_backward(x, gamma, EPS, grads, rail), str(ops.choose_norm(x, grads))


def _norm_backward_cast(setting: Setting, latent: int, beside: int) -> tuple[Callable[[], object], str]:
    """Of a latent; beside: columns of the same projection that are only cast."""
    rows = setting.sizes.latent[0]
    x, dy = (random(setting, rows, latent) for _ in range(2))
    gamma = torch.ones(latent, device=setting.device)
    side = random(setting, rows, beside) if beside else None
    call = partial(ops.norm_backward_cast, x, gamma, EPS, dy, side, E4M3, "fp32")
    return call, str(ops.choose_norm(x, [dy], E4M3))


def _swiglu(setting: Setting, which: str) -> tuple[Callable[[], object], str]:
    tokens, hidden = setting.sizes.swiglu
    h, gate = random(setting, tokens, 2 * hidden), random(setting, tokens, dtype=torch.float32)
    if which == "forward":
        note = str(ops.choose_swiglu(h, E4M3))
        return lambda: ops.swiglu_forward_cast(h, gate, "fp32", True, E4M3, "fp32"), note
    cache, _ = ops.swiglu_forward_cast(h, gate, "fp32", True, E4M3, "fp32")
    note = str(ops.choose_swiglu(cache, E4M3))
    if which == "again":
        return lambda: ops.swiglu_forward_again(cache, torch.bfloat16, gate, E4M3, "fp32"), note
    dout = random(setting, tokens, hidden)
    return lambda: ops.swiglu_backward_cast(cache, dout, gate, E4M3, "fp32"), note


def _rope(setting: Setting, backward: bool) -> tuple[Callable[[], object], str]:
    """q, k of which a third turns, as in DeepSeek-V3."""
    heads, length, qk, v = setting.sizes.attention
    rope = qk // 3
    cos, sin = (random(setting, 1, length, rope // 2, dtype=torch.float32) for _ in range(2))
    q = random(setting, 1, length, heads, qk)
    if not backward:
        kv, k_rope = random(setting, 1, length, heads, qk - rope + v), random(setting, 1, length, rope)
        return lambda: ops.rope_forward(q, kv, k_rope, cos, sin), str(ops.choose_rope(q))
    dk, dv, cast = random(setting, 1, length, heads, qk), random(setting, 1, length, heads, v), (E4M3, "fp32")
    return lambda: ops.rope_backward_cast(q, dk, dv, cos, sin, cast, cast), str(ops.choose_rope(q, E4M3))
