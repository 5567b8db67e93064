"""Multi-token prediction (report §2.2, Eq. 21-25): module d predicts token i + d + 1 from the depth before and token i + d.

The projection reads [norm(hidden); norm(embedding)], in the report's order, in the compute dtype (never FP8). The hidden
state is taken before the final norm. Embedding and output head are the main model's; each module has its own last norm.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv3fp8.model.block import Block
from dsv3fp8.model.config import ModelConfig
from dsv3fp8.model.linear import Linear, Masters, Reader, RMSNorm
from dsv3fp8.model.sequence import Sequences
from dsv3fp8.ops.embedding import join_edges
from dsv3fp8.ops.stash import Activation, beside
from dsv3fp8.precision import ledger
from dsv3fp8.precision.recipe import Recipe
from dsv3fp8.precision.tiles import values_of


class MultiTokenModule(Masters):
    """One depth: hidden [T, D] of the depth before and embedding [T, D] of the token ahead -> hidden [T, D]."""

    def __init__(self, config: ModelConfig, recipe: Recipe, scope: str = "mtp.0") -> None:
        super().__init__()
        self.scope = scope
        self.hidden_norm = RMSNorm(config.dim, config.norm_eps, recipe, "hidden_norm")
        self.embedding_norm = RMSNorm(config.dim, config.norm_eps, recipe, "embedding_norm")
        self.projection = Linear(recipe, "mtp_projection", 2 * config.dim, config.dim)
        self.block = Block(config, recipe, dense=not config.has_experts, scope=scope)
        self.norm = RMSNorm(config.dim, config.norm_eps, recipe, "final_norm")

    def forward(self, hidden: Tensor, embedded: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor | None]:
        ledger.enter(self.scope)
        _, (left,) = self.hidden_norm(hidden, [Reader(None, hidden.dtype)])
        _, (right,) = self.embedding_norm(embedded, [Reader(None, embedded.dtype)])
        values = torch.cat((values_of(left.operand), values_of(right.operand)), -1)
        joined = Activation(join_edges(left.edge, right.edge), values, beside(left.stash, right.stash))
        out: tuple[Tensor, Tensor | None] = self.block(self.projection(joined), sequences)
        return out
