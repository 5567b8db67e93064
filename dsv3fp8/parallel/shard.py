"""Weights cut over ranks by PyTorch's FSDP2: a rank keeps its part of every FP32 master, and gathers what the GEMMs read.

Units are gathered and freed as forward and backward go: the experts of a block, the block around them, the joint of a depth of
multi-token prediction, and the rest of the model. What travels is what the recipe reads. Codes are made once an optimizer step
from the parts, under scales of the whole weight (`ops/shards.py`): one maximum over ranks of the magnitudes of all tiles
goes before, and no gathering quantizes. Weights in the compute type are cast as they are sent; norms and router go in FP32.
Gradients come back in FP32, summed over the ranks and divided by nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from dsv3fp8.model.block import Block
from dsv3fp8.model.experts import RoutedExperts
from dsv3fp8.model.linear import Linear
from dsv3fp8.model.multi_token import MultiTokenModule
from dsv3fp8.ops.quantizers import LinearQuantizers
from dsv3fp8.ops.shards import Part, ShardCodes
from dsv3fp8.ops.weights import WeightCodes, compute_dtype
from dsv3fp8.parallel.ranks import Ranks, combine_over
from dsv3fp8.precision.gathered import GatheredWeight
from dsv3fp8.precision.tiles import ceil_div

if TYPE_CHECKING:
    from dsv3fp8.model.transformer import Transformer


def shard(model: Transformer, ranks: Ranks) -> None:
    """Cut the parameters of a model, whose experts are dealt out already, down to this rank's parts (DTensors).

    The model may be on the meta device. Its codes are from then on those of the parts.
    """
    if ranks.shard_mesh is None:
        return
    left_whole: set[nn.Parameter] = set()
    for experts in _experts(model):
        if ranks.expert_shard_mesh is None:
            left_whole |= {*experts.parameters()}
        else:
            fully_shard(experts, mesh=ranks.expert_shard_mesh, shard_placement_fn=_along(ranks.expert_shard_mesh))
    # Of a depth of multi-token prediction the norms are read outside of its forward, too: they belong to the rest.
    joints = [ahead.projection for ahead in model.mtp if isinstance(ahead, MultiTokenModule)]
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for unit in (*blocks, *joints, model):
        fully_shard(unit, mesh=ranks.shard_mesh, ignored_params=left_whole)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    weights = list(_cut_weights(model))
    model.register_forward_pre_hook(lambda *_: _refresh(model, weights), prepend=True)
    model.register_forward_hook(lambda *_: _free_root(model))


def before_backward(model: nn.Module, last: bool) -> None:
    """Called ahead of each micro-batch's backward: replicas add up once a step, behind the last one."""
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(last)


def part_of(parameter: DTensor) -> Part:
    """What this rank holds of a parameter that FSDP2 has cut: equal slices but for the last ones, as torch.chunk cuts."""
    dim = next(placement.dim for placement in parameter.placements if isinstance(placement, Shard))
    mesh, length = parameter.device_mesh, parameter.shape[dim]
    each = ceil_div(length, mesh.size(mesh.ndim - 1))
    return Part(tuple(parameter.shape), dim, min(mesh.get_local_rank(mesh.ndim - 1) * each, length))


