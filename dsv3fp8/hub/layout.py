"""The published tensors of a model, and where the values of each lie in ours.

Gate and up halves, which we keep as one parameter, and the experts, which we keep as stacks, are tensors of their own there.
Rotary columns lie in interleaved pairs in both, so nothing is permuted. A multi-token-prediction module is published as one
more layer behind the last; its projection reads [embedding; hidden], ours [hidden; embedding].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv3fp8.model.config import ModelConfig
from dsv3fp8.model.transformer import Transformer
from dsv3fp8.precision.recipe import Recipe

ATTENTION = (
    ("input_layernorm.weight", "attention.norm.weight", None),
    ("self_attn.kv_a_proj_with_mqa.weight", "attention.kv_a.weight", "kv_a"),
    ("self_attn.kv_a_layernorm.weight", "attention.kv_norm.weight", None),
    ("self_attn.kv_b_proj.weight", "attention.kv_b.weight", "kv_b"),
    ("self_attn.o_proj.weight", "attention.out.weight", "out"),
    ("post_attention_layernorm.weight", "feed_forward.norm.weight", None),
)
QUERY = (("self_attn.q_proj.weight", "attention.q.weight", "q"),)
LATENT_QUERY = (
    ("self_attn.q_a_proj.weight", "attention.q_a.weight", "q_a"),
    ("self_attn.q_a_layernorm.weight", "attention.q_norm.weight", None),
    ("self_attn.q_b_proj.weight", "attention.q_b.weight", "q_b"),
)


@dataclass(frozen=True)
class Published:
    """One published tensor.

    name: there. ours: the parameter or buffer that holds its values; index: which of them.
    op: the linear it belongs to, whose weights may be FP8; None for one that never is.
    fp32: stays FP32 in every format. swapped: the halves of its columns lie in the other order.
    copy_of: another published tensor that has the same values by definition; files may leave the copy out.
    """

    name: str
    ours: str
    index: tuple[int | slice, ...] = ()
    op: str | None = None
    fp32: bool = False
    swapped: bool = False
    copy_of: str | None = None

    def part(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Its values among ours, a view, columns in our order."""
        return tensors[self.ours][self.index]

    def reordered(self, values: Tensor) -> Tensor:
        """Columns from our order into theirs, or the other way."""
        return values.roll(values.shape[-1] // 2, -1) if self.swapped else values


def layout(config: ModelConfig) -> list[Published]:
    """Every published tensor of the model, in the order in which it is computed."""
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    tensors = [Published(embedding, "embedding")]
    for layer in range(config.layers):
        tensors += _block(f"model.layers.{layer}.", f"layers.{layer}.", config, dense=layer < config.dense_layers)
    for depth in range(config.mtp_depth):
        theirs, ours = f"model.layers.{config.layers + depth}.", f"mtp.{depth}."
        tensors += [
            Published(f"{theirs}embed_tokens.weight", "embedding", copy_of=embedding),
            Published(f"{theirs}enorm.weight", f"{ours}embedding_norm.weight"),
            Published(f"{theirs}hnorm.weight", f"{ours}hidden_norm.weight"),
            Published(f"{theirs}eh_proj.weight", f"{ours}projection.weight", swapped=True),
            *_block(theirs, f"{ours}block.", config, dense=not config.has_experts),
            Published(f"{theirs}shared_head.norm.weight", f"{ours}norm.weight"),
        ]
        if not config.tied_head:
            tensors.append(Published(f"{theirs}shared_head.head.weight", "head", copy_of=head))
    tensors.append(Published("model.norm.weight", "norm.weight"))
    if not config.tied_head:
        tensors.append(Published(head, "head"))
    return tensors


def shapes(config: ModelConfig, recipe: Recipe) -> dict[str, Tensor]:
    """Our parameters and buffers without their values, on the meta device."""
    with torch.device("meta"):
        return dict(Transformer(config, recipe).state_dict())


def _block(theirs: str, ours: str, config: ModelConfig, dense: bool) -> Iterator[Published]:
    for there, here, op in (*(QUERY if config.q_latent is None else LATENT_QUERY), *ATTENTION):
        yield Published(theirs + there, ours + here, op=op)
    if dense:
        yield from _feed_forward(f"{theirs}mlp.", f"{ours}feed_forward.ffn.", config.ffn, "")
        return
    yield Published(f"{theirs}mlp.gate.weight", f"{ours}feed_forward.router.weight", fp32=True)
    if config.score == "sigmoid":
        yield Published(f"{theirs}mlp.gate.e_score_correction_bias", f"{ours}feed_forward.router.bias", fp32=True)
    for expert in range(config.experts):
        yield from _expert(f"{theirs}mlp.experts.{expert}.", f"{ours}feed_forward.experts.", config.expert_ffn, expert)
    if config.shared_experts:
        hidden = config.shared_experts * config.expert_ffn
        yield from _feed_forward(f"{theirs}mlp.shared_experts.", f"{ours}feed_forward.shared.", hidden, "shared_")


def _feed_forward(theirs: str, ours: str, hidden: int, prefix: str) -> Iterator[Published]:
    gate, up = (slice(None, hidden),), (slice(hidden, None),)
    yield Published(f"{theirs}gate_proj.weight", f"{ours}gate_up.weight", gate, f"{prefix}gate_up")
    yield Published(f"{theirs}up_proj.weight", f"{ours}gate_up.weight", up, f"{prefix}gate_up")
    yield Published(f"{theirs}down_proj.weight", f"{ours}down.weight", op=f"{prefix}down")


def _expert(theirs: str, ours: str, hidden: int, expert: int) -> Iterator[Published]:
    yield Published(f"{theirs}gate_proj.weight", f"{ours}gate_up", (expert, slice(None, hidden)), "expert_gate_up")
    yield Published(f"{theirs}up_proj.weight", f"{ours}gate_up", (expert, slice(hidden, None)), "expert_gate_up")
    yield Published(f"{theirs}down_proj.weight", f"{ours}down", (expert,), "expert_down")
