"""Multi-head latent attention (report §2.1.1, Eq. 1-11).

c_q = W_qa x            q = W_qb norm(c_q)            (no query latent: q = W_q x)
[c_kv, k_rope] = W_kva x,   [k_nope, v] = W_kvb norm(c_kv)
x + W_o attention(rope(q), [k_nope, rope(k_rope)], v)
"""

from __future__ import annotations

from einops import rearrange
from torch import Tensor

from dsv3fp8.model.config import ModelConfig
from dsv3fp8.model.linear import Masters, Reader, RMSNorm
from dsv3fp8.model.rope import softmax_scale
from dsv3fp8.model.sequence import Sequences
from dsv3fp8.model.te import make_linear
from dsv3fp8.ops.attention import attention
from dsv3fp8.ops.recompute import project_again
from dsv3fp8.ops.rope import mla_rope
from dsv3fp8.precision.recipe import Recipe
from dsv3fp8.precision.widen import widened


class Attention(Masters):
    """Attention norm, MLA and the residual: x0 [T, D] -> x1 [T, D]."""

    def __init__(self, config: ModelConfig, recipe: Recipe) -> None:
        super().__init__()
        self.config, self.recipe = config, recipe
        heads, dim = config.heads, config.dim
        self.norm = RMSNorm(dim, config.norm_eps, recipe, "attention_norm")
        if config.q_latent is None:
            self.q = make_linear(recipe, "q", dim, heads * config.head_qk)
        else:
            self.q_a = make_linear(recipe, "q_a", dim, config.q_latent)
            self.q_norm = RMSNorm(config.q_latent, config.norm_eps, recipe, "q_norm")
            self.q_b = make_linear(recipe, "q_b", config.q_latent, heads * config.head_qk)
        self.kv_a = make_linear(recipe, "kv_a", dim, config.kv_latent + config.head_rope)
        self.kv_norm = RMSNorm(config.kv_latent, config.norm_eps, recipe, "kv_norm")
        self.kv_b = make_linear(recipe, "kv_b", config.kv_latent, heads * (config.head_nope + config.head_v))
        self.out = make_linear(recipe, "out", heads * config.head_v, dim)
        self.scale = softmax_scale(config)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        config = self.config
        first_q = self.q if config.q_latent is None else self.q_a
        # Their gradients are summed in fp32 before the one rounding.
        rail, (of_q, of_kv) = self.norm(x, [Reader(linear.quantizers, widened(x.dtype)) for linear in (first_q, self.kv_a)])
        up_q = first_q
        if config.q_latent is not None:
            up_q, slot = self.q_b, self.q_a.slot()
            of_q, _ = self.q_norm.latent(self.q_a(of_q, slot=slot), self.q_b.quantizers, slot)
        slot = self.kv_a.slot()
        of_kv, k_rope = self.kv_norm.latent(self.kv_a(of_kv, slot=slot), self.kv_b.quantizers, slot)
        batch = sequences.shape[0]
        slots = up_q.slot(), self.kv_b.slot()
        q = rearrange(up_q(of_q, slot=slots[0]), "(b s) (h d) -> b s h d", b=batch, h=config.heads)
        kv = rearrange(self.kv_b(of_kv, slot=slots[1]), "(b s) (h d) -> b s h d", b=batch, h=config.heads)
        k_rope = rearrange(k_rope, "(b s) r -> b s r", b=batch)
        inputs = None
        if self.recipe.recompute == "norms_and_up":
            sources = up_q.projection(of_q), self.kv_b.projection(of_kv)
            inputs = project_again(*sources, k_rope, sequences.cos, sequences.sin, config.heads)
        q, k, v = mla_rope(q, kv, k_rope, sequences.cos, sequences.sin, slots)
        heads = attention(q, k, v, self.scale, sequences.documents, self.recipe, self.out.quantizers, inputs)
        return self.out(heads, residual=rail)
