"""config.json into our sizes and back: DeepSeek's own, small ones that are easy to get wrong, and broken ones."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import DeepseekV2Config, DeepseekV3Config

from dsv3fp8.config import load_config
from dsv3fp8.errors import UserError
from dsv3fp8.hub.settings import IGNORED, parse, quantization, read_config, to_model, to_published
from dsv3fp8.model.config import ModelConfig, YarnConfig

FIXTURES = Path(__file__).parent / "fixtures"
PRESETS = {"deepseek_v2_lite": "v2_lite_16b", "deepseek_v3": "v3_671b", "deepseek_v3_1": "v3_671b"}


def read(name: str) -> dict[str, Any]:
    return json.loads((FIXTURES / f"{name}.json").read_text())


def model_of(data: dict[str, Any]) -> ModelConfig:
    return to_model(parse(data), "name")


def complaint(data: dict[str, Any]) -> str:
    with pytest.raises(UserError) as error:
        to_model(parse(data, "DIR/config.json"), "name", "DIR/config.json")
    text = str(error.value)
    assert text.startswith("DIR/config.json: ")
    assert "\n" not in text
    return text.removeprefix("DIR/config.json: ")


@pytest.mark.parametrize("name", PRESETS)
def test_deepseeks_own_configurations_are_the_presets(name: str) -> None:
    """The presets have the context of pre-training, and the spread that the report trains from."""
    preset = load_config([f"model={PRESETS[name]}"]).model
    published = model_of(read(name))
    assert published == dataclasses.replace(preset, name="name", context=163840, init_std=0.02)


@pytest.mark.parametrize("name", PRESETS)
def test_and_come_back_key_by_key(name: str) -> None:
    data = read(name)
    back = to_published(model_of(data))
    if "quantization_config" in data:
        back["quantization_config"] = quantization(parse(data).quantization_config.scale_kind)
    says_nothing = IGNORED - {"architectures", "seq_aux", "use_cache"}
    assert {key: back.get(key) for key in data.keys() - says_nothing} == {key: data[key] for key in data.keys() - says_nothing}
    added = {"aux_loss_alpha", "seq_aux", "dsv3fp8", "num_nextn_predict_layers", "rope_interleave"}
    assert back.keys() - data.keys() <= added


def test_scale_fmt_is_the_kind_of_scale() -> None:
    """V3 does not name its FP32 scales, V3.1 names its powers of two."""
    assert parse(read("deepseek_v3")).quantization_config.scale_kind == "fp32"
    assert parse(read("deepseek_v3_1")).quantization_config.scale_kind == "pow2"
    assert parse(read("deepseek_v2_lite")).quantization_config is None
    assert quantization("pow2") == read("deepseek_v3_1")["quantization_config"]
    assert quantization("fp32") == read("deepseek_v3")["quantization_config"]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("good", {}),
        ("all_dense", {"dense_layers": 3}),
        ("all_moe", {"dense_layers": 0}),
        ("no_mtp", {"mtp_depth": 0}),
        ("no_q_lora", {"q_latent": None}),
        ("no_shared", {"shared_experts": 0}),
        ("norm_off", {"normalize": False}),
        ("one_expert_per_group", {"groups": 8}),
        ("tied", {"tied_head": True}),
        ("no_yarn", {"yarn": YarnConfig()}),
    ],
)
def test_small_configurations_are_read_for_what_they_say(name: str, changes: dict[str, Any]) -> None:
    good = ModelConfig(
        name="name", vocab_size=512, dim=256, layers=3, dense_layers=1, heads=4, q_latent=96, kv_latent=64, head_nope=32,
        head_rope=16, head_v=32, ffn=640, expert_ffn=176, experts=8, top_k=2, shared_experts=1, groups=4, kept_groups=2,
        route_scale=2.5, mtp_depth=1, context=256, yarn=YarnConfig(40, 64), init_std=0.02,
    )  # fmt: skip
    assert model_of(read(f"hf_config_{name}")) == dataclasses.replace(good, **changes)


def test_more_experts_a_token_than_the_kept_groups_hold_is_said_in_their_names() -> None:
    """H11: keys of config.json, since that is the file to put right."""
    assert complaint(read("hf_config_k_too_big")).startswith(
        "num_experts_per_tok=5 exceeds the 4 experts that topk_group=2 leaves: lower num_experts_per_tok or keep more groups"
    )
    assert complaint(read("hf_config_k_more_than_experts")).startswith("num_experts_per_tok=9 exceeds the 4 experts")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"v_head_dim": ...}, "v_head_dim: no value given"),
        ({"hidden_size": None}, "hidden_size=null: expected a whole number"),
        ({"vocab_size": "many"}, "vocab_size=many: expected a whole number"),
        ({"index_topk": 2048, "index_n_heads": 64}, "index_n_heads, index_topk: keys that neither DeepSeek-V2 nor V3 has"),
        ({"hiden_size": 256}, "hiden_size: key that neither DeepSeek-V2 nor V3 has; did you mean hidden_size?"),
        ({"model_type": "llama"}, "model_type=llama: this is another architecture; there are deepseek_v3, deepseek_v2"),
        (
            {"architectures": ["DeepseekV3ForSequenceClassification"]},
            'architectures=["DeepseekV3ForSequenceClassification"]: model_type=deepseek_v3 is read as DeepseekV3ForCausalLM',
        ),
        ({"architectures": ["DeepseekV2ForCausalLM"]}, 'architectures=["DeepseekV2ForCausalLM"]: model_type=deepseek_v3'),
        ({"architectures": []}, "architectures=[]: model_type=deepseek_v3 is read as DeepseekV3ForCausalLM"),
        ({"architectures": "DeepseekV3ForCausalLM"}, 'architectures="DeepseekV3ForCausalLM": model_type=deepseek_v3'),
        ({"hidden_act": "gelu"}, "hidden_act=gelu: this model has silu alone"),
        ({"attention_bias": True}, "attention_bias=True: this model has False alone"),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2: this model has 1 alone"),
        ({"num_key_value_heads": 1}, "num_key_value_heads=1: this model has 4 alone"),
        ({"qk_head_dim": 64}, "qk_head_dim=64: this model has 48 alone"),
        ({"rope_interleave": False}, "rope_interleave=False: this model has True alone"),
        ({"scoring_func": "softmax"}, "scoring_func=softmax: this model has sigmoid alone"),
        ({"topk_method": "greedy"}, "topk_method=greedy: this model has noaux_tc alone"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05: this model has 1e-06 alone"),
        ({"n_group": 3}, "n_routed_experts=8 is not divisible by n_group=3"),
        ({"first_k_dense_replace": 4}, "first_k_dense_replace=4 exceeds num_hidden_layers=3"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim=15: RoPE rotates pairs"),
        (
            {"max_position_embeddings": 64},
            "max_position_embeddings=64 does not exceed rope_scaling.original_max_position_embed",
        ),
        ({"max_position_embeddings": 9999}, "max_position_embeddings=9999 exceeds rope_scaling.factor * original_context"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling.type=linear: expected one of yarn, default"),
        ({"rope_scaling": {"factor": 2}}, "rope_scaling.factor=2.0 without rope_scaling.type=yarn"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "rope_scaling.original_max_position_embeddings: no value given"),
        ({"rope_scaling": {"type": "yarn", "truncate": False}}, "rope_scaling.truncate: no such key"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_scaling and rope_parameters are both given"),
        (
            {"rope_scaling": None, "rope_parameters": {"rope_theta": 1e6}},
            "rope_theta=10000.0 and rope_parameters.rope_theta=100",
        ),
        (
            {"quantization_config": {"quant_method": "awq", "weight_block_size": [128, 128]}},
            "quantization_config.quant_method=awq",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [1, 128]}},
            "quantization_config.weight_block_size=[1, 128]: this project reads [128, 128] alone",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config.weight_block_size: no value given"),
        ({"dsv3fp8": {"bias_update_speed": "fast"}}, "dsv3fp8.bias_update_speed=fast: expected a number"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_missing_unknown_and_inconsistent_keys_are_named(changes: dict[str, Any], said: str) -> None:
    data = copy.deepcopy(read("hf_config_good")) | changes
    data = {key: value for key, value in data.items() if value is not ...}
    assert said in complaint(data)


def test_a_zero_in_the_yarn_temperatures_is_refused_where_libraries_differ() -> None:
    data = read("hf_config_good")
    data["rope_scaling"]["mscale"] = 0.0
    assert "differ about a zero" in complaint(data)
    del data["rope_scaling"]["mscale"], data["rope_scaling"]["mscale_all_dim"]
    assert (model_of(data).yarn.mscale, model_of(data).yarn.mscale_all_dim) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}, "topk_method=group_limited_greedy"),
        ({"n_group": 8}, "n_group=8 means nothing under topk_method=greedy"),
        ({"norm_topk_prob": True}, "norm_topk_prob=True: transformers' DeepSeek-V2 never normalizes"),
    ],
)
def test_what_deepseek_v2_cannot_be_here_is_named(changes: dict[str, Any], said: str) -> None:
    assert said in complaint(read("deepseek_v2_lite") | changes)


@pytest.mark.parametrize("newer", [False, True])
def test_files_that_transformers_writes_are_read(newer: bool) -> None:
    """Its own keys beside DeepSeek's, rope_parameters in place of rope_scaling."""
    for name, kind in (("deepseek_v3", DeepseekV3Config), ("deepseek_v2_lite", DeepseekV2Config)):
        data = {key: value for key, value in read(name).items() if key != "quantization_config"}
        written = json.loads(kind(**data).to_json_string(use_diff=newer))
        assert "rope_parameters" in written
        assert model_of(written) == model_of(data)


