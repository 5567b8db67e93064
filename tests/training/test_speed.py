"""Rates against a clock under our control, and peaks that are not invented."""

import time

import pytest
import torch

from dsv3fp8.training.speed import Speedometer, memory, peak_tflops


@pytest.mark.parametrize(
    ("name", "peaks"),
    [
        ("NVIDIA H200", (989, 1979)),
        ("NVIDIA H100 80GB HBM3", (989, 1979)),
        ("NVIDIA H100 PCIe", (756, 1513)),
        ("NVIDIA H20", (148, 296)),
        ("NVIDIA GH200 480GB", (989, 1979)),
        ("NVIDIA A100-SXM4-80GB", (312, None)),
        ("NVIDIA GeForce RTX 3060", (None, None)),
        ("cpu (x86_64)", (None, None)),
    ],
)
def test_peaks_are_those_of_the_data_sheet_or_unknown(name: str, peaks: tuple) -> None:
    assert peak_tflops(name) == peaks


def test_pauses_do_not_count_and_each_reading_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    meter = Speedometer(flops_per_token=1e9, device_name="NVIDIA H200")
    now[0] += 2
    meter.add(2_000_000)
    meter.pause()
    now[0] += 50
    meter.resume()
    reading = meter.read()
    assert reading["tokens_per_second"] == pytest.approx(1e6)
    assert reading["model_tflops"] == pytest.approx(1000)
    assert reading["bf16_peak_share"] == pytest.approx(1000 / 989)
    assert reading["fp8_peak_share"] == pytest.approx(1000 / 1979)
    now[0] += 1
    meter.add(500)
    assert meter.read()["tokens_per_second"] == pytest.approx(500)


def test_a_cpu_has_no_peak_share_and_no_cuda_memory() -> None:
    meter = Speedometer(flops_per_token=1e9, device_name="cpu (x86_64)")
    meter.add(10)
    reading = meter.read()
    assert reading["bf16_peak_share"] is reading["fp8_peak_share"] is None
    sizes = memory(torch.device("cpu"))
    assert 0.05 < sizes["rss_peak_gb"] < 64
    assert sizes["cuda_allocated_peak_gb"] is None
