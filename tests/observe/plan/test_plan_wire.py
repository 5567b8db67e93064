"""Bytes on the wire and time of a plan, against formulas by hand and the page that the rates are of."""

import dataclasses
import json
import statistics
from pathlib import Path

import pytest
from plans import DENSE, PARAMETERS, QUANTIZED, ROWS, SCALES, plan_of, preset
from support import nano, recipe

from dsv3fp8.observe.plan.memory import Planned
from dsv3fp8.observe.plan.rates import COPY, H200, Rates, layer_rates
from dsv3fp8.observe.plan.timing import Speeds, timing
from dsv3fp8.observe.plan.wire import Transfer, exchange_bytes, groups, transfers
from dsv3fp8.parallel.config import ParallelConfig

PAGE = Path(__file__).parents[3] / "docs" / "results" / "fast_h200"
SPEEDS = Speeds(H200["dsv3"], H200["bf16"], copy=COPY, nvlink=450.0, network=50.0)


def by_name(sent: list[Transfer]) -> dict[str, Transfer]:
    return {transfer.what: transfer for transfer in sent}


@pytest.mark.parametrize(
    ("name", "row"), [("dsv3", 7168 + 4 * 56), ("bf16", 2 * 7168), ("tensorwise", 7168), ("rowwise", 7172)]
)
def test_dispatch_carries_codes_and_scales_and_combine_bf16(name: str, row: int) -> None:
    """T·k·(D + s·ceil(D/128)) and 2·T·k·D."""
    plan = plan_of(preset("v3_671b"), recipe(name), (1, 64, 64), tokens=4096)
    assert exchange_bytes(plan) == (4096 * 8 * row, 2 * 4096 * 8 * 7168, 4096 * 8 * row)


def test_a_width_that_is_no_multiple_of_a_tile() -> None:
    plan = plan_of(nano(), recipe("dsv3"), (1, 2, 2), tokens=10)
    assert exchange_bytes(plan)[:2] == (10 * 2 * (48 + 4), 2 * 10 * 2 * 48)


def test_the_exchange_of_a_step_counts_layers_and_micro_batches() -> None:
    plan = plan_of(nano(), recipe("dsv3"), (1, 2, 2), tokens=10, accumulate=3)
    sent = by_name(transfers(plan, node=8))
    dispatch = sent["dispatch"]  # a MoE layer and that of multi-token prediction, three micro-batches
    assert dispatch.payload == sent["combine's backward"].payload == 2 * 3 * 10 * 2 * 52
    assert sent["combine"].payload == sent["dispatch's backward"].payload == 2 * 3 * 10 * 2 * 96
    assert dispatch.sent == dispatch.payload / 2
    assert dispatch.network == 0


def test_sharded_weights_are_gathered_as_the_recipe_reads_them() -> None:
    """Twice, but for the embedding, the head and its norm; scales once a step, as the largest magnitudes of tiles."""
    rest = 2 * 512_000 + 4 * 256  # embedding and head in BF16, the last norm
    for name, codes, compared in (("dsv3", QUANTIZED, SCALES), ("bf16", 2 * QUANTIZED, 0), ("rowwise", 2 * QUANTIZED, ROWS)):
        sent = by_name(transfers(plan_of(DENSE, recipe(name), (1, 4, 1), accumulate=3), node=8))
        assert sent["gather weights"].payload == 3 * (2 * (codes + 4 * 640) + rest)
        assert sent["reduce-scatter gradients of weights"].payload == 3 * 4 * PARAMETERS
        assert sent["gather weights"].sent == sent["gather weights"].payload * 3 / 4
        assert ("compare tiles of weights" in sent) == (compared > 0)
        assert not compared or sent["compare tiles of weights"].payload == 2 * 4 * compared
        assert len(sent) == 2 + (compared > 0)


def test_replicas_reduce_once_a_step() -> None:
    sent = by_name(transfers(plan_of(DENSE, recipe("dsv3"), (4, 1, 1), accumulate=3), node=8))
    assert sent.keys() == {"all-reduce gradients of weights"}
    assert sent["all-reduce gradients of weights"].sent == 2 * 4 * PARAMETERS * 3 / 4
    both = by_name(transfers(plan_of(DENSE, recipe("dsv3"), (2, 2, 1)), node=8))
    assert both["all-reduce gradients of weights"].sent == 2 * 4 * PARAMETERS / 2 / 2


