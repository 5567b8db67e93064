"""config.json of a DeepSeek-V2 or V3 checkpoint, into our sizes and back.

Every key is accounted for: one that this model has no counterpart for, or a value it cannot be built with, is a UserError that
names it. `Published` is the list of keys; what says nothing of the model's arithmetic is in IGNORED.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from dsv3fp8.errors import UserError
from dsv3fp8.model.config import ModelConfig, YarnConfig
from dsv3fp8.model.rope import uses_yarn
from dsv3fp8.schema import build, suggest

FILE = "config.json"

# Keys of config.json by our names, where a value is the same number in both.
NAMES = {
    "vocab_size": "vocab_size", "dim": "hidden_size", "layers": "num_hidden_layers", "dense_layers": "first_k_dense_replace",
    "heads": "num_attention_heads", "q_latent": "q_lora_rank", "kv_latent": "kv_lora_rank", "head_nope": "qk_nope_head_dim",
    "head_rope": "qk_rope_head_dim", "head_v": "v_head_dim", "ffn": "intermediate_size", "expert_ffn": "moe_intermediate_size",
    "experts": "n_routed_experts", "top_k": "num_experts_per_tok", "shared_experts": "n_shared_experts",
    "groups": "n_group", "kept_groups": "topk_group", "normalize": "norm_topk_prob", "route_scale": "routed_scaling_factor",
    "mtp_depth": "num_nextn_predict_layers", "tied_head": "tie_word_embeddings", "norm_eps": "rms_norm_eps",
    "context": "max_position_embeddings", "rope_theta": "rope_theta", "init_std": "initializer_range",
}  # fmt: skip
YARN_NAMES = {
    "factor": "factor", "original_context": "original_max_position_embeddings", "beta_fast": "beta_fast",
    "beta_slow": "beta_slow", "mscale": "mscale", "mscale_all_dim": "mscale_all_dim",
}  # fmt: skip

# Where `Own` is kept.
OWN = "dsv3fp8"

# The epsilon of the latents' norms, which neither DeepSeek's code nor `transformers` takes from rms_norm_eps.
LATENT_EPS = 1e-6

# Says who wrote the file, how to run it elsewhere, or what a generic class of `transformers` puts into every config.
IGNORED = frozenset(
    {
        "architectures", "auto_map", "torch_dtype", "dtype", "transformers_version", "use_cache", "bos_token_id",
        "eos_token_id", "pad_token_id", "ep_size", "pretraining_tp", "seq_aux", "output_router_logits", "_name_or_path",
        "_attn_implementation", "attn_implementation", "return_dict", "output_attentions", "output_hidden_states",
        "chunk_size_feed_forward", "is_encoder_decoder", "id2label", "label2id", "problem_type", "model_max_length",
    }
)  # fmt: skip

MODEL_TYPES = {"sigmoid": "deepseek_v3", "softmax": "deepseek_v2"}
ARCHITECTURES = {"deepseek_v3": "DeepseekV3ForCausalLM", "deepseek_v2": "DeepseekV2ForCausalLM"}


@dataclass
class RopeScaling:
    """rope_scaling, or rope_parameters of newer files. Absent keys mean what DeepSeek's code takes for them."""

    type: Literal["yarn", "default"] | None = None
    rope_type: Literal["yarn", "default"] | None = None
    rope_theta: float | None = None
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


@dataclass
class Quantization:
    """quantization_config: DeepSeek's FP8 weights, a scale for each 128x128."""

    quant_method: Literal["fp8"]
    weight_block_size: list[int]
    fmt: Literal["e4m3"] = "e4m3"
    activation_scheme: Literal["dynamic"] = "dynamic"
    scale_fmt: Literal["float", "ue8m0"] | None = None
    modules_to_not_convert: list[str] | None = None

    @property
    def scale_kind(self) -> str:
        return "pow2" if self.scale_fmt == "ue8m0" else "fp32"


