"""What cuBLASLt is handed: the layouts it documents, for every mix of tiles, also where a side is one block."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv3fp8.kernels.gemm import cublaslt
from dsv3fp8.kernels.quantize.reference import quantize
from dsv3fp8.precision.formats import E4M3
from dsv3fp8.precision.tiles import BLOCK_128, COLUMN_128, ROW_128, QuantizedTensor, Tile, ceil_div

TENSOR = Tile(None, None)


def handed_over(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What scaled_mm is called with, in place of the call."""
    seen: dict[str, Any] = {}

    def scaled_mm(a: Tensor, b: Tensor, sa: Tensor, ra: Any, sb: Tensor, rb: Any, output_dtype: torch.dtype) -> Tensor:
        seen.update(a=a, b=b, sa=sa, sb=sb, rb=rb)
        return torch.zeros(a.shape[0], b.shape[1], dtype=output_dtype)

    monkeypatch.setattr(cublaslt.F, "scaled_mm", scaled_mm)
    return seen


@pytest.mark.parametrize("tiles", [(ROW_128, BLOCK_128), (BLOCK_128, ROW_128), (ROW_128, ROW_128), (TENSOR, TENSOR)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(256, 128, 128), (1, 256, 40), (129, 100, 576), (128, 1408, 1)])
def test_scales_are_dense_in_the_order_that_cublaslt_reads(
    tiles: tuple[Tile, Tile], transposed: bool, m: int, n: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = handed_over(monkeypatch)

    def operand(rows: int, tile: Tile) -> Any:
        if transposed:  # as in wgrad: quantized along its rows, seen from the side
            return quantize(torch.randn(k, rows), E4M3, tile.transposed()).transposed()
        return quantize(torch.randn(rows, k), E4M3, tile)

    a, b = operand(m, tiles[0]), operand(n, tiles[1])
    assert cublaslt.reason_against(a, b) is None
    assert cublaslt.matmul_nt(a, b, torch.bfloat16).shape == (m, n)
    rows, depth, cols = *seen["a"].shape, seen["b"].shape[1]
    blocks = ceil_div(k, 128)
    assert (rows % 16, depth % 16, cols % 16) == (0, 0, 0)
    assert (seen["a"].stride(), seen["b"].stride()) == ((depth, 1), (1, depth))
    assert (seen["sa"].shape, seen["sa"].stride()) == ((rows, blocks), (1, rows))
    if seen["rb"] == cublaslt._ROW:
        assert (seen["sb"].shape, seen["sb"].stride()) == ((cols, blocks), (1, cols))
    else:
        padded = ceil_div(blocks, 4) * 4
        assert (seen["sb"].shape, seen["sb"].stride()) == ((padded, ceil_div(n, 128)), (1, padded))


@pytest.mark.parametrize("gemm", ["fprop", "wgrad", "wgrad of some rows"])
def test_nothing_is_copied_that_lies_as_the_kernels_store_it(gemm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = handed_over(monkeypatch)

    def stored(rows: int, cols: int, tile: Tile) -> QuantizedTensor:
        """1x128: scales with the rows contiguous; 128x1: codes with the rows contiguous."""
        cast = quantize(torch.randn(rows, cols), E4M3, tile)
        if tile == ROW_128:
            return replace(cast, scale=cast.scale.mT.contiguous().mT)
        return replace(cast, codes=cast.codes.mT.contiguous().mT) if tile == COLUMN_128 else cast

    if gemm == "fprop":
        a, b = stored(256, 512, ROW_128), stored(384, 512, BLOCK_128)
    else:
        left, right = stored(512, 256, COLUMN_128), stored(512, 384, COLUMN_128)
        if gemm != "wgrad":
            left, right = left.rows(128, 384), right.rows(128, 384)
        a, b = left.transposed(), right.transposed()
    cublaslt.matmul_nt(a, b, torch.float32)
    for name, given in (("a", a.codes), ("b", b.codes), ("sa", a.scale), ("sb", b.scale)):
        assert seen[name].data_ptr() == given.data_ptr()
