"""SwiGLU feed-forward: the dense layers' FFN and the shared expert."""

from __future__ import annotations

from torch import Tensor

from dsv3fp8.model.config import ModelConfig
from dsv3fp8.model.linear import Masters, Reader, RMSNorm
from dsv3fp8.model.te import make_linear
from dsv3fp8.ops.residual import residual_sum
from dsv3fp8.ops.stash import Activation
from dsv3fp8.ops.swiglu import swiglu
from dsv3fp8.precision.recipe import Recipe


class FeedForward(Masters):
    """W_down (silu(W_gate x) * W_up x), [T, D] -> [T, D]. prefix: "" for dense layers, "shared_" for the shared expert."""

    def __init__(self, recipe: Recipe, dim: int, hidden: int, prefix: str = "") -> None:
        super().__init__()
        self.recipe = recipe
        self.gate_up = make_linear(recipe, f"{prefix}gate_up", dim, 2 * hidden, parts=2)
        self.down = make_linear(recipe, f"{prefix}down", hidden, dim)

    def forward(self, x: Activation) -> Tensor:
        out: Tensor = self.down(self.hidden(x))
        return out

    def hidden(self, x: Activation) -> Activation:
        """What `down` reads, [T, F]."""
        slot = self.gate_up.slot()
        return swiglu(self.gate_up(x, slot=slot), self.recipe, self.down.quantizers, slot)


class DenseLayer(Masters):
    """FFN norm, dense FFN and the residual: x1 [T, D] -> x2 [T, D]."""

    def __init__(self, config: ModelConfig, recipe: Recipe) -> None:
        super().__init__()
        self.norm = RMSNorm(config.dim, config.norm_eps, recipe, "ffn_norm")
        self.ffn = FeedForward(recipe, config.dim, config.ffn)

    def forward(self, x: Tensor) -> Tensor:
        rail, (y,) = self.norm(x, [Reader(self.ffn.gate_up.quantizers, x.dtype)])
        return residual_sum(rail, self.ffn(y))