@dataclass
class Own:
    """What training adds and config.json has no key for."""

    name: str | None = None
    bias_update_speed: float | None = None
    mtp_weight: float | None = None


@dataclass
class Published:
    """The keys of config.json that say what the model computes; those without a default have to be there."""

    model_type: Literal["deepseek_v2", "deepseek_v3"]
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    kv_lora_rank: int
    q_lora_rank: int | None
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    first_k_dense_replace: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    rms_norm_eps: float
    max_position_embeddings: int
    n_shared_experts: int | None
    n_group: int | None = None
    topk_group: int | None = None
    num_nextn_predict_layers: int = 0
    tie_word_embeddings: bool = False
    rope_theta: float | None = None
    rope_scaling: RopeScaling | None = None
    rope_parameters: RopeScaling | None = None
    quantization_config: Quantization | None = None
    initializer_range: float = 0.02
    aux_loss_alpha: float | None = None
    scoring_func: Literal["sigmoid", "softmax"] | None = None
    topk_method: str | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    qk_head_dim: int | None = None
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: float = 0.0
    moe_layer_freq: int = 1
    rope_interleave: bool = True
    dsv3fp8: Own = field(default_factory=Own)

    @property
    def rope(self) -> RopeScaling:
        """rope_scaling or rope_parameters, whichever is given."""
        return self.rope_parameters or self.rope_scaling or RopeScaling()

    def validate(self) -> None:
        """Raise UserError with every value that this model cannot be built with."""
        problems = [
            f"{key}={getattr(self, key)}: this model has {wanted} alone"
            for key, wanted in self._fixed().items()
            if getattr(self, key) not in (wanted, None)
        ]
        if self.rope_scaling is not None and self.rope_parameters is not None:
            problems.append("rope_scaling and rope_parameters are both given: leave one out")
        if self.model_type == "deepseek_v2":
            problems += self._wrong_for_v2()
        problems += self._wrong_rope() + self._wrong_quantization()
        if problems:
            raise UserError("; ".join(problems))

    def _fixed(self) -> dict[str, Any]:
        """Keys with the one value that they can have here."""
        v3 = self.model_type == "deepseek_v3"
        return {
            "scoring_func": "sigmoid" if v3 else "softmax",
            "topk_method": "noaux_tc" if v3 else "greedy",
            "num_key_value_heads": self.num_attention_heads,
            "head_dim": self.qk_rope_head_dim,
            "qk_head_dim": self.qk_nope_head_dim + self.qk_rope_head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "moe_layer_freq": 1,
            "rope_interleave": True,
            "rms_norm_eps": LATENT_EPS,
        }

    def _wrong_for_v2(self) -> list[str]:
        problems = []
        if (self.n_group or 1) != 1:
            problems.append(f"n_group={self.n_group} means nothing under topk_method=greedy: give 1")
        if self.norm_topk_prob:
            problems.append("norm_topk_prob=True: transformers' DeepSeek-V2 never normalizes, so its outputs would be others")
        return problems

    def _wrong_rope(self) -> list[str]:
        rope, name = self.rope, "rope_parameters" if self.rope_parameters else "rope_scaling"
        kinds = {rope.type, rope.rope_type} - {None}
        if None not in (rope.rope_theta, self.rope_theta) and rope.rope_theta != self.rope_theta:
            return [f"rope_theta={self.rope_theta} and {name}.rope_theta={rope.rope_theta} differ: leave one out"]
        if len(kinds) > 1:
            return [f"{name}.type={rope.type} and {name}.rope_type={rope.rope_type} differ: leave one out"]
        if kinds != {"yarn"}:
            given = rope.factor is not None
            return [f"{name}.factor={rope.factor} without {name}.type=yarn: give its type, or no {name}"] if given else []
        missing = [key for key in ("factor", "original_max_position_embeddings") if getattr(rope, key) is None]
        if missing:
            return [f"{name}.{missing[0]}: no value given, which {name}.type=yarn needs"]
        assert rope.original_max_position_embeddings is not None
        if self.max_position_embeddings <= rope.original_max_position_embeddings:
            return [
                f"max_position_embeddings={self.max_position_embeddings} does not exceed {name}."
                f"original_max_position_embeddings={rope.original_max_position_embeddings}: there transformers applies YaRN "
                f"all the same, and this model does not; raise the first or take {name} out"
            ]
        return wrong_mscale(rope.mscale, rope.mscale_all_dim, f"{name}.")

    def _wrong_quantization(self) -> list[str]:
        given = self.quantization_config
        if given is not None and given.weight_block_size != [128, 128]:
            return [f"quantization_config.weight_block_size={given.weight_block_size}: this project reads [128, 128] alone"]
        return []


