"""The Gluon GEMMs on a Hopper GPU, bit for bit against the emulated tensor core; what they refuse, anywhere."""

import dataclasses

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", minversion="3.6")

from dsv3fp8.kernels.gemm import emulated
from dsv3fp8.kernels.gemm.gluon.grouped import (
    grouped_rows,
    grouped_wgrad,
    matmul_nt,
    reason_against_rows,
    reason_against_wgrad,
)
from dsv3fp8.kernels.quantize.reference import quantize
from dsv3fp8.precision.formats import E4M3, E5M2, E5M6
from dsv3fp8.precision.tiles import BLOCK_128, COLUMN_128, ROW_128, QuantizedTensor, Tile


def block_starts(groups: Tensor, experts: int) -> Tensor:
    """First block of 128 rows of each expert, and the end of the last: int32 [E + 1], made on the device.

    groups: [blocks] of Plan, ascending; blocks of no expert (-1) come after all others.
    """
    bounds = torch.arange(experts + 1, device=groups.device, dtype=groups.dtype)
    return torch.searchsorted(torch.where(groups < 0, experts, groups), bounds, out_int32=True)


ROW, COLUMN, TENSOR = Tile(1, None), Tile(None, 1), Tile(None, None)

# Blocks of 128 rows of each expert, blocks of no expert after them.
LOADS = {
    "uneven, some empty": ([0, 1, 3, 0, 2], 0),
    "all to one": ([0, 0, 5], 0),
    "blocks of no expert": ([2, 0, 1], 2),
    "none at all": ([0, 0], 3),
}
SIZES = [(576, 1408), (2112, 576), (64, 16), (320, 2048)]  # N, K: tails of 64 rows and columns, one block, whole blocks


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Values of many sizes, with blocks of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator) * torch.exp(2 * torch.randn(*shape[:-1], 1, generator=generator))
    x[..., : shape[-2] // 3, :7] = 0
    return x


def on_gpu(t: QuantizedTensor) -> QuantizedTensor:
    return dataclasses.replace(t, codes=t.codes.cuda(), scale=t.scale.cuda())


def groups_of(blocks: list[int], inert: int) -> Tensor:
    return torch.tensor([expert for expert, count in enumerate(blocks) for _ in range(count)] + [-1] * inert)


def bits(t: Tensor) -> Tensor:
    return t.cpu().view(torch.int32 if t.dtype == torch.float32 else torch.int16)


def poison() -> None:
    """Leaves NaN in the memory that the next outputs get."""
    held = [torch.full((1 << size,), float("nan"), device="cuda") for size in range(10, 25)]
    torch.cuda.synchronize()
    del held


@pytest.mark.gpu
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_fprop_and_dgrad_give_the_tensor_cores_bits_every_time(size: tuple[int, int], load: str) -> None:
    blocks, inert = LOADS[load]
    n, k = size
    a = quantize(draw(128 * (sum(blocks) + inert), k), E4M3, ROW_128)
    weights = quantize(draw(len(blocks), n, k, seed=1), E4M3, BLOCK_128)
    want, at = torch.zeros(a.shape[0], n), 0
    for expert, count in enumerate(blocks):
        rows = slice(at, at := at + 128 * count)
        if count:
            want[rows] = emulated.block_scaled(a.rows(rows.start, rows.stop), weights[expert], 128)
    groups = groups_of(blocks, inert).cuda()
    for given in (groups, groups.to(torch.int32), groups):
        poison()
        got = grouped_rows(on_gpu(a), on_gpu(weights), given)
        assert torch.equal(bits(got), bits(want.to(torch.bfloat16)))


@pytest.mark.gpu
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_wgrad_gives_the_tensor_cores_bits_every_time(size: tuple[int, int], load: str, transposed: bool) -> None:
    blocks, inert = LOADS[load]
    n, k = size
    rows = 128 * (sum(blocks) + inert)
    dy, x = (quantize(draw(rows, width, seed=width), E4M3, COLUMN_128) for width in (n, k))
    want, at = torch.zeros(len(blocks), n, k), 0
    for expert, count in enumerate(blocks):
        start, at = at, at + 128 * count
        if count:
            left, right = (t.rows(start, at).transposed() for t in (dy, x))
            want[expert] = emulated.block_scaled(left, right, 128)
    operands = [on_gpu(t) for t in (dy, x)]
    if transposed:  # as the kernels that re-tile store them: the same matrix, tokens contiguous in memory
        operands = [dataclasses.replace(t, codes=t.codes.mT.contiguous().mT) for t in operands]
    starts = block_starts(groups_of(blocks, inert).cuda(), len(blocks))
    for _ in range(3):
        poison()
        assert torch.equal(bits(grouped_wgrad(*operands, starts)), bits(want))
    before = draw(len(blocks), n, k, seed=9)
    before[0] = float("nan")  # what an expert without rows has is not touched, the others' is added to once
    into = before.cuda()
    assert grouped_wgrad(*operands, starts, into=into) is into
    after = torch.where(torch.tensor(blocks)[:, None, None] > 0, before + want, before)
    assert torch.equal(into.cpu().nan_to_num(7), after.nan_to_num(7))


# What the rows and the weights are cast to, and whether rows are cast expert by expert; of dy, of x, and the same.
ROW_CASTS = {
    "E5M2": ((E5M2, ROW_128), BLOCK_128, False),
    "one scale": ((E4M3, TENSOR), TENSOR, False),
    "one scale an expert": ((E5M2, TENSOR), TENSOR, True),
    "a scale a row": ((E4M3, ROW), ROW, False),
    "a scale a row, one of the weights": ((E4M3, ROW), TENSOR, False),
    "a scale a block of rows": ((E4M3, Tile(128, None)), ROW, False),
    "blocks": ((E4M3, BLOCK_128), BLOCK_128, False),
}
WGRAD_CASTS = {
    "E5M2": ((E5M2, COLUMN_128), COLUMN_128, False),
    "one scale": ((E4M3, TENSOR), TENSOR, False),
    "one scale an expert": ((E5M2, TENSOR), TENSOR, True),
    "a scale a column and expert": ((E4M3, COLUMN), COLUMN, True),
    "blocks": ((E4M3, BLOCK_128), COLUMN_128, False),
}


def of_expert(t: QuantizedTensor, start: int, stop: int) -> QuantizedTensor:
    """Its rows, with its one scale where it has one."""
    rows = t.rows(start, stop)
    if not t.one_scale_per_group:
        return rows
    return dataclasses.replace(rows, scale=rows.scale[:1], tile=Tile(None, rows.tile.cols), one_scale_per_group=False)


@pytest.mark.gpu
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("size", [(576, 1408), (64, 16), (320, 2048)], ids=str)
@pytest.mark.parametrize("cast", ROW_CASTS)
def test_rows_of_other_casts_have_the_tensor_cores_bits(cast: str, size: tuple[int, int], load: str) -> None:
    blocks, inert = LOADS[load]
    (n, k), ((fmt, tile), weight_tile, born) = size, ROW_CASTS[cast]
    groups = groups_of(blocks, inert)
    a = quantize(draw(128 * len(groups), k), fmt, tile, groups=groups if born else None)
    weights = quantize(draw(len(blocks), n, k, seed=1), E4M3, weight_tile)
    weights.scale[[expert for expert, count in enumerate(blocks) if not count]] = torch.nan  # nobody's
    want, at = torch.zeros(a.shape[0], n), 0
    for expert, count in enumerate(blocks):
        rows = slice(at, at := at + 128 * count)
        if count:
            part = of_expert(a, rows.start, rows.stop)
            want[rows] = emulated.matmul_nt(part, weights[expert], torch.float32, 128)
    for _ in range(2):
        poison()
        got = grouped_rows(on_gpu(a), on_gpu(weights), groups.cuda())
        assert torch.equal(bits(got), bits(want.to(torch.bfloat16)))


@pytest.mark.gpu
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("size", [(576, 1408), (64, 16), (320, 144)], ids=str)
@pytest.mark.parametrize("cast", WGRAD_CASTS)
def test_wgrad_of_other_casts_has_the_tensor_cores_bits(cast: str, size: tuple[int, int], load: str) -> None:
    blocks, inert = LOADS[load]
    (n, k), ((fmt, tile), x_tile, born) = size, WGRAD_CASTS[cast]
    groups = groups_of(blocks, inert)
    dy = quantize(draw(128 * len(groups), n, seed=n), fmt, tile, groups=groups if born else None)
    x = quantize(draw(128 * len(groups), k, seed=k), E4M3, x_tile, groups=groups if born else None)
    want, at = torch.zeros(len(blocks), n, k), 0
    for expert, count in enumerate(blocks):
        start, at = at, at + 128 * count
        if count:
            left, right = (of_expert(t, start, at).transposed() for t in (dy, x))
            want[expert] = emulated.matmul_nt(left, right, torch.float32, 128)
    starts = block_starts(groups.cuda(), len(blocks))
    for _ in range(2):
        poison()
        assert torch.equal(bits(grouped_wgrad(on_gpu(dy), on_gpu(x), starts)), bits(want))
    before = draw(len(blocks), n, k, seed=9)
    before[0] = float("nan")
    into = before.cuda()
    grouped_wgrad(on_gpu(dy), on_gpu(x), starts, into=into)
    after = torch.where(torch.tensor(blocks)[:, None, None] > 0, before + want, before)
    assert torch.equal(into.cpu().nan_to_num(7), after.nan_to_num(7))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 127, 129, 200])
