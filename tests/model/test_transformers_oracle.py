"""An independent oracle: `transformers`' DeepSeek-V3 and V2 with the same weights, under recipe fp32.

Same logits and gradients to 1e-5 of the largest value of each tensor, and the same chosen experts.
"""

import dataclasses
import json
import logging
from typing import Any

import pytest
import torch
from published import published, under_our_names
from support import recipe, relative
from torch import Tensor, nn
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

from dsv3fp8.hub.settings import parse, to_model
from dsv3fp8.kernels.router.reference import Rule, select_experts
from dsv3fp8.model.config import ModelConfig, YarnConfig
from dsv3fp8.model.router import Router
from dsv3fp8.model.transformer import Transformer

TOLERANCE = 1e-5

BASE: dict[str, Any] = {
    "vocab_size": 80, "hidden_size": 48, "intermediate_size": 72, "moe_intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 3, "num_key_value_heads": 3, "n_shared_experts": 1, "n_routed_experts": 8,
    "routed_scaling_factor": 1.0, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "v_head_dim": 20,
    "qk_nope_head_dim": 12, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    "norm_topk_prob": True, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "attn_implementation": "eager",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 4,
    "beta_slow": 1,
}  # fmt: skip

CASES: dict[str, dict[str, Any]] = {
    "all dense": {"first_k_dense_replace": 3},
    "MoE with a query latent": {},
    "all MoE, no query latent, two shared experts": {
        "q_lora_rank": None, "first_k_dense_replace": 0, "n_shared_experts": 2,
    },
    "groups": {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "routed_scaling_factor": 2.5},
    "gate weights as they are (T05)": {"norm_topk_prob": False, "routed_scaling_factor": 2.5},
    "yarn (A01)": {"max_position_embeddings": 128, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    "yarn, unequal mscale (A01)": {
        "max_position_embeddings": 128, "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 1.0},
    },
    "everything with a tied head": {
        "n_group": 4, "topk_group": 2, "tie_word_embeddings": True, "max_position_embeddings": 128,
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.707},
    },
}  # fmt: skip


def ours_of(config: Any) -> ModelConfig:
    """Our sizes from those of a `transformers` config, as a file of it has them."""
    data = json.loads(config.to_json_string())
    return dataclasses.replace(to_model(parse(data), "theirs"), balance_loss=0.0, mtp_depth=0)


def pair(theirs: nn.Module, config: Any) -> Transformer:
    """Fills theirs with random weights and biases, and ours with the same."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in theirs.parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(1.0 + 0.2 * noise if tensor.dim() == 1 else 0.15 * noise)
        for name, tensor in theirs.named_buffers():
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
    model = Transformer(ours_of(config), recipe("fp32"))
    state = under_our_names(published(theirs.state_dict()), model.config)
    missing = model.load_state_dict(state, strict=False).missing_keys
    assert all(key.endswith("router.bias") for key in missing), missing
    return model


def chosen_by_ours(model: Transformer, tokens: Tensor) -> list[Tensor]:
    chosen: list[Tensor] = []
    routers = [m for m in model.modules() if isinstance(m, Router)]
    hooks = [router.register_forward_hook(lambda _, __, out: chosen.append(out.ids)) for router in routers]
    model.logits(tokens)
    for hook in hooks:
        hook.remove()
    return chosen


def chosen_by_theirs(theirs: nn.Module, tokens: Tensor) -> list[Tensor]:
    chosen: list[Tensor] = []
    gates = [m for name, m in theirs.named_modules() if name.endswith("mlp.gate")]
    hooks = [gate.register_forward_hook(lambda _, __, out: chosen.append(out[2])) for gate in gates]
    with torch.no_grad():
        theirs(tokens)
    for hook in hooks:
        hook.remove()
    return chosen


def compare(theirs: nn.Module, config: Any, length: int = 24) -> None:
    model = pair(theirs, config)
    tokens = torch.randint(config.vocab_size, (2, length + 1), generator=torch.Generator().manual_seed(1))

    ours_chosen, theirs_chosen = chosen_by_ours(model, tokens[:, :-1]), chosen_by_theirs(theirs, tokens[:, :-1])
    assert len(ours_chosen) == len(theirs_chosen) == config.num_hidden_layers - config.first_k_dense_replace
    for ours, others in zip(ours_chosen, theirs_chosen, strict=True):
        assert torch.equal(ours.sort(-1).values, others.sort(-1).values)
        assert ours.unique().numel() > config.num_experts_per_tok  # a router that always takes the same proves nothing

    logits = theirs(tokens[:, :-1]).logits
    assert relative(model.logits(tokens[:, :-1]), logits.detach()) < TOLERANCE

    nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    losses = model(tokens)
    model.objective(losses, losses.totals).backward()
    want = under_our_names(published({name: p.grad for name, p in theirs.named_parameters()}), model.config)
    got = {name: p.grad for name, p in model.named_parameters()}
    assert got.keys() == want.keys()
    errors = {name: relative(got[name], want[name]) for name in want}
    assert max(errors.values()) < TOLERANCE, errors


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)


@pytest.mark.parametrize("case", CASES)
def test_deepseek_v3_gives_the_same_logits_gradients_and_experts(case: str) -> None:
    config = DeepseekV3Config(**(BASE | CASES[case]))
    compare(DeepseekV3ForCausalLM(config).float(), config)


@pytest.mark.parametrize("yarn", [False, True])
def test_deepseek_v2_lite_gives_the_same_with_softmax_scores(yarn: bool) -> None:
    """Softmax scores, no query latent, unnormalized gate weights, scaled all the same (T05)."""
    rope = YARN | {"mscale": 0.707, "mscale_all_dim": 0.707} if yarn else BASE["rope_parameters"]
    changes = {"q_lora_rank": None, "norm_topk_prob": False, "n_shared_experts": 2, "routed_scaling_factor": 1.5}
    config = DeepseekV2Config(**(BASE | changes | {"rope_parameters": rope, "max_position_embeddings": 128}))
    compare(DeepseekV2ForCausalLM(config).float(), config)


def test_yarn_stays_off_below_the_original_context() -> None:
    """The report's choice: YaRN acts above the original length only; `transformers` applies it whenever it is named."""
    plain = DeepseekV3Config(**BASE)
    theirs = DeepseekV3ForCausalLM(plain).float()
    paired = pair(theirs, plain)
    model = Transformer(dataclasses.replace(paired.config, yarn=YarnConfig(factor=8.0, original_context=64)), paired.recipe)
    model.load_state_dict(paired.state_dict())
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert relative(model.logits(tokens), theirs(tokens).logits) < TOLERANCE


def test_a_bias_changes_the_choice_of_the_oracle_too() -> None:
    """Without this, equal choices might only mean that the bias is too small to matter."""
    config = DeepseekV3Config(**(BASE | CASES["groups"]))
    model = pair(DeepseekV3ForCausalLM(config).float(), config)
    router = next(m for m in model.modules() if isinstance(m, Router))
    scores = torch.rand(64, 8, generator=torch.Generator().manual_seed(2))
    rule = Rule("sigmoid", 3, 4, 2, True, 1.0)
    assert not torch.equal(select_experts(scores, router.bias, rule), select_experts(scores, torch.zeros(8), rule))
