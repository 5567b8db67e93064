"""Memory of a plan, against counts by hand, modules on the meta device, the contract's figures and a GPU's peaks."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from plans import DENSE, PARAMETERS, QUANTIZED, SCALES, plan_of, preset
from support import nano, recipe

from dsv3fp8.kernels.exchange.reference import capacity
from dsv3fp8.model.config import ModelConfig
from dsv3fp8.model.transformer import Transformer
from dsv3fp8.observe.kept_bytes import contract_bytes
from dsv3fp8.observe.plan.memory import Planned, added_later, memory, travelling
from dsv3fp8.observe.plan.stages import stages
from dsv3fp8.observe.plan.stash import Load, kept_by_row, kept_by_token, kept_bytes, load_of
from dsv3fp8.observe.plan.weights import units
from dsv3fp8.parallel.config import ParallelConfig

RESULTS = Path(__file__).parents[3] / "docs" / "results" / "fast_h200"


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
    """On four GPUs a quarter of everything but the scales; codes lie there once, and the head is cast as it is sent."""
    used = memory(plan_of(DENSE, recipe("dsv3"), (1, 4, 1)))
    assert used.whole["masters"] == PARAMETERS  # 4 bytes / 4 GPUs: all rows divide
    assert used.whole["codes"] == QUANTIZED / 4 + 4 * SCALES
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
    """In backward of the one block: its codes, of its largest weight the other way, too, and what belongs to no block."""
    alone, cut = plan_of(DENSE, recipe("dsv3")), plan_of(DENSE, recipe("dsv3"), (1, 4, 1))
    rest, block = 2 * 512_000 + 4 * 256, QUANTIZED + 4 * 640  # BF16, codes, and norms in FP32
    of_block, of_head = 4 * (QUANTIZED + 640), 4 * (256_000 + 256)  # gradients
    assert travelling(cut, 2) - travelling(alone, 2) == rest + block + of_head
    assert travelling(cut, 1) - travelling(alone, 1) == rest + block + 1024 * 256 + of_block + of_head
    assert travelling(cut, 0) - travelling(alone, 0) == rest + of_block + of_head + 4 * 256_000


def test_experts_that_do_not_divide_are_cut_in_rows() -> None:
    three = next(w for w in units(nano(experts=3, groups=1, kept_groups=1))[2].weights if w.op == "expert_down")
    assert three.kept(ParallelConfig(1, 2, 1)) == 3 * 24 * 40
    assert three.kept(ParallelConfig(1, 5, 1)) == 48 * 40  # 48 rows do not divide by 5 either: an expert at most


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
    assert Load(tokens=100, rows=200, experts=4, reach=100).padded == 4 * 128
    assert Load(tokens=100, rows=200, experts=4, reach=400).padded == 5 * 128  # 129 + 69 + 1 + 1
    assert load_of(nano(), ParallelConfig(1, 4, 2), 100, 1.5) == Load(100, 300, 2, 200)
    load = load_of(nano(), ParallelConfig(), 1000, 1.0)
    assert load.padded == capacity(1000, 2, 4)


def test_accumulated_gradients_are_there_while_the_stash_is() -> None:
    plan = plan_of(preset("small"), recipe("dsv3"), tokens=8192)
    once, often = memory(plan), memory(dataclasses.replace(plan, accumulate=2))
    assert once.peak["gradients"] < once.whole["gradients"] == often.peak["gradients"]
    assert once.total < often.total


def measured_layer(name: str) -> Planned:
    """V3's MoE layer, eight experts, 4,096 tokens, as docs/results/fast_h200/layer.json has it."""
    config = dataclasses.replace(preset("v3_671b"), experts=8, groups=1, kept_groups=1)
    plan = plan_of(config, recipe(name), tokens=4096)
    return dataclasses.replace(plan, units=[unit for unit in plan.units if unit.name == "moe"][:1])


