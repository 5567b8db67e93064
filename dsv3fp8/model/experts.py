"""DeepSeekMoE (report §2.1.2): shared expert, routed experts and the router behind the FFN norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dsv3fp8.model.config import ModelConfig
from dsv3fp8.model.feed_forward import FeedForward
from dsv3fp8.model.linear import Masters, Reader, RMSNorm
from dsv3fp8.model.router import Router
from dsv3fp8.model.sequence import Sequences
from dsv3fp8.ops.exchange import Plan, make_plan
from dsv3fp8.ops.experts import ExpertsCall, Journey
from dsv3fp8.ops.quantizers import LinearQuantizers
from dsv3fp8.ops.residual import residual_sum
from dsv3fp8.ops.stash import Activation
from dsv3fp8.ops.weights import WeightCodes
from dsv3fp8.precision.recipe import Recipe
from dsv3fp8.precision.tiles import values_of
from dsv3fp8.precision.widen import widened

if TYPE_CHECKING:
    from dsv3fp8.model.te_experts import TEJourney

MakePlan = Callable[[Tensor, int, Tensor | None], Plan]


class RoutedExperts(Masters):
    """E SwiGLU experts as two stacks of masters: gate_up [E, 2F, D] (gate rows first) and down [E, D, F].

    make_plan: where the copies go; another one where only some of the experts are here.
    """

    def __init__(self, config: ModelConfig, recipe: Recipe) -> None:
        super().__init__()
        count, hidden, dim = config.experts, config.expert_ffn, config.dim
        self.gate_up = nn.Parameter(torch.empty(count, 2 * hidden, dim))
        self.down = nn.Parameter(torch.empty(count, dim, hidden))
        # What is born inside the experts keeps a scale per expert; what is dispatched was cast before.
        self.gate_up_quantizers = LinearQuantizers(recipe, "expert_gate_up", count, per_expert=("weight", "gradient"))
        self.down_quantizers = LinearQuantizers(recipe, "expert_down", count, per_expert=("weight", "input"))
        self.gate_up_codes = WeightCodes(self.gate_up_quantizers, row_parts=2)
        self.down_codes = WeightCodes(self.down_quantizers)
        self.recipe = recipe
        self.make_plan: MakePlan = make_plan

    def set_out(self, x: Activation, weights: Tensor, plan: Plan) -> Journey | TEJourney:
        """x [T, D] and its gate weights fp32 [T, K] set out; what comes back is the routed part of x."""
        call = ExpertsCall(
            plan, self.recipe, self.gate_up_quantizers, self.down_quantizers, self.gate_up_codes, self.down_codes
        )  # fmt: skip
        return Journey(x.edge, x.operand, weights, call)

    def forward(self, edge: Tensor, journey: Journey) -> Tensor:
        """The experts' own work, from the journey's edge to its next one: where weights that are cut over ranks are here."""
        return journey.work(edge, (self.gate_up, self.down))


def make_experts(config: ModelConfig, recipe: Recipe) -> RoutedExperts:
    """The experts that the recipe asks for."""
    if recipe.linears == "te":
        from dsv3fp8.model.te_experts import TERoutedExperts

        return TERoutedExperts(config, recipe)
    return RoutedExperts(config, recipe)


class MoELayer(Masters):
    """FFN norm, router, routed and shared experts and the residual: x1 [T, D] -> x2 [T, D]."""

    def __init__(self, config: ModelConfig, recipe: Recipe) -> None:
        super().__init__()
        self.config = config
        self.norm = RMSNorm(config.dim, config.norm_eps, recipe, "ffn_norm")
        self.router = Router(config)
        self.experts = make_experts(config, recipe)
        self.shared = (
            FeedForward(recipe, config.dim, config.shared_experts * config.expert_ffn, "shared_")
            if config.shared_experts
            else None
        )

    def forward(self, x: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """(x2, the sequence-wise balance loss summed over sequences, without its factor)."""
        config, experts = self.config, self.experts
        # The order in which the readers' gradients are summed: dispatch, shared expert, router.
        for_shared = self.shared.gate_up.quantizers if self.shared is not None else None
        routed, shared, y = (experts.gate_up_quantizers, x.dtype), (for_shared, x.dtype), (None, widened(x.dtype))
        rail, (payload, of_shared, of_router) = self.norm(x, [Reader(*reader) for reader in (routed, shared, y)])
        routing = self.router(of_router.edge, values_of(of_router.operand), x, self.norm.weight, sequences)
        plan = experts.make_plan(routing.ids, config.experts, sequences.real)
        self.router.count(plan.here.load)
        # Half of the shared expert while the payload is on the wire, half while it comes back; backward in reverse.
        journey = experts.set_out(payload, routing.weights, plan)
        hidden = self.shared.hidden(of_shared) if self.shared is not None else None
        journey.edge = experts(journey.edge, journey)
        of_others = [] if self.shared is None else [self.shared.down(hidden)]
        return residual_sum(rail, journey.come_back(), *of_others), routing.balance
