"""One transformer block: attention, then a dense or an MoE feed-forward, each with its norm and residual."""

from __future__ import annotations

from torch import Tensor

from dsv3fp8.model.attention import Attention
from dsv3fp8.model.config import ModelConfig
from dsv3fp8.model.experts import MoELayer
from dsv3fp8.model.feed_forward import DenseLayer
from dsv3fp8.model.linear import Masters
from dsv3fp8.model.sequence import Sequences
from dsv3fp8.precision import ledger
from dsv3fp8.precision.recipe import Recipe


class Block(Masters):
    """x [T, D] -> (x [T, D], balance loss or None). scope: the name of this layer in the ledger."""

    def __init__(self, config: ModelConfig, recipe: Recipe, dense: bool, scope: str = "block") -> None:
        super().__init__()
        self.scope = scope
        self.attention = Attention(config, recipe)
        self.feed_forward = DenseLayer(config, recipe) if dense else MoELayer(config, recipe)

    def forward(self, x: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor | None]:
        ledger.enter(self.scope)
        x = self.attention(x, sequences)
        if isinstance(self.feed_forward, MoELayer):
            return self.feed_forward(x, sequences)
        return self.feed_forward(x), None