class CutWeight:
    """One weight that does not travel in FP32: FSDP's all-gather extension, which it looks for on a rank's part."""

    def __init__(self, module: nn.Module, name: str, codes: WeightCodes) -> None:
        """module.name: the parameter, cut. codes: what reads it."""
        self.module, self.name = module, name
        parameter = self.parameter
        self.group = _shard_group(parameter.device_mesh)
        self.part = part_of(parameter)
        padded = list(parameter.shape)
        padded[self.part.dim] = ceil_div(padded[self.part.dim], self.group.size())
        self.padded = torch.Size(padded)
        gemm = codes.quantizers.gemm
        self.dtype = compute_dtype(gemm.compute, parameter)
        if gemm.weight.quantized:
            codes.shard = ShardCodes(codes.quantizers, codes.row_parts, self.part)
        self.codes = codes.shard

    @property
    def parameter(self) -> DTensor:
        """The cut parameter, while the module has no gathered weight in its place."""
        parameter = getattr(self.module, self.name)
        assert isinstance(parameter, DTensor), f"{self.name} is gathered"
        return parameter

    @property
    def master(self) -> Tensor:
        """This rank's part of the FP32 master."""
        return self.parameter._local_tensor

    def attach(self) -> None:
        """Lets FSDP ask this object when it gathers the weight."""
        part: Any = self.master
        part.fsdp_pre_all_gather, part.fsdp_post_all_gather = self.leave, self.arrive

    def leave(
        self, mesh: DeviceMesh, size: torch.Size, stride: tuple[int, ...], module: nn.Module, policy: Any
    ) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """FSDP's question for what to gather: (this rank's tensors, what `arrive` is to be told)."""
        master = self.master
        if self.codes is None:
            sent = master.new_zeros(self.padded, dtype=self.dtype)
            sent.narrow(self.part.dim, 0, master.shape[self.part.dim]).copy_(master)
            return (sent,), []
        assert self.codes.fresh(master), f"the codes of {self.name} are older than the weight"
        return tuple(codes.view(torch.uint8) for codes in self.codes.codes), self.codes.scales

    def arrive(
        self, gathered: Sequence[Tensor], scales: list[Tensor], dtype: torch.dtype, *, out: Any = None
    ) -> tuple[GatheredWeight, tuple[Tensor, ...]] | None:
        """FSDP's question for the weight; out: the shell that it had before, whose memory has been filled again."""
        count = torch.Size(self.part.whole).numel()
        values = [each.view(-1)[:count].view(self.part.whole) for each in gathered]
        if self.codes is None:
            weight = GatheredWeight(values[0])
        else:
            storage = self.codes.spec.storage.dtype
            weight = GatheredWeight(*self.codes.assembled([each.view(storage) for each in values], scales))
        if out is None:
            return weight, ()
        out.fprop, out.dgrad = weight.fprop, weight.dgrad
        return None


def _cut_weights(model: Transformer) -> Iterator[CutWeight]:
    """All that is not gathered as it is: quantized, or narrower than the master."""
    found: list[tuple[nn.Module, str, WeightCodes]] = []
    for module in model.modules():
        if isinstance(module, Linear):
            found.append((module, "weight", module.codes))
        elif isinstance(module, RoutedExperts):
            found += [(module, "gate_up", module.gate_up_codes), (module, "down", module.down_codes)]
    found.append((model, "embedding" if model.config.tied_head else "head", model.head_codes))
    if not model.config.tied_head:
        found.append((model, "embedding", WeightCodes(LinearQuantizers(model.recipe, "embedding"))))
    for module, name, codes in found:
        gemm, parameter = codes.quantizers.gemm, getattr(module, name)
        as_it_is = not gemm.weight.quantized and compute_dtype(gemm.compute, parameter) == parameter.dtype
        if isinstance(parameter, DTensor) and not as_it_is:
            yield CutWeight(module, name, codes)


def _refresh(model: Transformer, weights: list[CutWeight]) -> None:
    """Makes the codes of this rank's parts where the masters have changed. All ranks come here in front of every forward."""
    assert isinstance(model, FSDPModule)
    model.reshard()  # where a forward was not followed by its backward
    for weight in weights:
        weight.attach()
    stale = [w for w in weights if w.codes is not None and not w.codes.fresh(w.master)]
    for group in dict.fromkeys(w.group for w in stale):
        of_group = [(w, w.codes, w.master.detach()) for w in stale if w.group is group]
        amaxes = [codes.amaxes(master) for _, codes, master in of_group if codes is not None]
        # As bits: of numbers without a sign they have the same order, and NaN, which gloo's maximum loses, is the largest.
        combine_over([grid.view(torch.int32) for grids in amaxes for grid in grids], dist.ReduceOp.MAX, group)
        for (weight, codes, master), grids in zip(of_group, amaxes, strict=True):
            assert codes is not None
            codes.make(master, grids, weight.padded)


def _free_root(model: Transformer) -> None:
    """FSDP keeps the root's weights for the backward to come; where none comes they would be taken for parameters."""
    if not torch.is_grad_enabled():
        assert isinstance(model, FSDPModule)
        model.reshard()


def _experts(model: Transformer) -> Iterator[RoutedExperts]:
    return (module for module in model.modules() if isinstance(module, RoutedExperts))


def _shard_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    return mesh.get_group(mesh.ndim - 1)


def _along(mesh: DeviceMesh) -> Any:
    return lambda parameter: Shard(_dim_to_cut(parameter, _shard_group(mesh).size()))


def _dim_to_cut(parameter: Tensor, count: int) -> int:
    """Rows of a matrix; whole experts of a stack, or their rows where these divide evenly and the experts do not."""
    return 1 if parameter.dim() == 3 and parameter.shape[0] % count and parameter.shape[1] % count == 0 else 0
