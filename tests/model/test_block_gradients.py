"""Gradients of a whole block: against autograd of a plain composition in float64, and of dsv3 against bf16."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import nano, recipe
from torch import Tensor

from dsv3fp8.config import load_config
from dsv3fp8.kernels.router import reference
from dsv3fp8.model.block import Block
from dsv3fp8.model.config import ModelConfig
from dsv3fp8.model.sequence import Sequences
from dsv3fp8.precision.recipe import Recipe

RECOMPUTE = ("none", "norms", "norms_and_up")


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Interleaved pairs of x [B, S, ..., R] as complex numbers, turned by angles [S, R / 2]."""
    turn = torch.complex(angles.cos().float().double(), angles.sin().float().double())
    turn = turn.view(1, len(angles), *[1] * (x.dim() - 3), -1)
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)


def exact(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.mT


def plain_block(
    w: dict[str, Tensor], x: Tensor, config: ModelConfig, batch: int, ids: Tensor | None = None,
    linear: Callable[[Tensor, Tensor], Tensor] = exact,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(x2 [T, D], the balance loss): equations 1 to 20 of the report, every gradient left to autograd.

    ids: the experts to take, [T, K]. linear: what multiplies wherever a recipe may quantize.
    """

    def rms(t: Tensor, name: str) -> Tensor:
        return w[f"{name}.weight"] * t / (t.square().mean(-1, keepdim=True) + config.norm_eps).sqrt()

    def swiglu(t: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = linear(t, gate_up).chunk(2, -1)
        return linear(gate / (1 + torch.exp(-gate)) * up, down)

    length, heads = len(x) // batch, config.heads
    y = rms(x, "attention.norm")
    if config.q_latent is None:
        q = linear(y, w["attention.q.weight"])
    else:
        q = linear(rms(linear(y, w["attention.q_a.weight"]), "attention.q_norm"), w["attention.q_b.weight"])
    c_kv, k_rope = linear(y, w["attention.kv_a.weight"]).split([config.kv_latent, config.head_rope], -1)
    k_nope, v = (
        linear(rms(c_kv, "attention.kv_norm"), w["attention.kv_b.weight"])
        .view(batch, length, heads, -1)
        .split([config.head_nope, config.head_v], -1)
    )
    frequencies = config.rope_theta ** (-torch.arange(config.head_rope // 2, dtype=torch.float64) * 2 / config.head_rope)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
    q_nope, q_rope = q.view(batch, length, heads, -1).split([config.head_nope, config.head_rope], -1)
    k_rope = turned(k_rope.reshape(batch, length, -1), angles)[:, :, None].expand(-1, -1, heads, -1)
    scores = torch.einsum("bihd,bjhd->bhij", torch.cat((q_nope, turned(q_rope, angles)), -1), torch.cat((k_nope, k_rope), -1))
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    weights = (scores * config.head_qk**-0.5).masked_fill(future, -torch.inf).softmax(-1)
    out = torch.einsum("bhij,bjhd->bihd", weights, v).reshape(len(x), -1)
    x1 = x + linear(out, w["attention.out.weight"])

    y = rms(x1, "feed_forward.norm")
    if "feed_forward.ffn.down.weight" in w:
        return x1 + swiglu(y, w["feed_forward.ffn.gate_up.weight"], w["feed_forward.ffn.down.weight"]), x1.new_zeros(())
    affinity = torch.sigmoid(y @ w["feed_forward.router.weight"].mT)
    ids = affinity.topk(config.top_k).indices if ids is None else ids
    values = affinity.gather(-1, ids)
    gates = torch.zeros_like(affinity).scatter(-1, ids, values / values.sum(-1, keepdim=True) * config.route_scale)
    total = x1 + swiglu(y, w["feed_forward.shared.gate_up.weight"], w["feed_forward.shared.down.weight"])
    for expert in range(config.experts):
        stacks = (w[f"feed_forward.experts.{name}"][expert] for name in ("gate_up", "down"))
        total = total + gates[:, expert, None] * swiglu(y, *stacks)
    share = (affinity / affinity.sum(-1, keepdim=True)).view(batch, length, -1).mean(1)
    hits = (gates > 0).double().view(batch, length, -1).mean(1) * config.experts / config.top_k
    return total, (hits * share).sum()


MODELS = {
    "moe": (nano(), False), "dense": (nano(), True), "no query latent": (nano(q_latent=None), False),
    "scaled": (nano(route_scale=2.5, experts=8, top_k=3), False),
}  # fmt: skip


@pytest.mark.parametrize("gate", ["before", "after"])
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("model", MODELS)
def test_unquantized_in_float64_every_gradient_is_autograds(model: str, recompute: str, gate: str) -> None:
    config, dense = MODELS[model]
    block = Block(config, recipe("fp32", f"recompute={recompute}", f"gate={gate}"), dense).double()
    for i, parameter in enumerate(block.parameters()):
        parameter.data = normal(*parameter.shape, seed=i) * 0.2 + (parameter.dim() == 1)
    x, dy = (normal(2 * 9, config.dim, seed=seed) for seed in (100, 101))
    x.requires_grad_()
    named = {"x": x, **dict(block.named_parameters())}
    sequences = Sequences.of(config, torch.zeros(2, 9, dtype=torch.int64), None)
    results = []
    for y, balance in (block(x, sequences), plain_block(named, x, config, 2)):
        loss = (y * dy).sum() + (0 if balance is None else 3.0 * balance)
        results.append([y, *torch.autograd.grad(loss, list(named.values()))])
    for name, ours, theirs in zip(["y", *named], *results, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-8, atol=1e-9 * float(theirs.detach().abs().max())), name


TINY = dataclasses.replace(load_config(["model=tiny"]).model, vocab_size=96)
TOKENS = 256


def block_gradients(
    given: Recipe, monkeypatch: pytest.MonkeyPatch, ids: Tensor | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients of a MoE block of tiny, parameters drawn as a run draws them, normal x and dY; and the experts chosen."""
    block, chosen, select = Block(TINY, given, dense=False), [], reference.select_experts

    def held(*arguments: object) -> Tensor:
        chosen.append(select(*arguments) if ids is None else ids)  # type: ignore[arg-type]
        return chosen[-1]

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(reference, "select_experts", held)
        for i, parameter in enumerate(block.parameters()):
            if parameter.dim() > 1:
                parameter.copy_(normal(*parameter.shape, seed=i) * TINY.init_std)
        x, dy = (normal(TOKENS, TINY.dim, seed=seed).bfloat16() for seed in (100, 101))
        sequences = Sequences.of(TINY, torch.zeros(2, TOKENS // 2, dtype=torch.int64), None)
        with torch.enable_grad():
            y, _ = block(x.requires_grad_(), sequences)
            torch.autograd.backward(y, dy)
    grads = {name: parameter.grad for name, parameter in block.named_parameters() if parameter.grad is not None}
    return {**grads, "x without the residual": x.grad.float() - dy.float()}, chosen[0]


def cosines(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    flat = {key: (got[key].flatten().double(), want[key].flatten().double()) for key in want}
    return {key: float(torch.nn.functional.cosine_similarity(*pair, 0)) for key, pair in flat.items()}


@pytest.mark.parametrize(
    ("name", "least"),
    [(name, 0.994) for name in ("dsv3", "dsv3_pow2", "bf16_cache", "blockwise_grad", "rowwise", "tensorwise")]
    + [("hybrid", 0.99)],
)
def test_quantized_gradients_point_where_those_of_bf16_do(name: str, least: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every parameter, at random init, with the experts that bf16 chose: E4M3's noise, a few per cent a GEMM, and no more."""
    want, ids = block_gradients(recipe("bf16"), monkeypatch)
    found = cosines(block_gradients(recipe(name), monkeypatch, ids)[0], want)
    assert len(found) == 15
    assert min(found.values()) > least, sorted(found.items(), key=lambda item: item[1])


def four_bits(x: Tensor) -> Tensor:
    """The nearest value with E4M3's significand and any exponent: quantization without scales, overflow or underflow."""
    significand, exponent = torch.frexp(x)
    return torch.ldexp(torch.round(significand * 16) / 16, exponent)


class FourBits(torch.autograd.Function):
    """y = x W^T whose three GEMMs read four-bit significands and are otherwise exact."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return four_bits(x) @ four_bits(weight).mT

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return four_bits(dy) @ four_bits(weight), four_bits(dy).mT @ four_bits(x)


def test_dsv3_strays_from_bf16_no_further_than_four_bit_significands_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """The angle to the exact gradient of an ideal that rounds every GEMM operand once, with no tile to choose wrongly.

    Allowed is twice its 1 - cosine: dsv3 rounds more often, SwiGLU's input and every re-tiled wgrad operand once more.
    """
    want, ids = block_gradients(recipe("bf16"), monkeypatch)
    ours = cosines(block_gradients(recipe("dsv3"), monkeypatch, ids)[0], want)
    named = {"x": normal(TOKENS, TINY.dim, seed=100).bfloat16().double().requires_grad_()}
    for i, (name, parameter) in enumerate(Block(TINY, recipe("fp32"), dense=False).named_parameters()):
        scaled = normal(*parameter.shape, seed=i) * TINY.init_std
        named[name] = (scaled if parameter.dim() > 1 else torch.ones_like(scaled)).requires_grad_()
    dy, results = normal(TOKENS, TINY.dim, seed=101).bfloat16().double(), []
    for linear in (exact, FourBits.apply):
        y, _ = plain_block(named, named["x"], TINY, 2, ids, linear)
        grads = dict(zip(named, torch.autograd.grad(y, list(named.values()), dy), strict=True))
        grads["x without the residual"] = grads.pop("x") - dy
        results.append(grads)
    for name, cosine in cosines(results[1], results[0]).items():
        assert 1 - ours[name] < 2 * (1 - cosine), (name, ours[name], cosine)
