"""Rotary position embedding: frequencies, YaRN above the original context, and its softmax-scale factor."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from dsv3fp8.model.config import ModelConfig


def uses_yarn(config: ModelConfig) -> bool:
    """YaRN acts only on a model whose context exceeds the original one, as in DeepSeek's reference."""
    return config.yarn.factor > 1 and config.context > config.yarn.original_context


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Angles per position, float64 [head_rope / 2], highest frequency first."""
    half = config.head_rope // 2
    exponents = torch.arange(half, dtype=torch.float64, device="cpu") / half
    plain = config.rope_theta**-exponents
    if not uses_yarn(config):
        return plain
    yarn = config.yarn
    low, high = _correction_range(config)
    ramp = ((torch.arange(half, dtype=torch.float64, device="cpu") - low) / (high - low)).clamp(0, 1)
    # Dimensions below the ramp turn often enough in the original context and keep their frequency.
    return plain / yarn.factor * ramp + plain * (1 - ramp)


def _correction_range(config: ModelConfig) -> tuple[float, float]:
    yarn = config.yarn

    def dimension(rotations: float) -> float:
        turns = yarn.original_context / (rotations * 2 * math.pi)
        return config.head_rope * math.log(turns) / (2 * math.log(config.rope_theta))

    low = max(math.floor(dimension(yarn.beta_fast)), 0)
    high = min(math.ceil(dimension(yarn.beta_slow)), config.head_rope - 1)
    # Equal borders (small heads, short contexts) would divide by zero.
    return low, max(high, low + 0.001)


def magnitude(factor: float, mscale: float) -> float:
    """YaRN's attention temperature: 0.1 * mscale * ln(factor) + 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def softmax_scale(config: ModelConfig) -> float:
    """head_qk^-0.5, times the square of YaRN's mscale_all_dim factor where YaRN acts."""
    scale = config.head_qk**-0.5
    if uses_yarn(config):
        scale *= magnitude(config.yarn.factor, config.yarn.mscale_all_dim) ** 2
    return scale


@cache
def _frequencies_on(config: ModelConfig, device: torch.device) -> Tensor:
    # Once a device: copying them there for every batch would wait for it.
    return inverse_frequencies(config).to(device)


def rope_table(config: ModelConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [..., head_rope / 2], of integer positions [...]."""
    angles = positions[..., None].to(torch.float64) * _frequencies_on(config, positions.device)
    ratio = 1.0
    if uses_yarn(config):
        yarn = config.yarn
        ratio = magnitude(yarn.factor, yarn.mscale) / magnitude(yarn.factor, yarn.mscale_all_dim)
    return (angles.cos() * ratio).float(), (angles.sin() * ratio).float()


def positions_of(documents: Tensor | None, sequences: int, length: int, device: torch.device) -> Tensor:
    """Position of every token, int64 [1 or B, S]: from the start of the sequence, or of its document."""
    index = torch.arange(length, device=device)[None]
    if documents is None:
        return index
    first = torch.ones(sequences, 1, dtype=torch.bool, device=device)
    starts = torch.cat((first, documents[:, 1:] != documents[:, :-1]), 1)
    return index - torch.where(starts, index, 0).cummax(1).values
