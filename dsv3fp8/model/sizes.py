"""Parameters and floating-point operations of a model, counted from its modules."""

from __future__ import annotations

from torch import nn

from dsv3fp8.model.config import ModelConfig
from dsv3fp8.model.experts import RoutedExperts


def parameter_counts(model: nn.Module, config: ModelConfig) -> dict[str, int]:
    """total; active: what one token's main-model forward multiplies with, the head included, embedding and MTP not."""
    counts = {"total": 0, "active": 0, "embedding": 0, "mtp": 0}
    for name, parameter in model.named_parameters():
        size = _size(model, name, parameter, config)
        counts["total"] += size
        if name.startswith("embedding"):
            counts["embedding"] += size
            counts["active"] += size if config.tied_head else 0
        elif name.startswith("mtp."):
            counts["mtp"] += size
        else:
            counts["active"] += _active_size(model, name, size, config)
    return counts


def _size(model: nn.Module, name: str, parameter: nn.Parameter, config: ModelConfig) -> int:
    """Elements; of experts, those of all of them, wherever they are."""
    owner = model.get_submodule(name.rpartition(".")[0])
    return parameter.shape[1:].numel() * config.experts if isinstance(owner, RoutedExperts) else parameter.numel()


def _active_size(model: nn.Module, name: str, size: int, config: ModelConfig) -> int:
    owner = model.get_submodule(name.rpartition(".")[0])
    return size * config.top_k // config.experts if isinstance(owner, RoutedExperts) else size


def flops_per_token(model: nn.Module, config: ModelConfig, length: int) -> float:
    """Forward and backward model FLOPs per token of sequences of `length`: 6 per active matrix element, causal attention.

    MTP modules and their passes through the head count; norms, softmax and recomputation do not.
    """
    matrices = 0
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or name.startswith("embedding"):
            continue
        matrices += _active_size(model, name, _size(model, name, parameter, config), config)
    vocabulary = config.vocab_size or 0
    heads_passed = config.mtp_depth + (1 if config.tied_head else 0)  # an untied head is among the matrices once
    blocks = config.layers + config.mtp_depth
    attention = blocks * config.heads * (config.head_qk + config.head_v) * 2 * length / 2
    return 6.0 * (matrices + heads_passed * vocabulary * config.dim) + 3.0 * attention
