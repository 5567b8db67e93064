"""A model of many ranks, built in parts: what a rank does not keep never lies on its device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dsv3fp8.model.config import ModelConfig
from dsv3fp8.model.transformer import Transformer
from dsv3fp8.ops.shards import Part
from dsv3fp8.parallel.experts import deal_out, expert_names, own_experts
from dsv3fp8.parallel.placement import local_part
from dsv3fp8.parallel.ranks import Ranks
from dsv3fp8.parallel.shard import part_of, shard
from dsv3fp8.precision.recipe import Recipe


def empty_parts(config: ModelConfig, recipe: Recipe, device: torch.device, ranks: Ranks) -> Transformer:
    """This rank's experts, and its parts of all else, with memory on the device and without values."""
    with torch.device("meta"):
        model = Transformer(config, recipe)
    deal_out(model, ranks)
    shard(model, ranks)
    model.to_empty(device=device)
    return model


@torch.no_grad()
def draw_parts(model: Transformer, ranks: Ranks, seed: int) -> None:
    """`Transformer.initialize` of a model in parts: the bits of the model of one process.

    Every rank draws all numbers on its host, one matrix at a time (an odd stack of experts at once), and keeps its own.
    """
    with torch.device("meta"):
        whole = Transformer(model.config, model.recipe)
    dealt, parameters = set(expert_names(model)) if ranks.expert > 1 else set(), dict(model.named_parameters())
    mine = own_experts(model.config.experts, ranks)
    for name, matrix, values in whole.initial_weights(seed):
        if name not in dealt:
            _keep(parameters[name], matrix, values)
        elif matrix in mine:
            assert matrix is not None
            _keep(parameters[name], matrix - mine.start, values)
    model.clear_buffers()


def _keep(parameter: Tensor, matrix: int | None, values: Tensor) -> None:
    """Takes what is this rank's of a parameter, or of one matrix of a stack."""
    local = local_part(parameter)
    part = part_of(parameter) if isinstance(parameter, DTensor) else Part(tuple(parameter.shape), 0, 0)
    if matrix is None:
        local.copy_(values.narrow(0, part.first, len(local)))
    elif part.dim == 1:
        local[matrix].copy_(values.narrow(0, part.first, local.shape[1]))
    elif part.first <= matrix < part.first + len(local):
        local[matrix - part.first].copy_(values)
