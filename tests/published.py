"""What `transformers` holds in memory, under the names of published files, and those files' values under our names."""

from collections.abc import Mapping

import torch
from torch import Tensor

from dsv3fp8.hub.layout import layout, shapes
from dsv3fp8.model.config import ModelConfig
from dsv3fp8.precision.recipe import Recipe


def published(theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict (or gradients) of theirs, each expert a tensor of its own as files have it; gate rows lie first (S01)."""
    files = {}
    for name, tensor in theirs.items():
        prefix, _, stack = name.rpartition("mlp.experts.")
        if stack == "gate_up_proj":
            for expert, halves in enumerate(tensor):
                gate, up = halves.chunk(2)
                files |= {f"{prefix}mlp.experts.{expert}.gate_proj.weight": gate}
                files |= {f"{prefix}mlp.experts.{expert}.up_proj.weight": up}
        elif stack == "down_proj":
            files |= {f"{prefix}mlp.experts.{expert}.down_proj.weight": down for expert, down in enumerate(tensor)}
        else:
            files[name] = tensor
    return files


def under_our_names(files: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Published tensors as our parameters; of those that are not among them, nothing."""
    ours = {name: torch.zeros(each.shape) for name, each in shapes(config, Recipe("sizes")).items()}
    filled = set()
    for each in layout(config):
        if each.name in files:
            each.part(ours).copy_(each.reordered(files[each.name]))
            filled.add(each.ours)
    return {name: ours[name] for name in filled}