def test_experts_are_gathered_and_reduced_on_their_own_mesh() -> None:
    experts = 2 * 4 * 3 * 40 * 48  # two MoE blocks, four experts of three 40×48 matrices
    sent = by_name(transfers(plan_of(nano(), recipe("bf16"), (4, 1, 2)), node=8))
    assert sent["all-reduce gradients of expert weights"].sent == 2 * 4 * (experts / 2) / 2  # two replicas of half of them
    assert "gather expert weights" not in sent
    sent = by_name(transfers(plan_of(nano(), recipe("bf16"), (1, 4, 2)), node=8))
    assert sent["gather expert weights"].sent == 2 * 2 * (experts / 2) / 2  # forward and backward, BF16, cut in two
    assert sent["reduce-scatter gradients of expert weights"].sent == 4 * (experts / 2) / 2


def test_one_gpu_sends_nothing() -> None:
    assert transfers(plan_of(nano(), recipe("dsv3")), node=8) == []


def test_which_gpus_of_a_group_share_a_node() -> None:
    meshes = groups(ParallelConfig(dp_replicate=2, dp_shard=16, expert=4), node=8)
    assert {name: (mesh.size, mesh.local) for name, mesh in meshes.items()} == {
        "shard": (16, 8), "replicate": (2, 1), "expert": (4, 4), "expert shard": (4, 2), "expert replicate": (2, 1),
    }  # fmt: skip


def test_the_slower_way_decides() -> None:
    sent = by_name(transfers(plan_of(preset("v3_671b"), recipe("dsv3"), (1, 64, 64), tokens=4096), node=8))
    dispatch = sent["dispatch"]
    assert dispatch.network == dispatch.payload * 56 / 64
    assert dispatch.seconds(nvlink=450e9, network=50e9) == dispatch.network / 50e9
    assert dispatch.seconds(nvlink=1e9, network=50e9) == dispatch.sent / 1e9
    gather = sent["gather weights"]
    assert gather.network == gather.payload * 63 / 64 / 8  # each adapter of a node carries an eighth


@pytest.mark.parametrize("name", ["dsv3", "bf16"])
def test_the_shipped_rates_are_those_of_the_page(name: str) -> None:
    measured = layer_rates(json.loads((PAGE / "layer.json").read_text(encoding="utf-8")), name)
    assert dataclasses.astuple(H200[name]) == pytest.approx(dataclasses.astuple(measured), rel=1e-3)


def one_layer(name: str) -> Planned:
    """The layer of `bench layer` alone: eight experts, 4,096 tokens in one sequence."""
    config = dataclasses.replace(preset("v3_671b"), experts=8, groups=1, kept_groups=1, mtp_depth=0)
    plan = plan_of(config, recipe(name), tokens=4096)
    return dataclasses.replace(plan, units=[unit for unit in plan.units if unit.name == "moe"][:1])


def test_the_time_of_a_layer_is_its_counts_by_hand_at_given_rates() -> None:
    """V3's shapes; three GEMMs of 2·N·K FLOP a row, causal attention three times over, bytes tensor by tensor."""
    dense = 1536 * 7168 + 24576 * 1536 + 576 * 7168 + 32768 * 512 + 7168 * 16384 + 4096 * 7168 + 7168 * 2048 + 8 * 7168
    experts = 8 * (4096 * 7168 + 7168 * 2048)
    d, q, v, kv, latents, act = 7168, 128 * 192, 128 * 128, 128 * 256, 1536 + 512, 9 * 2048  # values a token
    e4, e5 = 1 + 4 / 128, 1.5 + 4 / 128
    forward = (
        d * (2 + e4) + latents * (2 + e4)  # norms
        + 2 * (q + kv + 64) + 2 * (2 * q + v)  # RoPE
        + v * (2 + e5 + e4) + 3 * 2 * d  # attention's output, residual
        + d * (2 + 2 + e4) + 2 * d + 9 * d * e4  # FFN norm, router, dispatch
        + act * (2 + 2 + 2 * e4 + e4) + (8 + 3) * 2 * d  # SwiGLU: 2F in and cached, F out; combine and residual
    )  # fmt: skip
    backward = (
        d * (2 + 3 * e4) + 9 * d * e4  # dY cast for the experts and both ways for the shared one, and dispatched
        + 2 * e4 * (8 * d + 8 * d + d + d + latents) + act * (2 * e4 + e4) + v * (e5 + e4)  # re-tiles
        + act * (2 * e4 + 2 + 2 * 2 * e4) + (8 + 1) * 2 * d  # SwiGLU, combine
        + d * (5 * 2 + 4) + d * (2 + 2 * e4)  # FFN norm: x, three gradients of 2 and one of 4, dX; its casts
        + v * (e5 + 2) + 2 * (2 * q + v + 64) + 2 * e4 * (q + kv)  # decode, RoPE
        + latents * (2 + 2 + 2 * e4) + 64 * (2 + 2 * e4) + d * (3 * 2 + 2 * 4)  # latent norms, attention norm
    )  # fmt: skip
    given = Rates(gemm=500.0, attention=250.0, passes=1000.0)
    time = timing(one_layer("dsv3"), [], 4096, Speeds(given, Rates(1e9, 1.0, 1.0), 1.0, 1.0, 1.0))
    assert time.gemm == pytest.approx(4096 * 3 * 2 * (dense + experts) / 500e12, rel=1e-4)
    assert time.attention == pytest.approx(3 * 2 * 4096 * 2048 * 128 * (192 + 128) / 250e12)
    assert time.passes == pytest.approx(4096 * (forward + backward) / 1000e9, rel=1e-3)


