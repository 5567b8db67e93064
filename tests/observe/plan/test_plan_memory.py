"""Memory of a plan, against counts by hand, modules on the meta device, the contract's figures and a GPU's peaks."""

import dataclasses

import pytest
import torch
from plans import DENSE, PARAMETERS, QUANTIZED, SCALES, plan_of, preset
from support import nano, recipe

from dsv3fp8.model.config import ModelConfig
from dsv3fp8.model.transformer import Transformer
from dsv3fp8.observe.kept_bytes import contract_bytes
from dsv3fp8.observe.plan.memory import memory, transient
from dsv3fp8.observe.plan.stash import Load, kept_by_row, kept_by_token, load_of
from dsv3fp8.observe.plan.weights import units
from dsv3fp8.parallel.config import ParallelConfig


@pytest.mark.parametrize("name", ["nano", "tiny", "small", "medium", "v2_lite_16b", "v3_671b"])
def test_every_parameter_is_counted(name: str) -> None:
    config = preset(name)
    with torch.device("meta"):
        model = Transformer(config, recipe("dsv3"))
    assert sum(unit.elements for unit in units(config)) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    "config", [nano(tied_head=True, mtp_depth=2), nano(shared_experts=0), nano(dense_layers=2), nano(q_latent=None)]
)
def test_every_parameter_of_unusual_models_is_counted(config: ModelConfig) -> None:
    model = Transformer(config, recipe("dsv3"))
    assert sum(unit.elements for unit in units(config)) == sum(parameter.numel() for parameter in model.parameters())


def test_published_sizes() -> None:
    """DeepSeek-V3: 671 B without multi-token prediction; V2-Lite: 15.7 B."""
    v3 = [unit.elements for unit in units(dataclasses.replace(preset("v3_671b"), mtp_depth=0))]
    assert round(sum(v3) / 1e9) == 671
    assert round(sum(unit.elements for unit in units(preset("v2_lite_16b"))) / 1e9, 1) == 15.7


def test_weights_and_their_state_by_hand() -> None:
    used = memory(plan_of(DENSE, recipe("dsv3")))
    assert used.whole["masters"] == used.whole["gradients"] == 4 * PARAMETERS
    assert used.whole["moments"] == 8 * PARAMETERS
    # Codes with scales in both orientations, and the head in BF16.
    assert used.whole["codes"] == 2 * (QUANTIZED + 4 * SCALES) + 2 * 256_000
    assert memory(plan_of(DENSE, recipe("bf16"))).whole["codes"] == 2 * QUANTIZED + 2 * 256_000
    assert memory(plan_of(DENSE, recipe("fp32"))).whole["codes"] == 0
    assert memory(plan_of(DENSE, recipe("dsv3"), moment_bytes=2)).whole["moments"] == 4 * PARAMETERS


def test_shards_by_hand() -> None:
    """On four GPUs a quarter of everything; codes lie there once, and the head is cast as it is sent."""
    used = memory(plan_of(DENSE, recipe("dsv3"), (1, 4, 1)))
    assert used.whole["masters"] == PARAMETERS  # 4 bytes / 4 GPUs: all rows divide
    assert used.whole["codes"] == pytest.approx((QUANTIZED + 4 * SCALES) / 4, abs=24)
    replicas = memory(plan_of(DENSE, recipe("dsv3"), (4, 1, 1)))
    assert replicas.whole["masters"] == 4 * PARAMETERS


def test_experts_are_dealt_out_and_then_cut() -> None:
    config = nano()
    one = sum(weight.elements for unit in units(config) for weight in unit.weights if weight.experts)
    assert one == 2 * 4 * 3 * 40 * 48  # two MoE blocks, four experts of three 40×48 matrices
    for sizes, share in (((1, 2, 2), 2), ((2, 1, 2), 2), ((1, 4, 2), 4), ((4, 1, 4), 4)):
        parallel = ParallelConfig(*sizes)
        kept = sum(w.kept(parallel) for unit in units(config) for w in unit.weights if w.experts)
        assert kept == one // share, sizes


def test_what_a_cut_model_gathers_and_reduces_by_hand() -> None:
    """In backward of the one block: its codes both ways, the embedding ahead in BF16, the block's and the head's gradients."""
    alone, cut = plan_of(DENSE, recipe("dsv3")), plan_of(DENSE, recipe("dsv3"), (1, 4, 1))
    codes = 2 * (QUANTIZED + 4 * SCALES) + 4 * 640  # and norms in FP32
    gathered, gradients = codes + 2 * 256_000, 4 * (QUANTIZED + 640 + 256_000 + 256)
    assert transient(cut, 1) - transient(alone, 1) == gathered + gradients
    head = 2 * 256_000 + 4 * 256 + (QUANTIZED + 4 * SCALES) + 4 * 640
    assert transient(cut, 2) - transient(alone, 2) == head + 4 * (256_000 + 256)
    assert transient(cut, 0) - transient(alone, 0) == 2 * 256_000 + 4 * (PARAMETERS - 256_000 - 256)