def wrong_mscale(mscale: float, mscale_all_dim: float, prefix: str) -> list[str]:
    """What `transformers` reads otherwise than DeepSeek's code: a zero beside another number than 1."""
    if (mscale and mscale_all_dim) or (mscale, mscale_all_dim) == (1.0, 0.0):
        return []
    return [
        f"{prefix}mscale={mscale} with {prefix}mscale_all_dim={mscale_all_dim}: transformers and DeepSeek's code differ about "
        "a zero; give both a value above 0"
    ]


def read_config(directory: Path) -> tuple[Published, dict[str, Any]]:
    """(the checked keys, the whole mapping) of a directory's config.json. Raises UserError, one line, naming file and keys."""
    path = directory / FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a directory with a DeepSeek checkpoint of Hugging Face's") from error
    except ValueError as error:
        raise UserError(f"{path} is no JSON ({error}); get the file again") from error
    if not isinstance(data, dict):
        raise UserError(f"{path} holds no JSON object; get the file again")
    return parse(data, str(path)), data


def parse(data: Mapping[str, Any], path: str = FILE) -> Published:
    """The checked keys of a config.json. Raises UserError with all that is wrong, in one line that begins with `path`."""
    if data.get("model_type") not in ARCHITECTURES:
        raise UserError(
            f"{path}: model_type={data.get('model_type')}: this is another architecture; there are {', '.join(ARCHITECTURES)}"
        )
    # transformers builds the class that is named here: a file may leave it out, but not name another alone.
    given, wanted = data.get("architectures"), ARCHITECTURES[data["model_type"]]
    if given is not None and not (isinstance(given, list) and wanted in given):
        raise UserError(
            f"{path}: architectures={json.dumps(given)}: model_type={data['model_type']} is read as {wanted}; get the files of "
            "that class, or correct the key if the weights are of it"
        )
    known = [each.name for each in fields(Published)]
    unknown = sorted(data.keys() - set(known) - IGNORED)
    if unknown:
        raise UserError(
            f"{path}: {', '.join(unknown)}: {'key' if len(unknown) == 1 else 'keys'} that neither DeepSeek-V2 nor V3 has; "
            f"{suggest(unknown[0], known) or 'take them out if they change nothing'}"
        )
    try:
        return build(Published, {key: value for key, value in data.items() if key not in IGNORED})
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def to_model(published: Published, name: str, path: str = FILE) -> ModelConfig:
    """Our sizes. Raises UserError, by the names of config.json, for sizes that do not fit together.

    name: of the model, unless the file was exported here and has one.
    """
    rope, v3 = published.rope, published.model_type == "deepseek_v3"
    values: dict[str, Any] = {ours: getattr(published, theirs) for ours, theirs in NAMES.items() if hasattr(published, theirs)}
    values["shared_experts"] = published.n_shared_experts or 0
    values["groups"], values["kept_groups"] = published.n_group or 1, (published.topk_group or 1) if v3 else 1
    values["rope_theta"] = rope.rope_theta or published.rope_theta or 10000.0
    if "yarn" in (rope.type, rope.rope_type):
        values["yarn"] = YarnConfig(**{ours: getattr(rope, theirs) for ours, theirs in YARN_NAMES.items()})
    values |= {"score": "sigmoid" if v3 else "softmax", "bias_update_speed": 1e-3 if v3 else 0.0}
    if published.aux_loss_alpha is not None:
        values["balance_loss"] = published.aux_loss_alpha
    own = {key: value for key, value in asdict(published.dsv3fp8).items() if value is not None}
    config = ModelConfig(**{**values, "name": name, **own})
    try:
        config.validate()
    except UserError as error:
        raise UserError(f"{path}: {_in_their_names(str(error))}") from error
    return config