def test_a_layers_kernels_agree_with_its_parts_that_were_timed_alone() -> None:
    """The roofline of layer.json: each GEMM and attention alone; bytes cannot pass faster than a copy, nor take twice that."""
    page = json.loads((PAGE / "layer.json").read_text(encoding="utf-8"))
    alone = {part["part"]: part["ms"] for part in page["roofline"]["parts"]}
    gemms = sum(alone[name] for name in ("q_a", "q_b", "kv_a", "kv_b", "out"))
    gemms += sum(alone[f"{kind}_{name}"] for kind in ("shared", "expert") for name in ("gate_up", "down"))
    busy = page["breakdowns"]["dsv3"]["busy_share"]
    time = timing(one_layer("dsv3"), [], 4096, dataclasses.replace(SPEEDS, head=Rates(1e9, 1.0, 1.0)))
    assert time.gemm * busy * 1e3 == pytest.approx(gemms, rel=0.15)
    assert time.attention * busy * 1e3 == pytest.approx(alone["attention"], rel=0.1)
    assert COPY / 2 < H200["dsv3"].passes / busy < COPY


def test_another_models_kernels_take_what_an_h200_measured() -> None:
    """step_launched.json: dsv3, `medium`, eight micro-batches of 8,192 tokens; rates of V3's widths flatter it."""
    kinds = json.loads((PAGE / "step_launched.json").read_text(encoding="utf-8"))["breakdowns"]["dsv3"]["kinds"]
    busy = json.loads((PAGE / "layer.json").read_text(encoding="utf-8"))["breakdowns"]["dsv3"]["busy_share"]
    time = timing(plan_of(preset("medium"), recipe("dsv3"), tokens=8192, accumulate=8), [], 2048, SPEEDS)
    passes = ("norm, SwiGLU, RoPE, residual", "casts", "router, dispatch, combine", "other torch kernels", "copies")
    assert 0.75 < time.gemm * busy * 1e3 / kinds["GEMM"]["ms"] < 1
    assert 0.75 < time.attention * busy * 1e3 / kinds["attention"]["ms"] < 1
    assert 0.75 < time.passes * busy * 1e3 / sum(kinds[kind]["ms"] for kind in passes) < 1


def test_the_shipped_copy_is_that_of_the_page() -> None:
    tables = json.loads((PAGE / "kernels.json").read_text(encoding="utf-8"))["tables"]
    ways = [case["ways"] for table in tables for case in table["cases"] if "device copy" in case["ways"]]
    assert statistics.median(way["device copy"]["rate"] for way in ways) == pytest.approx(COPY, rel=1e-3)


def test_recomputed_projections_take_time() -> None:
    times = [
        timing(plan_of(preset("v3_671b"), recipe("dsv3", f"recompute={value}"), tokens=4096), [], 4096, SPEEDS).gemm
        for value in ("none", "norms_and_up")
    ]
    again = 62 * 2 * 4096 * (24576 * 1536 + 32768 * 512)  # q_b and kv_b of 61 layers and a depth
    assert times[1] - times[0] == pytest.approx(again / (H200["dsv3"].gemm * 1e12))


def test_tokens_on_the_wire_hide_behind_the_shared_expert_alone() -> None:
    plan = plan_of(preset("v3_671b"), recipe("dsv3"), (1, 64, 64), tokens=4096)
    sent = transfers(plan, node=8)
    slow = timing(plan, sent, 4096, SPEEDS)
    shared = 59 * 3 * 2 * 4096 * 3 * 2048 * 7168 / (H200["dsv3"].gemm * 1e12)  # 58 layers and a depth
    exchange = [t.seconds(450e9, 50e9) for t in sent if t.group.name == "expert"]
    assert slow.exposed == pytest.approx(sum(exchange) - shared)
    at_once = dataclasses.replace(SPEEDS, nvlink=1e9, network=1e9)
    assert timing(plan, sent, 4096, at_once).exposed == 0
    assert timing(plan, sent, 4096, at_once).step + slow.exposed == pytest.approx(slow.step)