@pytest.mark.parametrize("size", [(576, 1408), (200, 176), (64, 16)], ids=str)
@pytest.mark.parametrize("cast", [cast for cast, (_, _, born) in ROW_CASTS.items() if not born])
def test_the_dense_gemm_of_other_casts_has_the_tensor_cores_bits(cast: str, size: tuple[int, int], m: int) -> None:
    (n, k), ((fmt, tile), weight_tile, _) = size, ROW_CASTS[cast]
    a, b = quantize(draw(m, k), fmt, tile), quantize(draw(n, k, seed=1), E4M3, weight_tile)
    poison()
    got = matmul_nt(on_gpu(a), on_gpu(b))
    assert torch.equal(bits(got), bits(emulated.matmul_nt(a, b, torch.bfloat16, 128)))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 127, 129, 200, 4096])
@pytest.mark.parametrize("size", [*SIZES, (200, 176)], ids=str)
def test_the_dense_gemm_gives_the_tensor_cores_bits(m: int, size: tuple[int, int]) -> None:
    n, k = size
    if m * n * k > 2**30:
        n = 64
    a, b = quantize(draw(m, k), E4M3, ROW_128), quantize(draw(n, k, seed=1), E4M3, BLOCK_128)
    poison()
    got = matmul_nt(on_gpu(a), on_gpu(b))
    assert torch.equal(bits(got), bits(emulated.block_scaled(a, b, 128).to(torch.bfloat16)))


