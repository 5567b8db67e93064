"""Gradients of a whole block: against autograd of a plain composition in float64, and of dsv3 against bf16."""

import dataclasses

import pytest
import torch
from support import nano, recipe
from torch import Tensor

from dsv3fp8.config import load_config
from dsv3fp8.model import router
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


def plain_block(w: dict[str, Tensor], x: Tensor, config: ModelConfig, batch: int) -> tuple[Tensor, Tensor]:
    """(x2 [T, D], the balance loss): equations 1 to 20 of the report, every gradient left to autograd."""

    def rms(t: Tensor, name: str) -> Tensor:
        return w[f"{name}.weight"] * t / (t.square().mean(-1, keepdim=True) + config.norm_eps).sqrt()

    def swiglu(t: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = (t @ gate_up.mT).chunk(2, -1)
        return (gate / (1 + torch.exp(-gate)) * up) @ down.mT

    length, heads = len(x) // batch, config.heads
    y = rms(x, "attention.norm")
    if config.q_latent is None:
        q = y @ w["attention.q.weight"].mT
    else:
        q = rms(y @ w["attention.q_a.weight"].mT, "attention.q_norm") @ w["attention.q_b.weight"].mT
    c_kv, k_rope = (y @ w["attention.kv_a.weight"].mT).split([config.kv_latent, config.head_rope], -1)
    k_nope, v = (
        (rms(c_kv, "attention.kv_norm") @ w["attention.kv_b.weight"].mT)
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
    x1 = x + out @ w["attention.out.weight"].mT

    y = rms(x1, "feed_forward.norm")
    if "feed_forward.ffn.down.weight" in w:
        return x1 + swiglu(y, w["feed_forward.ffn.gate_up.weight"], w["feed_forward.ffn.down.weight"]), x1.new_zeros(())
    affinity = torch.sigmoid(y @ w["feed_forward.router.weight"].mT)
    values, ids = affinity.topk(config.top_k)
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
    block, chosen, select = Block(TINY, given, dense=False), [], router.select_experts

    def held(*arguments: object) -> Tensor:
        chosen.append(select(*arguments) if ids is None else ids)  # type: ignore[arg-type]
        return chosen[-1]

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(router, "select_experts", held)
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


@pytest.mark.parametrize(
    ("name", "least"),
    [(name, 0.994) for name in ("dsv3", "dsv3_pow2", "bf16_cache", "blockwise_grad", "rowwise", "tensorwise")]
    + [("hybrid", 0.99)],
)
def test_quantized_gradients_point_where_those_of_bf16_do(name: str, least: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every parameter, at random init, with the experts that bf16 chose: E4M3's noise, a few per cent a GEMM, and no more."""
    want, ids = block_gradients(recipe("bf16"), monkeypatch)
    got, _ = block_gradients(recipe(name), monkeypatch, ids)
    cosines = {
        key: float(torch.nn.functional.cosine_similarity(got[key].flatten().double(), want[key].flatten().double(), 0))
        for key in want
    }
    assert len(cosines) == 15
    assert min(cosines.values()) > least, sorted(cosines.items(), key=lambda item: item[1])
