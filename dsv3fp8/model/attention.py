"""Multi-head latent attention (report §2.1.1, Eq. 1-11).

c_q = W_qa x            q = W_qb norm(c_q)            (no query latent: q = W_q x)
[c_kv, k_rope] = W_kva x,   [k_nope, v] = W_kvb norm(c_kv)
x + W_o attention(rope(q), [k_nope, rope(k_rope)], v)
"""

from __future__ import annotations

from einops import rearrange
from torch import Tensor

from dsv3fp8.model.config import ModelConfig
from dsv3fp8.model.linear import Linear, Masters, RMSNorm, mint
from dsv3fp8.model.rope import softmax_scale
from dsv3fp8.model.sequence import Sequences
from dsv3fp8.model.te import make_linear
from dsv3fp8.ops.attention import attention
from dsv3fp8.ops.recompute import project_again
from dsv3fp8.ops.rope import mla_rope
from dsv3fp8.ops.stash import Activation
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
        rail, y, edges = self.norm(x, (widened(x.dtype), widened(x.dtype)))
        for_q, for_kv = mint(y, [first_q.quantizers, self.kv_a.quantizers])
        of_q = Activation(edges[0], for_q, self.norm.stash(x, for_q, first_q.quantizers))
        of_kv = Activation(edges[1], for_kv, self.norm.stash(x, for_kv, self.kv_a.quantizers))
        up_q = first_q
        if config.q_latent is not None:
            up_q, of_q = self.q_b, self._latent(self.q_a(of_q), self.q_norm, self.q_b)
        c_kv, k_rope = self.kv_a(of_kv).split([config.kv_latent, config.head_rope], -1)
        c_kv, k_rope = c_kv.contiguous(), k_rope.contiguous()  # keeping one must not keep the other
        of_kv = self._latent(c_kv, self.kv_norm, self.kv_b)
        batch = sequences.shape[0]
        q = rearrange(up_q(of_q), "(b s) (h d) -> b s h d", b=batch, h=config.heads)
        kv = rearrange(self.kv_b(of_kv), "(b s) (h d) -> b s h d", b=batch, h=config.heads)
        k_rope = rearrange(k_rope, "(b s) r -> b s r", b=batch)
        inputs = None
        if self.recipe.recompute == "norms_and_up":
            sources = up_q.projection(of_q), self.kv_b.projection(of_kv)
            inputs = project_again(*sources, k_rope, sequences.cos, sequences.sin, config.heads)
        q, k, v = mla_rope(q, kv, k_rope, sequences.cos, sequences.sin)
        heads = attention(q, k, v, self.scale, sequences.documents, self.recipe, self.out.quantizers, inputs)
        return self.out(heads, residual=rail)

    @staticmethod
    def _latent(latent: Tensor, norm: RMSNorm, up: Linear) -> Activation:
        _, y, edges = norm(latent, (latent.dtype,))
        operand = mint(y, [up.quantizers])[0]
        return Activation(edges[0], operand, norm.stash(latent, operand, up.quantizers))