@pytest.mark.gpu
def test_compiled_and_captured_they_give_the_same_bits_without_a_synchronization() -> None:
    blocks = [1, 0, 2]
    a = on_gpu(quantize(draw(384, 256), E4M3, ROW_128))
    weights = on_gpu(quantize(draw(3, 192, 256, seed=1), E4M3, BLOCK_128))
    dy, x = (on_gpu(quantize(draw(384, width, seed=2), E4M3, COLUMN_128)) for width in (192, 256))
    groups = groups_of(blocks, 0).cuda()

    def step() -> tuple[Tensor, Tensor]:
        return grouped_rows(a, weights, groups), grouped_wgrad(dy, x, block_starts(groups, 3))

    want = step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    compiled = torch.compile(step, fullgraph=True)()
    for got in (again, captured, compiled):
        assert all(torch.equal(bits(g), bits(w)) for g, w in zip(got, want, strict=True))


def test_first_blocks_of_experts_come_from_the_groups() -> None:
    for blocks, inert in LOADS.values():
        starts = block_starts(groups_of(blocks, inert), len(blocks))
        assert starts.dtype == torch.int32
        assert starts.tolist() == [sum(blocks[:expert]) for expert in range(len(blocks) + 1)]


def test_shapes_are_known_without_running() -> None:
    """What torch.compile asks of the ops."""
    a, a_scale = torch.empty(256, 128, device="meta", dtype=torch.float8_e4m3fn), torch.empty(256, 1, device="meta")
    b, b_scale = torch.empty(3, 64, 128, device="meta", dtype=torch.float8_e4m3fn), torch.empty(3, 1, 1, device="meta")
    groups, starts = torch.empty(2, device="meta", dtype=torch.int64), torch.empty(4, device="meta", dtype=torch.int32)
    out = torch.ops.dsv3fp8.gluon_rows(a, a_scale, b, b_scale, groups, 1, False)
    assert (out.shape, out.dtype) == ((256, 64), torch.bfloat16)
    out = torch.ops.dsv3fp8.gluon_wgrad(a, a_scale, a, a_scale, starts, False)
    assert (out.shape, out.dtype) == ((3, 256, 256), torch.float32)


