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


def rows(lines: list[str]) -> dict[str, list[str]]:
    """Shares of equal elements by the name before them."""
    tables = [line.strip("|") for line in lines if line.startswith("|") and "--" not in line]
    cells = [[cell.strip() for cell in line.split("|")] for line in tables]
    return {
        " ".join(cell for cell in row if cell and "%" not in cell): [cell for cell in row if "%" in cell]
        for row in cells
        if any("%" in cell for cell in row)
    }


def share(found: dict[str, list[str]], name: str) -> str:
    (only,) = [shares for key, shares in found.items() if key.startswith(name)]
    assert len(only) == 1
    return only[0]


def test_a_step_is_equal_to_itself_in_every_gemm_cast_and_tensor() -> None:
    found = rows(list(bits.report(small(), CPU)))
    assert {each for shares in found.values() for each in shares} == {"100 %"}
    for name in ("GEMM, fprop", "GEMM, dgrad", "GEMM, wgrad", "quantize e5m6 1x128 pow2, codes", "all updated weights"):
        assert share(found, name) == "100 %"
    layers = 3  # two of the model, one of multi-token prediction
    assert len(found["q_b wgrad dw_q_b float32"]) == len(found["out.requant wgrad attn_operand e4m3 128x1, codes"]) == layers


def test_a_cast_that_gives_another_bit_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    real = backend.quantize_reference.quantize

    def wrong(*args: object, **keywords: object) -> QuantizedTensor:
        cast = real(*args, **keywords)  # type: ignore[arg-type]
        codes = cast.codes.clone()
        codes.view(torch.uint8).view(-1)[:1] ^= 1
        return dataclasses.replace(cast, codes=codes)

    monkeypatch.setattr(backend.quantize_reference, "quantize", wrong)
    found = rows(list(bits.report(small(), CPU)))
    assert share(found, "quantize e4m3 1x128 fp32, codes") != "100 %"
    assert share(found, "quantize e4m3 1x128 fp32, scales") == "100 %"


def test_a_gemm_that_gives_another_bit_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bits, "matmul_nt", lambda *args: backend.matmul_nt(*args) * (1 + 2**-7))
    found = rows(list(bits.report(small(), CPU)))
    assert all(share(found, f"GEMM, {gemm}") != "100 %" for gemm in ("fprop", "dgrad", "wgrad"))
