"""Which part of a tensor each rank holds, as torch.distributed.checkpoint reads it."""

from typing import Any

import pytest
import torch
from processes import Ranks, on_ranks
from support import build, nano, recipe
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import DTensor, Replicate, Shard

from dsv3fp8.parallel.experts import deal_out
from dsv3fp8.parallel.placement import local_part, place

EXPERTS = 4


def planned(ranks: Ranks) -> dict[str, Any]:
    """The chunks of this rank, of a model in which expert e of every stack is filled with e."""
    model = build(nano(experts=EXPERTS), recipe("fp32"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("experts.gate_up", "experts.down")):
                parameter.copy_(torch.arange(EXPERTS).view(-1, 1, 1).expand_as(parameter))
    deal_out(model, ranks)
    tensors = dict(model.named_parameters())
    placed = place(model, tensors, ranks)
    assert place(model, placed, ranks) == placed  # DTensors stay as they are
    assert all(local_part(placed[name]).data_ptr() == tensor.data_ptr() for name, tensor in tensors.items())
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(placed)
    chunks = {}
    for item in planner.create_local_plan().items:
        assert item.tensor_data is not None
        first = planner.resolve_data(item).flatten()[0].item()
        chunks[item.index.fqn] = tuple(item.tensor_data.size), tuple(item.tensor_data.chunk.offsets), first
    whole = {name: tensor.full_tensor() for name, tensor in placed.items() if isinstance(tensor, DTensor)}
    kinds = {tensor.placements == (Replicate(), Shard(0)) for tensor in placed.values() if isinstance(tensor, DTensor)}
    return {"chunks": chunks, "kinds": kinds, "whole": whole}


@pytest.mark.parametrize(("count", "expert"), [(1, 1), (2, 2), (4, 2), (4, 4)])
def test_every_rank_has_its_experts_of_the_whole_stack_and_all_of_the_rest(count: int, expert: int) -> None:
    """K01: no two ranks call different experts by the same name and place."""
    results = on_ranks(count, planned, expert=expert) if count > 1 else [planned(Ranks())]
    for rank, result in enumerate(results):
        first = rank % expert * (EXPERTS // expert)
        assert result["kinds"] == ({True} if expert > 1 else set())
        for name, (shape, offsets, value) in result["chunks"].items():
            if name.endswith(("experts.gate_up", "experts.down")):
                assert shape[0] == EXPERTS
                assert offsets == (first, 0, 0)
                assert value == first
            else:
                assert not any(offsets)
        for tensor in result["whole"].values():
            assert (torch.as_tensor(tensor)[:, 0, 0] == torch.arange(EXPERTS)).all()
