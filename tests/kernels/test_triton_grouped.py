"""The experts' FP8 GEMMs in one Triton launch: which they are, compiled for Hopper without a GPU, and on one bit for bit.

That every code meets its scale is shown in the interpreter (interpreted_triton.py).
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", minversion="3.6")

from test_gluon import bits, on_gpu, poison
from test_triton_compiles import compiled, resources

from dsv3fp8.config import load_config
from dsv3fp8.kernels import backend
from dsv3fp8.kernels.explain import explain, reads_counts
from dsv3fp8.kernels.gemm import emulated, triton_grouped
from dsv3fp8.kernels.quantize.reference import quantize
from dsv3fp8.model.manifest import linear_shapes
from dsv3fp8.precision.formats import E4M3, E5M2, E5M6, Format
from dsv3fp8.precision.tiles import BLOCK_128, COLUMN_128, ROW_128, QuantizedTensor, Tile

__all__ = ["compiled"]  # the fixture

ROW, COLUMN, TENSOR = Tile(1, None), Tile(None, 1), Tile(None, None)
GROUPS = torch.tensor([0, 0, 0, 2, 2, -1])  # of blocks of 128 rows; the second of three experts has none
BLOCKS = torch.tensor([0, 3, 3, 5], dtype=torch.int32)
ROWS: dict[
    str, tuple[Format, Tile, Tile, int, int | str, bool]
] = {  # format of the rows, their tile and the weights', parts of K, promotion, whether rows are cast expert by expert
    "hybrid": (E5M2, ROW_128, BLOCK_128, 2, 128, False),
    "tensorwise": (E4M3, TENSOR, TENSOR, 1, 128, False),
    "tensorwise, born in the experts": (E4M3, TENSOR, TENSOR, 1, 128, True),
    "rowwise": (E4M3, ROW, ROW, 1, 128, False),
    "no_promotion": (E4M3, ROW, ROW, 1, "never", False),
    "blockwise_grad": (E4M3, BLOCK_128, BLOCK_128, 2, 128, False),
    "every 32": (E4M3, ROW_128, BLOCK_128, 1, 32, False),
}
WGRAD: dict[
    str, tuple[Format, Tile, Tile, int | str, bool]
] = {  # format of dy, its tile and x's, promotion, whether they are cast expert by expert
    "hybrid": (E5M2, COLUMN_128, COLUMN_128, 128, False),
    "tensorwise": (E4M3, TENSOR, TENSOR, 128, False),
    "tensorwise, born in the experts": (E4M3, TENSOR, TENSOR, 256, True),
    "rowwise": (E4M3, COLUMN, COLUMN, 128, True),
    "no_promotion": (E4M3, COLUMN, COLUMN, "never", True),
    "blockwise_grad": (E4M3, BLOCK_128, COLUMN_128, 128, False),
    "every 32": (E4M3, COLUMN_128, COLUMN_128, 32, False),
}


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator) * torch.exp(2 * torch.randn(*shape[:-1], 1, generator=generator))
    if len(shape) == 2:
        x[100:128], x[600:] = 0, 0  # inert rows, and a block of no expert
    return x


def row_operands(case: str, n: int, k: int) -> tuple[QuantizedTensor, QuantizedTensor]:
    fmt, left, right, parts, _, born = ROWS[case]
    a = quantize(draw(768, k * parts), fmt, left, col_parts=parts, groups=GROUPS if born else None)
    return a, quantize(draw(3, n, k * parts, seed=1), E4M3, right, col_parts=parts)


def wgrad_operands(case: str, n: int, k: int) -> tuple[QuantizedTensor, QuantizedTensor]:
    fmt, left, right, _, born = WGRAD[case]
    groups = GROUPS if born else None
    return quantize(draw(768, n), fmt, left, groups=groups), quantize(draw(768, k, seed=1), E4M3, right, groups=groups)


def formats_of(kernel: Any, folder: Path) -> set[tuple[str, str]]:
    """Of the tensor core's instructions; there are four of 32 codes in a block of 128, and no spills."""
    used = resources(kernel, folder)
    assert (used["STACK"], used["LOCAL"]) == (0, 0)
    steps = re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.f32\.(e\dm\d)\.(e\dm\d)", kernel.asm["ptx"])
    assert len(steps) == 4
    return set(steps)


