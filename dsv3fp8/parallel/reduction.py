"""What the ranks add up behind the backward pass of a step, so that all of them take the same update.

Every rank has differentiated its share of the step's loss, whose means range over the tokens of all ranks: what is added up
here is divided by nothing. An expert has seen the tokens of all ranks of its group: only its replicas add up.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsv3fp8.parallel.experts import expert_parameters
from dsv3fp8.parallel.ranks import Ranks, combine_over
from dsv3fp8.training.gradients import gradients

if TYPE_CHECKING:
    from dsv3fp8.model.transformer import Transformer


def add_up_step(model: Transformer, parameters: list[nn.Parameter], sums: Tensor, ranks: Ranks) -> None:
    """Gradients in FP32, losses in FP64 and experts' loads as whole numbers become those of all ranks; amaxes the largest.

    sums: the step's summed losses. Everything is changed in place, and has the same bits on every rank.
    """
    if ranks.count == 1:
        return
    for parameter in parameters:
        if parameter.grad is None:  # not used by this rank's tokens, but maybe by another's
            parameter.grad = torch.zeros_like(parameter)
    shared, experts = split_gradients(model, parameters, ranks)
    ranks.add_up(shared)
    if ranks.replicas is not None and ranks.replicas.size() > 1:
        combine_over(experts, dist.ReduceOp.SUM, ranks.replicas)
    ranks.add_up([sums])
    ranks.add_up(model.loads)
    ranks.take_largest(model.amaxes)


def split_gradients(model: Transformer, parameters: Iterable[nn.Parameter], ranks: Ranks) -> tuple[list[Tensor], list[Tensor]]:
    """The FP32 gradients there are: (of what every rank holds, of experts that other ranks hold others of)."""
    dealt = {id(each) for each in expert_parameters(model)} if ranks.expert > 1 else set()
    given = list(parameters)
    return gradients(p for p in given if id(p) not in dealt), gradients(p for p in given if id(p) in dealt)


def joint_norm(shared: Tensor, experts: Tensor, ranks: Ranks) -> Tensor:
    """The norm of all gradients, the same bits on every rank, from the FP64 norms of the two parts."""
    squared = experts.square()
    dist.all_reduce(squared, group=ranks.expert_group)
    return (shared.square() + squared).sqrt()
