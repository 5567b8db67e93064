"""Rates, ratios and breakdowns against numbers worked out by hand."""

import re
from pathlib import Path

import pytest

from dsv3fp8 import kernels
from dsv3fp8.observe.bench.breakdown import FOLDERS, Event, kind_of, own_kernels, short, summarize
from dsv3fp8.observe.bench.casts import moved
from dsv3fp8.observe.bench.page import page, shown
from dsv3fp8.observe.bench.rates import Case, Timing, Way, judged, rate, ratio
from dsv3fp8.observe.bench.sizes import FULL
from dsv3fp8.precision.formats import E4M3, E5M6
from dsv3fp8.precision.tiles import BLOCK_128, COLUMN_128, ROW_128

NOTHING: list[object] = []


def test_rates_of_a_millisecond_and_of_two() -> None:
    assert rate(2e12, 1.0, "TFLOP/s") == pytest.approx(2000.0)  # 2 TFLOP in 1 ms
    assert rate(8.5e9, 2.0, "GB/s") == pytest.approx(4250.0)  # 8.5 GB in 2 ms
    assert rate(32768, 500.0, "tokens/s") == pytest.approx(65536.0)
    assert rate(1.0, 30.1, "ms") == 30.1
    assert rate(1.0, 0.0125, "µs") == pytest.approx(12.5)


def test_a_ratio_compares_speeds_also_of_different_work() -> None:
    assert ratio(1.0, 20.0, 1.0, 30.0) == pytest.approx(1.5)
    assert ratio(3e9, 1.0, 1e9, 0.25) == pytest.approx(0.75)  # 3 TB/s beside a copy's 4 TB/s


def test_a_case_is_judged_by_medians_and_one_failure_spoils_nothing() -> None:
    ways = [Way("ours", list), Way("peer", list), Way("copy", list, work=4e9), Way("broken", list)]
    timings = {
        "ours": Timing([9.0, 1.0, 2.0]), "peer": Timing([3.0, 5.0]), "copy": Timing([1.0], host="not captured"),
        "broken": Timing([1.0], failed="RuntimeError: no"),
    }  # fmt: skip
    found = judged(Case("c", 1e9, lambda: ways), "GB/s", "peer", ways, timings)
    rows = found["ways"]
    assert (rows["ours"]["ms"], rows["ours"]["rate"], rows["ours"]["ratio"]) == (2.0, 500.0, 2.0)
    assert (rows["peer"]["ms"], rows["peer"]["ratio"]) == (4.0, 1.0)
    assert (rows["copy"]["rate"], rows["copy"]["ratio"]) == (4000.0, 16.0)
    assert [rows["broken"][key] for key in ("ms", "rate", "ratio")] == [None] * 3
    without = judged(Case("c", 1e9, lambda: ways), "GB/s", "nobody", ways, timings)
    assert without["ways"]["ours"]["ratio"] is None


def test_bytes_that_casts_move() -> None:
    # 256 x 256 BF16: 131,072 bytes read, 65,536 codes; 512 scales in tiles of 128, 4 in blocks.
    assert moved((256, 256), E4M3, ROW_128, 2.0) == 131_072 + 65_536 + 4 * 512
    assert moved((256, 256), E4M3, COLUMN_128, 2.0) == 131_072 + 65_536 + 4 * 512
    assert moved((3, 256, 256), E4M3, BLOCK_128, 4.0) == 3 * (262_144 + 65_536 + 4 * 4)
    assert moved((256, 256), E5M6, ROW_128, 2.0) == 131_072 + 98_304 + 4 * 512