def to_published(config: ModelConfig) -> dict[str, Any]:
    """config.json of a model, without what its weights are stored in. Raises UserError where the layout has no place for it."""
    problems = _not_publishable(config)
    if problems:
        raise UserError("; ".join(problems))
    model_type = MODEL_TYPES[config.score]
    v3 = model_type == "deepseek_v3"
    data = {theirs: getattr(config, ours) for ours, theirs in NAMES.items()}
    data |= {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        "scoring_func": config.score,
        "topk_method": "noaux_tc" if v3 else "greedy",
        "num_key_value_heads": config.heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "moe_layer_freq": 1,
        "aux_loss_alpha": config.balance_loss,
        "seq_aux": True,
        "rope_scaling": _rope_scaling(config),
        "use_cache": True,
        OWN: {each.name: getattr(config, each.name) for each in fields(Own)},
    }
    if not v3:
        data |= {"n_group": 1, "topk_group": 1}
    else:
        data["rope_interleave"] = True
    return dict(sorted(data.items()))


def quantization(scale_kind: str) -> dict[str, Any]:
    """quantization_config of FP8 weights; V3.1 names its power-of-two scales, V3 does not name its FP32 ones."""
    data: dict[str, Any] = {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    }  # fmt: skip
    return dict(sorted((data | {"scale_fmt": "ue8m0"} if scale_kind == "pow2" else data).items()))


def _rope_scaling(config: ModelConfig) -> dict[str, Any] | None:
    # Named only where it acts: others apply YaRN whenever it is named.
    if not uses_yarn(config):
        return None
    return dict(sorted({"type": "yarn", **{theirs: getattr(config.yarn, ours) for ours, theirs in YARN_NAMES.items()}}.items()))


def _not_publishable(config: ModelConfig) -> list[str]:
    problems = []
    if config.norm_eps != LATENT_EPS:
        problems.append(f"model.norm_eps={config.norm_eps}: transformers' norms of the latents add {LATENT_EPS} in any case")
    if uses_yarn(config):
        problems += wrong_mscale(config.yarn.mscale, config.yarn.mscale_all_dim, "model.yarn.")
    if config.score == "sigmoid":
        if config.has_experts and config.experts < 2 * config.groups:
            problems.append(
                f"model.groups={config.groups} of model.experts={config.experts}: transformers' DeepSeek-V3 takes the two best "
                "experts of each group, so a group needs two"
            )
        return problems
    if config.kept_groups < config.groups:
        problems.append(
            f"model.kept_groups={config.kept_groups} of model.groups={config.groups} with model.score=softmax: DeepSeek-V2 "
            "ranks groups by their best expert, this model by their two best"
        )
    if config.normalize:
        problems.append("model.normalize=true with model.score=softmax: transformers' DeepSeek-V2 never normalizes")
    if config.dim % config.heads:
        problems.append(
            f"model.dim={config.dim} is no multiple of model.heads={config.heads}, as transformers' DeepSeek-V2 demands"
        )
    return problems


def _in_their_names(text: str) -> str:
    """A complaint about our keys, in those of config.json."""
    names = {f"model.yarn.{ours}": f"rope_scaling.{theirs}" for ours, theirs in YARN_NAMES.items()}
    names |= {f"model.{ours}": theirs for ours, theirs in NAMES.items()}
    pattern = re.compile("|".join(rf"{re.escape(name)}\b" for name in sorted(names, key=len, reverse=True)))
    return pattern.sub(lambda match: names[match[0]], text)