def refusals() -> dict[str, tuple[str | None, str]]:
    def q(rows: int, cols: int, tile: Tile, fmt: object = E4M3, **parts: int) -> QuantizedTensor:
        return quantize(torch.zeros(rows, cols), fmt, tile, **parts)

    row, block, column = (q(128, 256, tile) for tile in (ROW_128, BLOCK_128, COLUMN_128))
    bf16 = torch.bfloat16
    return {
        "another format": (reason_against_rows(q(128, 256, ROW_128, E5M6), block, bf16), "tensor core has no e5m6"),
        "another tile": (reason_against_rows(row, row, bf16), "tiles 1x128 x 1x128"),
        "one scale of the weights alone": (reason_against_rows(row, q(128, 256, TENSOR), bf16), "tiles 1x128 x allxall"),
        "blocks of whole rows": (reason_against_rows(q(128, 256, ROW), q(128, 256, Tile(128, None)), bf16), "x 128xall"),
        "one scale of an expert's tokens alone": (reason_against_wgrad(column, q(128, 256, TENSOR), 1), "its finished sum"),
        "blocks along the saved rows": (reason_against_wgrad(column, q(128, 256, BLOCK_128), 1), "tiles 128x1 x 128x128"),
        "fp32 out": (reason_against_rows(row, block, torch.float32), "not float32"),
        "half a tile of columns": (reason_against_rows(row, q(1152, 256, BLOCK_128, row_parts=2), bf16), "inside the rows"),
        "half a tile of K": (
            reason_against_rows(q(128, 1152, ROW_128, col_parts=2), q(128, 1152, BLOCK_128, col_parts=2), bf16),
            "inside K",
        ),
        "unaligned K": (reason_against_rows(q(128, 40, ROW_128), q(128, 40, BLOCK_128), bf16), "K = 40"),
        "unaligned N": (reason_against_rows(row, q(100, 256, BLOCK_128), bf16), "N = 100"),
        "rows of the next expert": (reason_against_wgrad(q(128, 96, COLUMN_128), column, 2), "N = 96"),
        "unaligned columns": (reason_against_wgrad(column, q(128, 40, COLUMN_128), 2), "not 40"),
        "rows as tokens": (reason_against_wgrad(row, column, 2), "tiles 1x128 x 128x1"),
    }


@pytest.mark.parametrize("case", refusals())
def test_what_they_cannot_compute_they_refuse_with_the_reason(case: str) -> None:
    reason, words = refusals()[case]
    assert reason is not None
    assert words in reason
    assert "\n" not in reason


def test_what_they_can_compute_has_no_reason_against_it() -> None:
    for n, k in SIZES:
        a, b = quantize(torch.zeros(128, k), E4M3, ROW_128), quantize(torch.zeros(3, n, k), E4M3, BLOCK_128)
        assert reason_against_rows(a, b, torch.bfloat16) is None
        dy, x = (quantize(torch.zeros(128, width), E4M3, COLUMN_128) for width in (n, k))
        assert reason_against_wgrad(dy, x, 3) is None
    groups = torch.zeros(1, dtype=torch.int64)
    for (fmt, tile), weight_tile, born in ROW_CASTS.values():
        a = quantize(torch.ones(128, 256), fmt, tile, groups=groups if born else None)
        assert reason_against_rows(a, quantize(torch.ones(3, 64, 256), E4M3, weight_tile), torch.bfloat16) is None
    for (fmt, tile), x_tile, born in WGRAD_CASTS.values():
        given = {"groups": groups if born else None}
        dy, x = quantize(torch.ones(128, 64), fmt, tile, **given), quantize(torch.ones(128, 256), E4M3, x_tile, **given)
        assert reason_against_wgrad(dy, x, 3) is None
    halves = quantize(torch.zeros(3, 512, 256), E4M3, BLOCK_128, row_parts=2)
    assert reason_against_rows(quantize(torch.zeros(128, 256), E4M3, ROW_128), halves, torch.bfloat16) is None


def test_a_wrong_call_is_refused() -> None:
    a, b = quantize(torch.zeros(256, 256), E4M3, ROW_128), quantize(torch.zeros(2, 64, 256), E4M3, BLOCK_128)
    with pytest.raises(ValueError, match="groups has 3 blocks of 128 rows, the operand 256 rows"):
        grouped_rows(a, b, torch.zeros(3, dtype=torch.int64))
    dy, x = (quantize(torch.zeros(256, width), E4M3, COLUMN_128) for width in (64, 256))
    with pytest.raises(ValueError, match="into must be"):
        grouped_wgrad(dy, x, torch.tensor([0, 1, 2], dtype=torch.int32), into=torch.zeros(2, 64, 128))
