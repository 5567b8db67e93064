"""What the ranks add up behind the backward pass of a step, so that all of them take the same update.

Every rank has differentiated its share of the step's loss, whose means range over the tokens of all ranks: what is added up
here is divided by nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dsv3fp8.parallel.ranks import Ranks

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
    ranks.add_up(parameter.grad for parameter in parameters if parameter.grad is not None)
    ranks.add_up([sums])
    ranks.add_up(model.loads)
    ranks.take_largest(model.amaxes)