@pytest.mark.parametrize("case", ROWS)
def test_rows_run_on_tensor_cores_without_spills(case: str, compiled: list[Any], tmp_path: Path) -> None:
    a, weights = row_operands(case, 400, 512)
    triton_grouped.grouped_rows(a, weights, GROUPS, torch.bfloat16, ROWS[case][4])
    (kernel,) = compiled
    assert formats_of(kernel, tmp_path) == {(a.format.name, "e4m3")}


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("case", WGRAD)
def test_weight_gradients_run_on_tensor_cores_without_spills(case: str, add: bool, compiled: list[Any], tmp_path: Path) -> None:
    dy, x = wgrad_operands(case, 400, 512)
    triton_grouped.grouped_wgrad(dy, x, BLOCKS, WGRAD[case][3], torch.zeros(3, 400, 512) if add else None)
    *turning, kernel = compiled  # codes of tiles of whole rows are turned first
    assert all("st.global.v4.b32" in each.asm["ptx"] for each in turning)
    assert len(turning) == (x.codes.stride(1) == 1) + (dy.codes.stride(1) == 1)
    assert formats_of(kernel, tmp_path) == {(dy.format.name, "e4m3")}
    assert "atom.global" not in kernel.asm["ptx"]


def test_numbers_of_rows_share_kernels(compiled: list[Any]) -> None:
    for blocks in (2, 3, 5, 16):
        groups, starts = torch.zeros(blocks, dtype=torch.int64), torch.tensor([0, blocks], dtype=torch.int32)
        x = torch.randn(128 * blocks, 256)
        a, weights = quantize(x, E4M3, TENSOR, groups=groups), quantize(torch.randn(1, 400, 256), E4M3, TENSOR)
        triton_grouped.grouped_rows(a, weights, groups, torch.bfloat16)
        triton_grouped.grouped_wgrad(a, a, starts)
    assert len({id(kernel) for kernel in compiled}) == 3  # the third turns codes


RECIPES = ["hybrid", "tensorwise", "delayed", "static", "rowwise", "blockwise_grad", "no_promotion", "dsv3", "bf16"]


@pytest.mark.parametrize("name", RECIPES)
def test_on_hopper_no_recipe_takes_a_gemm_per_expert(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "hopper_reason", lambda _: None)
    monkeypatch.setattr(backend, "against_triton", lambda _: None)
    config = load_config(["model=small", f"recipe={name}"])
    shapes, device = linear_shapes(config.model), torch.device("cpu")
    assert reads_counts(config.recipe, device, shapes) is None
    rows = {op: choice for op, choice in explain(config.recipe, device, shapes) if op.startswith("expert_")}
    assert len(rows) == 6
    for choice in rows.values():
        assert "one launch for all experts" in choice.reason
        assert choice.exact == (name != "bf16")
    expected = {"bf16": {"torch", "triton"}, "no_promotion": {"triton"}}.get(name, {"gluon"})
    assert {choice.backend for choice in rows.values()} == expected


def test_one_operand_that_is_not_quantized_is_looped_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "hopper_reason", lambda _: None)
    config = load_config(["model=small", "recipe=dsv3", "recipe.roles.weight.format=none"])
    reason = reads_counts(config.recipe, torch.device("cpu"), linear_shapes(config.model))
    assert str(reason).startswith("expert_gate_up.fprop takes a GEMM per expert: one operand only is quantized")


@pytest.mark.parametrize(
    ("tile", "fmt", "parts", "promote", "reason"),
    [
        (ROW_128, E5M6, 1, 128, "no e5m6"),
        (BLOCK_128, E4M3, 2, 128, "rows are tiled in parts"),
        (ROW_128, E4M3, 1, "never", "needs scales that are constant along K"),
        (ROW, E4M3, 1, 96, "ends inside a block of 128"),
    ],
)
def test_what_rows_refuse(tile: Tile, fmt: Format, parts: int, promote: int | str, reason: str) -> None:
    a = quantize(torch.ones(256, 128), fmt, tile, row_parts=parts)
    weights = quantize(torch.ones(2, 64, 128), E4M3, Tile(tile.rows, tile.cols))
    with pytest.raises(ValueError, match=reason):
        triton_grouped.grouped_rows(a, weights, torch.zeros(2, dtype=torch.int64), torch.bfloat16, promote)


