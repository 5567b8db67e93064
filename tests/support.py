"""What several test files share: recipes as a user would write them, and a model that builds in milliseconds."""

import dataclasses
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dsv3fp8.config import load_config
from dsv3fp8.model.config import ModelConfig, YarnConfig
from dsv3fp8.model.transformer import Totals, Transformer
from dsv3fp8.precision.recipe import Recipe

RECIPES = (
    "fp32", "bf16", "dsv3", "dsv3_pow2", "hybrid", "bf16_cache", "blockwise_grad", "rowwise", "tensorwise", "delayed", "static",
    "no_promotion",
)  # fmt: skip


@lru_cache
def recipe(name: str, *overrides: str) -> Recipe:
    """recipe("dsv3", "ops.out.input.scale=fp32"): a shipped recipe with keys changed, through the command line's path."""
    return load_config([f"recipe={name}", *(f"recipe.{word}" for word in overrides)]).recipe


def nano(**sizes: Any) -> ModelConfig:
    """A dense and a MoE layer with every part of DeepSeek-V3; keyword arguments replace sizes."""
    base = ModelConfig(
        name="nano", vocab_size=96, dim=48, layers=2, dense_layers=1, heads=2, q_latent=24, kv_latent=16, head_nope=16,
        head_rope=8, head_v=16, ffn=72, expert_ffn=40, experts=4, top_k=2, shared_experts=1, mtp_depth=1, context=64,
        init_std=0.1,
    )  # fmt: skip
    config = dataclasses.replace(base, yarn=YarnConfig(), **sizes)
    config.validate()
    return config


def build(config: ModelConfig, with_recipe: Recipe, seed: int = 0) -> Transformer:
    """The model with initialized weights and norm weights that are not all one."""
    model = Transformer(config, with_recipe)
    model.initialize(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def windows(config: ModelConfig, batch: int = 2, length: int = 20, seed: int = 0) -> Tensor:
    """Random ids [B, S + 1]."""
    assert config.vocab_size is not None
    return torch.randint(config.vocab_size, (batch, length + 1), generator=torch.Generator().manual_seed(seed))


def gradients(model: Transformer, batches: list[Tensor], documents: list[Tensor | None] | None = None) -> dict[str, Tensor]:
    """Gradients of one optimizer step over micro-batches, as the training loop takes them."""
    from dsv3fp8.model.targets import count_targets

    given = documents or [None] * len(batches)
    model.zero_grad()
    depth = model.config.mtp_depth
    counted = [count_targets(b, d, depth) for b, d in zip(batches, given, strict=True)]
    totals = sum(counted[1:], counted[0])
    assert isinstance(totals, Totals)
    for batch, document in zip(batches, given, strict=True):
        model.objective(model(batch, document), totals).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def relative(got: Tensor, want: Tensor) -> float:
    """Largest error relative to the largest value wanted."""
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-30))