def test_a_breakdown_by_hand() -> None:
    events = [
        Event("void nvjet_qqtst_128x256_gemm<1>", 0, 6_000_000),
        Event("_quantize_kernel", 5_000_000, 7_000_000),  # one millisecond of it beside the GEMM
        Event("_quantize_kernel", 8_000_000, 10_000_000),
        Event("Memset (Device)", 10_000_000, 10_000_000),
    ]
    found = summarize(events, ms=12.0)
    assert (found["launches"], found["copies_and_fills"]) == (3, 1)
    assert found["kernel_ms"] == pytest.approx(10.0)
    assert found["busy_ms"] == pytest.approx(9.0)
    assert found["busy_share"] == pytest.approx(0.75)
    assert {kind: part["share"] for kind, part in found["kinds"].items()} == {"GEMM": 0.6, "casts": 0.4, "copies": 0.0}
    first, second, _ = found["kernels"]
    assert (first["name"], first["ms"], first["count"]) == ("nvjet_qqtst_128x256_gemm<1>", 6.0, 1)
    assert (second["name"], second["count"], second["share"]) == ("_quantize_kernel", 2, 0.4)
    assert summarize([], ms=None)["busy_share"] is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x192", "attention"),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "GEMM"),
        ("rows_kernel", "GEMM"),
        ("wgrad_kernel", "GEMM"),
        ("_gemm_kernel", "GEMM"),
        ("_columns_kernel", "casts"),
        ("_norm_backward_kernel", "norm, SwiGLU, RoPE, residual"),
        ("triton_poi_fused_add_silu_3", "fused by torch.compile"),
        ("transformer_engine::block_scaled_1d_cast_transpose_kernel<bool>", "casts"),
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
        ("at::native::direct_copy_kernel_cuda", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "other torch kernels"),
    ],
)
def test_kernels_have_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_every_kernel_of_this_package_has_the_kind_of_its_folder() -> None:
    assert set(own_kernels().values()) <= set(FOLDERS.values())
    assert (own_kernels()["_both_kernel"], own_kernels()["_update_kernel"]) == ("casts", "optimizer")


def test_no_two_kernels_share_a_name() -> None:
    """A profile knows kernels by their names alone."""
    root = Path(next(iter(kernels.__path__)))
    names = [name for path in root.rglob("*.py") for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)]
    assert sorted(names) == sorted(own_kernels())


def test_long_names_are_cut() -> None:
    assert short("void at::native::(anonymous namespace)::cat<float>") == "cat<float>"
    assert len(short("x" * 500)) == 96


def test_the_page_shows_medians_ratios_marks_and_reasons() -> None:
    ways = [Way("ours", list, note="gluon: one launch"), Way("peer", list)]
    timings = {"ours": Timing([1.0]), "peer": Timing([1.5], host="the call waits")}
    case = {**judged(Case("8 × 4096", 1e12, lambda: ways), "TFLOP/s", "peer", ways, timings), "failed": ""}
    empty = {"case": "9 × 1", "ways": {}, "failed": "OutOfMemoryError: no room"}
    table = {"name": "g", "title": "Grouped", "unit": "TFLOP/s", "peer": "peer", "about": "words", "cases": [case, empty]}
    about = {
        "kind": "kernels", "started": "2026-11-30T00:00:00", "device": "a GPU", "packages": {"torch": "2", "triton": None},
        "commit": None, "command": "dsv3fp8 bench kernels", "rounds": 1, "seconds": 2.0,
    }  # fmt: skip
    data = {"about": about, "notes": ["a note"], "tables": [table], "breakdowns": {}}
    text = page(data)
    assert "| 8 × 4096 | 1,000 (1.50) | 667† |" in text
    assert "| 9 × 1 | – | – |" in text
    assert "- 9 × 1: OutOfMemoryError: no room" in text
    assert "- ours: gluon: one launch" in text
    assert "words; peer: peer." in text
    assert "torch 2 · commit unknown" in text
    assert shown(data)[0].heads == ["g", "ours, TFLOP/s", "peer, TFLOP/s"]


def test_what_is_measured_by_its_bytes_is_larger_than_the_cache() -> None:
    cache = 60e6  # of an H200
    rows, cols = FULL.cast
    assert moved((rows, cols), E4M3, ROW_128, 1.0) > 3 * cache
    assert FULL.copied > 3 * cache
    assert all(4 * rows * cols > 3 * cache for rows, cols in (FULL.latent, FULL.swiglu, FULL.logits))
    assert 4 * FULL.updated > 3 * cache
