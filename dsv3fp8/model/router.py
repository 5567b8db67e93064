"""The router: which experts a token goes to, and the bias that keeps their loads level without a loss term."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dsv3fp8.model.config import ModelConfig
from dsv3fp8.model.linear import Masters
from dsv3fp8.model.sequence import Sequences
from dsv3fp8.ops.router import Routing, Rule, route, router_logits


class Router(Masters):
    """FP32 weight [E, D]; `bias` fp32 [E] selects, never weighs; `load` int64 [E] counts this optimizer step's tokens."""

    bias: Tensor
    load: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.experts, config.dim))
        self.register_buffer("bias", torch.zeros(config.experts))
        self.register_buffer("load", torch.zeros(config.experts, dtype=torch.int64), persistent=False)

    def forward(self, edge: Tensor, y: Tensor, x: Tensor, gamma: Tensor, sequences: Sequences) -> Routing:
        """Routes the norm output y [T, D] = norm(x, gamma); edge: its fp32 autograd edge."""
        c = self.config
        rule = Rule(c.score, c.top_k, c.groups, c.kept_groups, c.normalize, c.route_scale)
        logits = router_logits(edge, self.weight, y, x, gamma, c.norm_eps)
        return route(logits, self.bias, rule, sequences.shape[0], sequences.real)

    def count(self, load: Tensor) -> None:
        """Adds tokens per expert, int [E], to those of this optimizer step, where they are tokens to learn from."""
        if self.training and torch.is_grad_enabled():
            self.load += load

    def end_step(self, applied: Tensor | bool) -> None:
        """`end_step` of this router alone."""
        end_step([self], applied)


@torch.no_grad()
def end_step(routers: Sequence[Router], applied: Tensor | bool) -> None:
    """Sign rule, once per optimizer step: overloaded experts lose bias_update_speed, underloaded ones gain it.

    routers: of one model. applied: False moves no bias, the counts begin anew all the same; not read where it is a tensor.
    """
    if not routers:
        return
    loads, config = [router.load for router in routers], routers[0].config
    if config.bias_update_speed > 0:
        # sign(mean - load) in integers: exact, and equal wherever the counts are.
        load = torch.stack(loads)
        sign = torch.sign(load.sum(1, keepdim=True) - load * config.experts) * applied
        biases = [router.bias for router in routers]
        torch._foreach_add_(biases, list((config.bias_update_speed * sign.to(biases[0].dtype)).unbind()))
    torch._foreach_zero_(loads)
