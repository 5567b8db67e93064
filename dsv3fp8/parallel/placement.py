"""Where the parts of a tensor lie: what a checkpoint has to know to write every element once and to cut it anew.

A tensor that is in parts is a DTensor: of the whole tensor's shape, over the mesh of the ranks that hold parts or copies. A
plain tensor is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from dsv3fp8.parallel.experts import expert_names
from dsv3fp8.parallel.ranks import Ranks


def place(model: nn.Module, tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Tensors by parameter name (weights, moments, gradients) as what they are parts of; nothing is copied or sent.

    Stacks of experts [E / P, …] that are dealt out become DTensors [E, …] over ranks.expert_mesh: replicas hold the same,
    and the ranks of a group follow each other along the experts. They may be cut once more. Other DTensors stay as they are.
    """
    placed = dict(tensors)
    if ranks.expert == 1:
        return placed
    assert ranks.expert_mesh is not None
    for name in expert_names(model):
        if name in tensors:
            placed[name] = _of_all_experts(tensors[name], ranks.expert_mesh, ranks.expert)
    return placed


def _of_all_experts(stack: Tensor, mesh: DeviceMesh, groups: int) -> DTensor:
    if isinstance(stack, DTensor) and stack.device_mesh == mesh:
        return stack
    cut = stack.placements[-1:] if isinstance(stack, DTensor) else ()
    shape = torch.Size((groups * stack.shape[0], *stack.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    placements = (Replicate(), Shard(0), *cut)
    return DTensor.from_local(local_part(stack.detach()), mesh, placements, run_check=False, shape=shape, stride=stride)


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: memory that is shared with it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
