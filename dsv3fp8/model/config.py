"""Sizes of a model, one dataclass; the presets are configs/model/*.yaml."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from dsv3fp8.errors import UserError


@dataclass(unsafe_hash=True)
class YarnConfig:
    """YaRN for contexts above the original length; factor 1 means plain RoPE.

    The softmax scale is multiplied by (0.1 * mscale_all_dim * ln(factor) + 1)^2, cos and sin by the ratio of the two
    mscale terms. Both apply, like the frequencies, only where model.context exceeds original_context.
    """

    factor: float = 1.0  # how many times longer than original_context; 1: plain RoPE
    original_context: int = 4096  # tokens up to which YaRN stays off
    beta_fast: float = 32.0  # rotations in it from which a frequency is kept
    beta_slow: float = 1.0  # rotations in it up to which a frequency is divided by factor
    mscale: float = 1.0  # temperature of cos and sin, over that of mscale_all_dim
    mscale_all_dim: float = 1.0  # temperature of the softmax, squared

    def wrong_values(self) -> list[str]:
        """Complaints about values that make no sense each on its own."""
        problems = [
            f"model.yarn.{key}={getattr(self, key)}: give 1 or more"
            for key in ("factor", "original_context")
            if not getattr(self, key) >= 1
        ]
        problems += [
            f"model.yarn.{key}={getattr(self, key)}: give more than 0"
            for key in ("beta_fast", "beta_slow")
            if not getattr(self, key) > 0
        ]
        problems += [
            f"model.yarn.{key}={getattr(self, key)}: give 0 or more"
            for key in ("mscale", "mscale_all_dim")
            if not getattr(self, key) >= 0
        ]
        return problems


@dataclass(unsafe_hash=True)
class ModelConfig:
    """Every size of a DeepSeek-V3-style model."""

    name: str = "custom"  # for the header, the plot and the default run_dir
    vocab_size: int | None = None  # null: the tokenizer's, rounded up to a multiple of 64
    dim: int = 256  # width of the hidden state
    layers: int = 4  # blocks, those of multi-token prediction not counted
    dense_layers: int = 1  # the first k layers have a dense FFN
    heads: int = 4  # attention heads
    q_latent: int | None = 128  # width of the query latent; null: queries come straight from the hidden state
    kv_latent: int = 64  # width of the latent that keys and values come from
    head_nope: int = 32  # width of a head's query and key without position
    head_rope: int = 16  # width of their part that RoPE turns; the key's is shared by all heads
    head_v: int = 32  # width of a head's value
    ffn: int = 512  # hidden size of the dense FFN
    expert_ffn: int = 128  # hidden size of one routed or shared expert
    experts: int = 8  # routed experts of a layer
    top_k: int = 2  # routed experts that a token goes to
    shared_experts: int = 1  # experts that every token goes to, as one of their summed width
    groups: int = 1  # equal groups of experts
    kept_groups: int = 1  # groups that a token's experts may come from, best first
    score: str = "sigmoid"  # sigmoid (V3) | softmax (V2)
    normalize: bool = True  # gate weights sum to route_scale
    route_scale: float = 1.0  # factor on the gate weights
    bias_update_speed: float = 1e-3  # auxiliary-loss-free balancing; 0 freezes the bias
    balance_loss: float = 1e-4  # alpha of the sequence-wise balance loss
    mtp_depth: int = 0  # multi-token prediction: tokens predicted beyond the next
    mtp_weight: float = 0.3  # lambda of their mean loss
    tied_head: bool = False  # the output head is the embedding
    norm_eps: float = 1e-6  # added to the mean square
    context: int = 4096  # longest sequence the rope table covers
    rope_theta: float = 10000.0  # base of the rotation frequencies
    yarn: YarnConfig = field(default_factory=YarnConfig)
    init_std: float = 0.006  # standard deviation of the initial matrices

    @staticmethod
    def from_dict(data: dict[str, Any]) -> ModelConfig:
        data = dict(data)
        if isinstance(data.get("yarn"), dict):
            data["yarn"] = YarnConfig(**data["yarn"])
        config = ModelConfig(**data)
        config.validate()
        return config

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def head_qk(self) -> int:
        return self.head_nope + self.head_rope

    @property
    def moe_layers(self) -> int:
        """Layers with routed experts, the MTP blocks included."""
        return self.layers - self.dense_layers + (self.mtp_depth if self.has_experts else 0)

    @property
    def has_experts(self) -> bool:
        return self.dense_layers < self.layers

    def validate(self) -> None:
        """Refuses impossible sizes in one line that names all their keys."""
        # How sizes fit together can only be said of sizes that make sense each on its own.
        problems = self._wrong_sizes() or self._sizes_that_do_not_fit()
        if problems:
            raise UserError("; ".join(problems))

    def _wrong_sizes(self) -> list[str]:
        least = dict.fromkeys(("dim", "layers", "heads", "kv_latent", "head_nope", "head_rope", "head_v", "ffn", "context"), 1)
        least |= dict.fromkeys(("dense_layers", "shared_experts", "mtp_depth"), 0)
        least |= {key: 1 for key in ("vocab_size", "q_latent") if getattr(self, key) is not None}
        if self.has_experts:
            least |= dict.fromkeys(("experts", "expert_ffn", "top_k", "groups", "kept_groups"), 1)
        sizes = {key: (getattr(self, key), bound) for key, bound in least.items()}
        problems = [
            f"model.{key}={value}: give a whole number, {bound} or more"
            for key, (value, bound) in sizes.items()
            if _below(value, bound)
        ]
        for key in ("bias_update_speed", "balance_loss", "mtp_weight", "init_std", "route_scale"):
            if not getattr(self, key) >= 0:
                problems.append(f"model.{key}={getattr(self, key)}: give 0 or more")
        if not self.norm_eps > 0:
            problems.append(f"model.norm_eps={self.norm_eps}: give more than 0")
        if not self.rope_theta > 1:
            problems.append(f"model.rope_theta={self.rope_theta}: give more than 1")
        if self.score not in ("sigmoid", "softmax"):
            problems.append(f"model.score={self.score}: choose sigmoid or softmax")
        return problems + self.yarn.wrong_values()

    def _sizes_that_do_not_fit(self) -> list[str]:
        problems = []
        if self.head_rope % 2:
            problems.append(f"model.head_rope={self.head_rope}: RoPE rotates pairs; give an even number")
        if self.dense_layers > self.layers:
            problems.append(f"model.dense_layers={self.dense_layers} exceeds model.layers={self.layers}: lower it")
        if self.has_experts:
            problems += self._experts_that_do_not_fit()
        yarn = self.yarn
        if yarn.factor > 1 and self.context > yarn.factor * yarn.original_context:
            problems.append(
                f"model.context={self.context} exceeds model.yarn.factor * original_context = "
                f"{yarn.factor * yarn.original_context:g}: raise model.yarn.factor or lower model.context"
            )
        return problems

    def _experts_that_do_not_fit(self) -> list[str]:
        problems = []
        if self.experts % self.groups:
            problems.append(f"model.experts={self.experts} is not divisible by model.groups={self.groups}: change either")
        if self.kept_groups > self.groups:
            problems.append(f"model.kept_groups={self.kept_groups} exceeds model.groups={self.groups}: lower it")
        reachable = self.experts // self.groups * min(self.kept_groups, self.groups)
        if self.top_k > reachable:
            problems.append(
                f"model.top_k={self.top_k} exceeds the {reachable} experts that model.kept_groups={self.kept_groups} leaves: "
                "lower model.top_k or keep more groups"
            )
        return problems


def _below(value: Any, least: int) -> bool:
    return isinstance(value, bool) or not isinstance(value, int) or value < least