@pytest.mark.parametrize("name", ["good", "tied", "no_yarn", "no_q_lora", "norm_off"])
def test_transformers_reads_what_is_written_as_what_was_read(name: str) -> None:
    data = read(f"hf_config_{name}")
    ours = DeepseekV3Config(**to_published(model_of(data)))
    theirs = DeepseekV3Config(**data, num_key_value_heads=4)
    added = {"dsv3fp8", "architectures", "aux_loss_alpha", "seq_aux", "moe_layer_freq"}
    assert {k: v for k, v in ours.to_dict().items() if k not in added} == {
        k: v for k, v in theirs.to_dict().items() if k not in added
    }


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"norm_eps": 1e-5}, "model.norm_eps=1e-05: transformers' norms of the latents add 1e-06"),
        ({"groups": 8, "kept_groups": 8}, "model.groups=8 of model.experts=8: transformers' DeepSeek-V3 takes the two best"),
        ({"score": "softmax", "kept_groups": 2, "groups": 4}, "model.kept_groups=2 of model.groups=4 with model.score=softmax"),
        ({"score": "softmax"}, "model.normalize=true with model.score=softmax"),
        ({"score": "softmax", "normalize": False, "heads": 3}, "model.dim=256 is no multiple of model.heads=3"),
        ({"context": 8192, "yarn": YarnConfig(4, mscale=0.0)}, "model.yarn.mscale=0.0 with model.yarn.mscale_all_dim=1.0"),
    ],
)
def test_models_that_the_layout_has_no_place_for_are_not_exported(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        to_published(ModelConfig(**{"vocab_size": 512, **changes}))
    assert said in str(error.value)


def test_yarn_is_named_only_where_it_acts() -> None:
    """Others apply it whenever it is named; DeepSeek's pre-training context is below it."""
    preset = load_config(["model=v3_671b"]).model
    assert to_published(preset)["rope_scaling"] is None
    assert to_published(dataclasses.replace(preset, context=163840))["rope_scaling"] == read("deepseek_v3")["rope_scaling"]


def test_what_training_adds_comes_back() -> None:
    model = dataclasses.replace(load_config(["model=tiny"]).model, vocab_size=320)
    data = json.loads(json.dumps(to_published(model)))
    assert to_model(parse(data), "another") == dataclasses.replace(model, yarn=YarnConfig())


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "No such file"), ("{", "is no JSON"), ("[1]", "holds no JSON object"), ("\xff", "is no JSON")],
)
def test_a_config_that_cannot_be_read_is_named(text: str | None, said: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_bytes(text.encode("latin1"))
    with pytest.raises(UserError, match=r"config\.json") as error:
        read_config(tmp_path)
    assert said in str(error.value)
