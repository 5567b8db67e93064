"""The page of bits: equal steps are equal everywhere, and one other bit anywhere shows."""

import dataclasses

import pytest
import torch

from dsv3fp8.config import RunConfig, load_config
from dsv3fp8.kernels import backend
from dsv3fp8.observe import bits
from dsv3fp8.precision.tiles import QuantizedTensor

CPU = torch.device("cpu")


def small() -> RunConfig:
    sizes = ("layers=2", "dim=32", "heads=2", "head_nope=16", "ffn=48", "expert_ffn=24", "q_latent=16", "kv_latent=16")
    return load_config([*bits.SETTINGS, *(f"model.{size}" for size in sizes)])


def rows(lines: list[str]) -> dict[str, str]:
    """Share of equal elements by everything before it."""
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("|") and "--" not in line]
    return {" ".join(cell for cell in row[:-2] if cell): row[-1] for row in cells if row[-1] != "equal"}


def test_a_step_is_equal_to_itself_in_every_gemm_cast_and_tensor() -> None:
    found = rows(list(bits.report(small(), CPU)))
    assert set(found.values()) == {"100 %"}
    assert {"GEMM, fprop", "GEMM, dgrad", "GEMM, wgrad", "quantize e5m6 1x128 pow2, codes"} <= found.keys()
    assert {"q_b wgrad dw_q_b float32", "out.requant wgrad attn_operand e4m3 128x1, codes"} <= found.keys()
    assert any(name.endswith("all updated weights") for name in found)


def test_a_cast_that_gives_another_bit_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    real = backend.quantize_reference.quantize

    def wrong(*args: object, **keywords: object) -> QuantizedTensor:
        cast = real(*args, **keywords)  # type: ignore[arg-type]
        codes = cast.codes.clone()
        codes.view(torch.uint8).view(-1)[:1] ^= 1
        return dataclasses.replace(cast, codes=codes)

    monkeypatch.setattr(backend.quantize_reference, "quantize", wrong)
    found = rows(list(bits.report(small(), CPU)))
    assert found["quantize e4m3 1x128 fp32, codes"] != "100 %"
    assert found["quantize e4m3 1x128 fp32, scales"] == "100 %"


def test_a_gemm_that_gives_another_bit_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bits, "matmul_nt", lambda *args: backend.matmul_nt(*args) * (1 + 2**-7))
    found = rows(list(bits.report(small(), CPU)))
    assert all(found[f"GEMM, {gemm}"] != "100 %" for gemm in ("fprop", "dgrad", "wgrad"))