@pytest.mark.parametrize("name", ["dsv3", "bf16"])
def test_a_layers_peak_and_stash_are_what_an_h200_measured(name: str) -> None:
    """Above weights, their codes, the input and dY, which lie there before; in place of dY the page counts the output."""
    found = json.loads((RESULTS / "layer.json").read_text(encoding="utf-8"))["breakdowns"][name]
    plan = measured_layer(name)
    used = memory(plan)
    added = sum(used.peak[part] for part in ("gradients", "stash", "transient"))
    assert used.moment == "backward of moe 0, experts"
    assert added - 2 * 4096 * 7168 == pytest.approx(found["peak_gb"] * 1e9, rel=0.02)
    assert kept_bytes(plan.config, plan.recipe, "moe", plan.load) / 4096 == pytest.approx(found["kept_bytes_per_token"], abs=2)


@pytest.mark.parametrize(
    ("name", "recipe_name", "tokens", "accumulate"),
    [(model, name, *batch) for model, batch in (("small", (32768, 1)), ("medium", (8192, 8))) for name in ("dsv3", "bf16")],
)
def test_a_steps_peak_is_within_a_twentieth_of_what_an_h200_measured(
    name: str, recipe_name: str, tokens: int, accumulate: int
) -> None:
    """Above masters and moments, steps replayed from a CUDA graph; codes go with each step."""
    found = json.loads((RESULTS / f"step_{name}.json").read_text(encoding="utf-8"))["breakdowns"][recipe_name]
    used = memory(plan_of(preset(name), recipe(recipe_name), tokens=tokens, accumulate=accumulate))
    above = used.total - used.peak["masters"] - used.peak["moments"]
    assert above == pytest.approx(found["peak_gb"] * 1e9, rel=0.05)


def test_every_layouts_peak_is_within_a_twentieth_of_what_two_h200s_measured() -> None:
    """All that was allocated, of the fullest GPU: `medium`, moments in BF16, 16,384 tokens a GPU."""
    rows = json.loads((RESULTS.parent / "many_gpus_h200" / "scale.json").read_text(encoding="utf-8"))["rows"]
    assert len(rows) == 10
    for row in rows:
        sizes = tuple(int(word.partition("=")[2]) for word in row["parallel"])
        plan = plan_of(preset("medium"), recipe(row["recipe"]), sizes, tokens=16384, moment_bytes=2)
        assert memory(plan).total == pytest.approx(row["modes"]["launched"]["peak"], rel=0.05), row["name"]


def test_what_the_experts_backward_holds_by_hand() -> None:
    """Bytes a row, D = 7168 and F = 2048: dY's codes, re-tiled; the activation, twice; dact; dh both ways; dX; received."""
    rows, stream = 8 * 4096, 3 * 4096 * 2 * 7168  # dY, dX of the shared expert, dX
    for name, row in (
        ("dsv3", 2 * 7392 + 2 * 2112 + 2 * 2048 + 2 * 4224 + 2 * 7168 + 7392),
        ("bf16", 2 * 7168 + 2 * 2048 + 2 * 2048 + 2 * 4096 + 2 * 7168),
    ):
        plan = measured_layer(name)
        (stage,) = [s for s in stages(plan.config, plan.recipe, "moe", plan.load, dealt=False) if s.name == "experts"]
        assert stage.work == stream + rows * row
        # Gone by then: the shared expert's SwiGLU input and the norm's output.
        assert stage.freed == 4096 * ({"dsv3": 4224 + 7392, "bf16": 8192 + 2 * 7168}[name])


def test_rows_sent_back_lie_beside_those_computed() -> None:
    plan = measured_layer("dsv3")
    here, dealt = ({s.name: s.work for s in stages(plan.config, plan.recipe, "moe", plan.load, d)} for d in (False, True))
    assert dealt["experts"] - here["experts"] == 2 * (8 * 4096) * 2 * 7168
    assert dealt["attention"] == here["attention"]


def test_what_is_added_to_sums_of_earlier_micro_batches() -> None:
    """The experts' FP8 wgrad adds by itself; a BF16 one, and any linear's, lies beside the sum."""
    for name, beside in (("dsv3", 0), ("bf16", 4 * 8 * 3 * 2048 * 7168)):
        plan = dataclasses.replace(measured_layer(name), accumulate=2)
        found = {s.name: added_later(plan, plan.units[0], s) for s in stages(plan.config, plan.recipe, "moe", plan.load, False)}
        assert found == {"FFN": 4 * 4096 * 7168, "experts": beside, "attention": 4 * 16384 * 7168}
