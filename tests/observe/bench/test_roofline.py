"""The roofline's arithmetic against numbers worked out by hand."""

import dataclasses

import pytest
import torch

from dsv3fp8.observe.bench import roofline as module
from dsv3fp8.observe.bench.operands import Setting, recipe_named
from dsv3fp8.observe.bench.page import shown
from dsv3fp8.observe.bench.roofline import LayerGemm, best, byte_passes, layer_gemms, roofline
from dsv3fp8.observe.bench.sizes import TINY
from dsv3fp8.observe.bench.timing import Clock
from dsv3fp8.observe.kept_bytes import block_config

V3 = block_config("v3_671b")


def test_the_gemms_of_a_v3_layer() -> None:
    found = {linear.op: linear for linear in layer_gemms(V3, 4096)}
    assert found["q_b"] == LayerGemm("q_b", 0, 4096, 1536, 24576)
    assert found["expert_down"] == LayerGemm("expert_down", 8, 4096, 2048, 7168)
    assert "gate_up" not in found  # a dense layer's
    assert found["expert_down"].work == 2 * 8 * 4096 * 2048 * 7168
    assert sum(3 * linear.work for linear in found.values()) / 1e12 == pytest.approx(14.34, abs=0.01)
    assert layer_gemms(V3, 16)[-1].rows == 128  # experts' rows come in whole blocks


def test_bytes_of_a_layer_by_hand() -> None:
    """One token of a layer whose widths are powers of two: every term can be read off."""
    config = dataclasses.replace(
        V3, dim=1024, heads=2, head_nope=64, head_rope=32, head_v=64, q_latent=128, kv_latent=256, top_k=4, shared_experts=1,
        expert_ffn=512,
    )  # fmt: skip
    code = 33 / 32  # with a fp32 scale every 128
    found = byte_passes(config, 1)
    assert found["attention norm"] == 1024 * (2 + code)
    assert found["latent norms"] == 384 * (2 + code)
    assert found["RoPE"] == 2 * (192 + 256 + 32) + 2 * (192 + 192 + 128)  # q, kv, k_rope in; q, k, v out
    assert found["attention's output: E5M6 cache and codes"] == 128 * (2 + 1.5 + 1 / 32 + code)
    assert found["residual behind attention"] == 1024 * 6
    assert found["FFN norm"] == 1024 * (2 + 2 + code)
    assert found["dispatch"] == (1024 + 4096) * code
    assert found["SwiGLU"] == 5 * 512 * (4 + 2 * code + code)  # h; its cache; the codes
    assert found["combine and residual"] == 2 * (4096 + 3 * 1024)
    assert found["re-tiles"] == pytest.approx(
        2 * code * (4096 + 4096 + 1024 + 1024 + 384) + 5 * 512 * 3 * code + 128 * (1.5 + 1 / 32 + code)
    )
    assert found["SwiGLU backward"] == 5 * 512 * (2 * code + 2 + 4 * code)
    assert found["RoPE backward"] == 2 * (192 + 192 + 128) + 2 * 32 + 2 * code * (192 + 256)
    assert found["attention norm backward"] == 1024 * (2 + 4 + 4 + 2 + 2)
    assert byte_passes(config, 8) == {name: pytest.approx(8 * size) for name, size in found.items()}


def test_a_layer_of_v3_moves_some_eight_gigabytes() -> None:
    assert 8e9 < sum(byte_passes(V3, 4096).values()) < 9.5e9


def test_the_best_way_is_never_the_bf16_peer() -> None:
    assert best({"ours": 3.0, "cuBLASLt": 2.0, "triton": None, "torch BF16": 1.0}) == 2.0
    assert best({"torch BF16": 1.0}) is None


def test_parts_add_up_and_shares_are_of_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "layer_gemms", lambda *_: [LayerGemm("q", 0, 64, 10, 10), LayerGemm("expert_up", 2, 64, 5, 5)])
    monkeypatch.setattr(module, "byte_passes", lambda *_: {"norm": 4e6, "RoPE": 2e6})
    sizes = dataclasses.replace(TINY, copied=5_000_000)
    setting = Setting(sizes, Clock(torch.device("cpu")), recipe_named("dsv3"))
    ways = {"ours": 2.0, "cuBLASLt": 1.0, "torch BF16": 0.5}
    measured = {
        "layer, dense": {f"q {gemm}": ways for gemm in module.GEMMS},
        "layer, grouped": {f"expert_up {gemm}": {"ours": 3.0, "F.grouped_mm BF16": 9.0} for gemm in module.GEMMS},
        "layer, attention": {"forward": {"ours": 1.5}, "backward": {"ours": 3.5}},
        "layer, copy": {"device copy": {"device copy": 5.0}},  # 10 MB in 5 ms: 2 MB a ms
    }
    found = roofline(setting, measured, {"dsv3": 40.0, "broken": None})
    assert [part["ms"] for part in found["parts"]] == [3.0, 9.0, 5.0, 2.0, 1.0]
    assert found["ms"] == 20.0
    assert found["shares"] == {"dsv3": {"ms": 40.0, "share": 0.5}, "broken": {"ms": None, "share": None}}
    assert found["once_a_step"]["ms"] == pytest.approx(6 * (100 + 50) / 2e6)
    (table,) = shown({"tables": [], "roofline": found, "breakdowns": {}})
    assert table.rows[-1] == ["all of them", "", "", "20.00"]
    assert table.notes[1:3] == ["dsv3: 40.00 ms, 50 % of the roofline", "broken: – ms, – of the roofline"]
    missing = roofline(setting, measured | {"layer, copy": {"device copy": {"device copy": None}}}, {"dsv3": 40.0})
    assert (missing["ms"], missing["shares"]["dsv3"]["share"]) == (None, None)