def test_uneven_rows_count_on_the_gpu_that_has_most() -> None:
    assert memory(plan_of(DENSE, recipe("bf16"), (1, 3, 1))).whole["masters"] > 4 * PARAMETERS / 3


@pytest.mark.parametrize(
    ("name", "overrides", "listed"),
    [
        ("bf16", ("swiglu_output=keep",), 455_168), ("dsv3", (), 303_488), ("dsv3", ("swiglu_output=keep",), 322_496),
        ("dsv3", ("recompute=norms_and_up",), 155_648),
    ],
)  # fmt: skip
def test_a_v3_layer_keeps_the_contracts_bytes(name: str, overrides: tuple[str, ...], listed: int) -> None:
    """Beside the router's numbers, 4 bytes an expert and 16 a choice and 8, and 8 a choice for the exchange."""
    config, given = preset("v3_671b"), recipe(name, *overrides)
    kept = kept_by_token(config, given, "moe") + config.top_k * kept_by_row(config, given)
    assert kept - (4 * 256 + 16 * 8 + 8 + 8 * 8) == listed


@pytest.mark.parametrize(("name", "router"), [("tiny", 72), ("v2_lite_16b", 108), ("v3_671b", 168)])
def test_the_routers_numbers_are_those_that_were_observed(name: str, router: int) -> None:
    """docs/kept_bytes.md: layers with 8 experts, and 8 bytes a choice of the exchange."""
    config = dataclasses.replace(preset(name), experts=8)
    without = dataclasses.replace(config, top_k=0)
    more = kept_by_token(config, recipe("dsv3"), "moe") - contract_bytes(without, recipe("dsv3"))
    assert more - 8 * config.top_k == router


def test_a_dense_layer_keeps_its_ffn_in_place_of_the_experts() -> None:
    """BF16: inputs and outputs of both norms 4·2·256, of the latent's 2·2·128, q, k, v 2·2·(2·192 + 128), log-sum-exp 4·2,
    attention's output 2·256, SwiGLU's input 2·2·512."""
    assert kept_by_token(DENSE, recipe("bf16"), "dense") == 2048 + 512 + 2048 + 8 + 512 + 2048
    assert kept_by_token(DENSE, recipe("fp32"), "dense") == 2 * (2048 + 512 + 2048 + 512 + 2048) + 8


def test_the_gate_behind_the_expert_keeps_its_output() -> None:
    config = preset("v3_671b")
    assert kept_by_row(config, recipe("dsv3", "gate=after")) - kept_by_row(config, recipe("dsv3")) == 2 * 7168


def test_rows_of_an_expert_fill_whole_tiles() -> None:
    assert Load(tokens=100, rows=200, experts=4).padded == 200 + 127 * 4
    assert load_of(nano(), ParallelConfig(1, 4, 2), 100, 1.5) == Load(100, 300, 2)


def test_accumulated_gradients_are_there_while_the_stash_is() -> None:
    plan = plan_of(preset("small"), recipe("dsv3"), tokens=8192)
    once, often = memory(plan), memory(dataclasses.replace(plan, accumulate=2))
    assert once.peak["gradients"] < once.whole["gradients"] == often.peak["gradients"]
    assert once.total < often.total


@pytest.mark.parametrize(("name", "above_resting"), [("dsv3", 14.9), ("bf16", 20.6)])
def test_the_peak_is_within_a_tenth_of_what_an_h200_measured(name: str, above_resting: float) -> None:
    """docs/results/speed_h200/step.txt: GB above masters and moments, in a step of 32,768 tokens of `small`."""
    used = memory(plan_of(preset("small"), recipe(name), tokens=32_768))
    resting = used.peak["masters"] + used.peak["moments"]
    assert used.total - resting == pytest.approx(above_resting * 1e9, rel=0.1)
    assert used.total == pytest.approx(above_resting * 1e9 + resting, rel=0.05)


@pytest.mark.parametrize(("name", "above_resting"), [("dsv3", 6.478), ("bf16", 5.750)])
def test_a_layers_peak_is_within_a_tenth_of_what_an_h200_measured(name: str, above_resting: float) -> None:
    """docs/results/speed_h200/layer.json: GB above weights and their codes; V3's layer, eight experts, 4,096 tokens."""
    config = dataclasses.replace(preset("v3_671b"), experts=8, groups=1, kept_groups=1)
    plan = plan_of(config, recipe(name), tokens=4096)
    used = memory(dataclasses.replace(plan, units=[unit for unit in plan.units if unit.name == "moe"][:1]))
    added = sum(used.peak[part] for part in ("gradients", "stash", "transient"))
    assert added == pytest.approx(above_resting * 1e9, rel=0.1)