def test_what_does_not_fit_is_refused() -> None:
    a, weights = quantize(torch.ones(256, 128), E4M3, ROW), quantize(torch.ones(2, 64, 128), E4M3, ROW)
    with pytest.raises(ValueError, match="3 blocks of 128 rows, the operand 256 rows"):
        triton_grouped.grouped_rows(a, weights, torch.zeros(3, dtype=torch.int64), torch.bfloat16)
    dy = quantize(torch.ones(256, 64), E4M3, TENSOR)
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"contiguous fp32 \[2, 64, 64\], not torch.float32 \[2, 64, 32\]"):
        triton_grouped.grouped_wgrad(dy, dy, starts, into=torch.zeros(2, 64, 32))
    with pytest.raises(ValueError, match="no tensor core sum for tile allx1"):
        triton_grouped.grouped_wgrad(quantize(torch.ones(256, 64), E4M3, ROW), dy, starts)
    with pytest.raises(ValueError, match="tokens are tiled in parts"):
        triton_grouped.grouped_wgrad(quantize(torch.ones(256, 64), E4M3, BLOCK_128, row_parts=2), dy, starts)


def test_nothing_to_multiply_gives_zeros() -> None:
    weights, groups = quantize(torch.ones(2, 64, 128), E4M3, ROW), torch.zeros(0, dtype=torch.int64)
    none = quantize(torch.ones(0, 128), E4M3, ROW)
    assert triton_grouped.grouped_rows(none, weights, groups, torch.bfloat16).shape == (0, 64)
    dy = quantize(torch.ones(0, 128), E4M3, TENSOR)
    starts = torch.zeros(3, dtype=torch.int32)
    assert torch.equal(triton_grouped.grouped_wgrad(dy, dy, starts), torch.zeros(2, 128, 128))
    into = torch.ones(2, 128, 128)
    assert torch.equal(triton_grouped.grouped_wgrad(dy, dy, starts, into=into), torch.ones(2, 128, 128))


# ---- on a GPU


def of_expert(t: QuantizedTensor, rows: slice) -> QuantizedTensor:
    """Its rows; with one scale, where all its blocks have the same one."""
    part = t.rows(rows.start, rows.stop)
    if not t.one_scale_per_group:
        return part
    assert torch.equal(part.scale, part.scale[:1].expand_as(part.scale))
    return dataclasses.replace(part, scale=part.scale[:1], tile=Tile(None, part.tile.cols), one_scale_per_group=False)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(576, 1408), (200, 144), (64, 16)])
@pytest.mark.parametrize("case", ROWS)
def test_rows_have_the_tensor_cores_bits(case: str, n: int, k: int) -> None:
    a, weights = row_operands(case, n, k)
    want = torch.zeros(768, n)
    for expert, rows in ((0, slice(0, 384)), (2, slice(384, 640))):
        want[rows] = emulated.matmul_nt(a.rows(rows.start, rows.stop), weights[expert], torch.float32, ROWS[case][4])
    # Every type is a kernel to be compiled: of one size, all of them.
    for dtype, groups in ((torch.bfloat16, GROUPS), (torch.float32, GROUPS.int()))[: 2 if n == 200 else 1]:
        poison()
        got = triton_grouped.grouped_rows(on_gpu(a), on_gpu(weights), groups.cuda(), dtype, ROWS[case][4])
        assert torch.equal(bits(got), bits(want.to(dtype)))


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(576, 1408), (200, 136), (64, 16)])
@pytest.mark.parametrize("case", WGRAD)
def test_weight_gradients_have_the_tensor_cores_bits(case: str, n: int, k: int) -> None:
    dy, x = wgrad_operands(case, n, k)
    want = torch.zeros(3, n, k)
    for expert, rows in ((0, slice(0, 384)), (2, slice(384, 640))):
        left, right = (of_expert(t, rows).transposed() for t in (dy, x))
        want[expert] = emulated.matmul_nt(left, right, torch.float32, WGRAD[case][3])
    poison()
    got = triton_grouped.grouped_wgrad(on_gpu(dy), on_gpu(x), BLOCKS.cuda(), WGRAD[case][3])
    assert torch.equal(bits(got), bits(want))
    if n != 200:
        return
    before = torch.randn(3, n, k)
    before[1] = torch.nan  # an expert without rows is left alone
    into = before.cuda()
    triton_grouped.grouped_wgrad(on_gpu(dy), on_gpu(x), BLOCKS.cuda(), WGRAD[case][3], into)
    assert torch.equal(
        into.cpu().nan_to_num(7), torch.cat((before[:1] + want[:1], before[1:2], before[2:] + want[2:])).nan_to_num(7)
    )
