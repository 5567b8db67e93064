"""Quantize and re-tile against the slow emulation: every tile, format and scale kind, odd sizes, strides, poison."""

import emulation
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsv3fp8.kernels.quantize.reference import quantize, retile, scale_from_amax
from dsv3fp8.precision.formats import E4M3, E5M2, E5M6, FORMATS, Format
from dsv3fp8.precision.tiles import BLOCK_128, COLUMN_128, ROW_128, QuantizedTensor, Tile

TILES = [ROW_128, COLUMN_128, BLOCK_128, Tile(1, None), Tile(None, 1), Tile(None, None)]
ODD = [1, 2, 127, 128, 129, 200, 256]
SMALLEST, LARGEST = 2.0**-126, 2.0**126


def noise(*shape: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    """Normal values whose rows and columns differ in size, as BF16 holds them."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.exp(spread * torch.randn(*shape[:-1], 1, generator=generator))
    cols = torch.exp(spread * torch.randn(shape[-1], generator=generator))
    return (torch.randn(shape, generator=generator) * rows * cols).bfloat16()


def check(got: QuantizedTensor, want: emulation.Quantized) -> None:
    """Equal scales and decoded values in every bit (NaN equals NaN), hence equal codes."""
    shape = want.values.shape
    assert np.array_equal(got.expanded_scale().expand(shape).numpy(), want.scale, equal_nan=True)
    assert np.array_equal(got.decode().numpy(), want.values, equal_nan=True)


@settings(max_examples=120, deadline=None)
@given(
    rows=st.sampled_from(ODD), cols=st.sampled_from(ODD), tile=st.sampled_from(TILES), fmt=st.sampled_from(list(FORMATS)),
    kind=st.sampled_from(["fp32", "pow2"]), parts=st.sampled_from([(1, 1), (2, 1), (1, 2)]), seed=st.integers(0, 999),
    spread=st.sampled_from([0.5, 3.0, 9.0]),
)  # fmt: skip
def test_equals_the_emulation_in_every_bit(
    rows: int, cols: int, tile: Tile, fmt: str, kind: str, parts: tuple[int, int], seed: int, spread: float
) -> None:
    x = noise(rows * parts[0], cols * parts[1], seed=seed, spread=spread)
    got = quantize(x, FORMATS[fmt], tile, kind, row_parts=parts[0], col_parts=parts[1])
    check(got, emulation.quantize(x, fmt, (tile.rows, tile.cols), kind, *parts))


@pytest.mark.parametrize("size", [576, 1408])
@pytest.mark.parametrize("tile", [ROW_128, COLUMN_128, BLOCK_128], ids=str)
def test_real_deepseek_sizes_have_a_tail_tile(size: int, tile: Tile) -> None:
    """G03: 576 and 1408 are no multiples of 128; the tail tile covers what is there."""
    x = noise(size, 130)
    x = x if tile is COLUMN_128 else x.mT.contiguous()
    got = quantize(x, E4M3, tile)
    check(got, emulation.quantize(x, "e4m3", (tile.rows, tile.cols), "fp32"))
    grid = [-(-length // t) for length, t in zip(x.shape, (tile.rows, tile.cols), strict=True)]  # type: ignore[operator]
    assert list(got.scale.shape) == grid


def test_gate_and_up_halves_never_share_a_tile() -> None:
    x = torch.cat((torch.full((2, 72), 1.0), torch.full((2, 72), 96.0)), 1)
    halves = quantize(x, E4M3, ROW_128, "pow2", col_parts=2)
    assert halves.scale.tolist() == [[2.0**-8, 2.0**-2]] * 2
    assert torch.equal(halves.decode(), x)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
@pytest.mark.parametrize("kind", ["fp32", "pow2"])
def test_a_zero_tile_has_scale_one_and_codes_zero(fmt: Format, kind: str) -> None:
    """Q01."""
    weight = torch.zeros(256, 256)
    weight[0, 0] = 1
    for x, tile in ((weight, BLOCK_128), (torch.zeros(3, 256), ROW_128)):
        got = quantize(x, fmt, tile, kind)
        assert torch.allclose(got.decode(), x, atol=0)
        zero_tiles = got.scale.flatten()[1:]
        assert (zero_tiles == 1).all()


@pytest.mark.parametrize("kind", ["fp32", "pow2"])
@pytest.mark.parametrize("size", [1e-38, 1e-40, 9.2e-41, 2.0**-126, 1e-10, 1e-30, 3e38])
def test_tiny_and_huge_tiles_have_normal_scales_with_normal_reciprocals(size: float, kind: str) -> None:
    """Q02, Q03: no amax floor flushes gradients, no scale or reciprocal leaves the normal fp32 numbers."""
    x = torch.linspace(-1, 1, 128)[None] * size
    mixed = torch.cat((torch.zeros(1, 64), torch.full((1, 64), size)), 1)
    for values in (x, mixed):
        got = quantize(values, E4M3, ROW_128, kind)
        scale = float(got.scale)
        assert SMALLEST <= scale <= LARGEST
        assert SMALLEST <= 1 / scale <= LARGEST
        decoded = got.decode()
        assert torch.isfinite(decoded).all()
        step = torch.maximum(values.abs() / 16, torch.tensor(scale * 2.0**-10))  # half an E4M3 step, or half a subnormal one
        assert ((decoded - values).abs() <= step * 1.0001).all()


def test_gradients_of_1e_minus_10_keep_every_code() -> None:
    """Q03: with the floor of 1e-4 that inference code uses, all 128 would be zero."""
    got = quantize(torch.linspace(-1, 1, 128)[None] * 1e-10, E4M3, ROW_128)
    assert torch.count_nonzero(got.codes.float()) == 128


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("given_scale", [False, True])
def test_nan_and_infinity_poison_their_tile_and_no_other(poison: float, tile: Tile, given_scale: bool) -> None:
    """Q05: infinity is never hidden as 448, with a scale from a history neither."""
    x = noise(256, 256).float()
    x[130, 5] = poison
    scale = torch.full((1, 1), 0.5) if given_scale else None
    got = quantize(x, E4M3, tile, scale=scale)
    rows = slice(0, 256) if tile.rows is None else slice(128, 256) if tile.rows == 128 else slice(130, 131)
    cols = slice(0, 256) if tile.cols is None else slice(0, 128) if tile.cols == 128 else slice(5, 6)
    poisoned = torch.zeros(256, 256, dtype=torch.bool)
    poisoned[rows, cols] = True
    assert torch.isnan(got.decode()[poisoned]).all()
    assert torch.isnan(got.expanded_scale().expand(256, 256)[poisoned]).all()
    assert torch.isfinite(got.decode()[~poisoned]).all()


@pytest.mark.parametrize("k", [-126, -3, -2, -1, 0, 1, 2, 3])
def test_power_of_two_scales_at_exact_boundaries(k: int) -> None:
    """Q08: 2^k exactly at 448 * 2^k, one exponent more just above it, never a mantissa bit."""
    at = torch.tensor(448.0) * 2.0**k
    above, below = torch.nextafter(at, torch.tensor(torch.inf)), torch.nextafter(at, torch.tensor(0.0))
    scales = scale_from_amax(torch.stack((below, at, above)), E4M3, "pow2")
    assert scales.tolist() == [2.0**k, 2.0**k, 2.0 ** (k + 1)]
    got = quantize(torch.stack((at, -at))[None], E4M3, ROW_128, "pow2")
    assert got.codes.view(torch.uint8).tolist() == [[0x7E, 0xFE]]


@given(st.integers(1, 0x7F7FFFFF))
@settings(max_examples=300, deadline=None)
def test_a_power_of_two_scale_is_the_smallest_that_holds_the_tile(bits: int) -> None:
    """Q08: for every format, from the bits of any positive amax, subnormal ones too."""
    amax = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    for fmt in FORMATS.values():
        scale = scale_from_amax(amax, fmt, "pow2")
        assert int(scale.view(torch.int32)) & 0x7FFFFF == 0
        assert float(scale) == float(emulation.scale_of(amax.numpy()[0], fmt.name, "pow2"))


def test_re_tiling_is_exact_with_powers_of_two_and_not_with_fp32_scales() -> None:
    """Q09: 1x128 -> 128x1 changes no value, against 99 % of the codes and 3.63 % error."""
    x = torch.randn(128, 128, generator=torch.Generator().manual_seed(0))
    error, changed = {}, {}
    for kind in ("fp32", "pow2"):
        rows = quantize(x, E4M3, ROW_128, kind)
        columns = retile(rows, COLUMN_128)
        assert (columns.tile, columns.scale_kind) == (COLUMN_128, kind)
        error[kind] = float((columns.decode() - x).norm() / x.norm())
        changed[kind] = float((columns.decode() != rows.decode()).float().mean())
    assert changed["pow2"] == 0.0
    assert changed["fp32"] > 0.95
    assert 0.025 < error["pow2"] < 0.028
    assert 0.034 < error["fp32"] < 0.038


@pytest.mark.parametrize("source", ["e4m3", "e5m6"])
@pytest.mark.parametrize("kind", ["fp32", "pow2", None])
def test_re_tiling_reads_the_codes_and_takes_the_scale_kind_of_its_source(source: str, kind: str | None) -> None:
    x = noise(200, 130)
    kept = quantize(x, FORMATS[source], ROW_128, "pow2")
    got = retile(kept, COLUMN_128, kind, fmt=E4M3)
    assert got.scale_kind == (kind or "pow2")
    decoded = emulation.quantize(x, source, (1, 128), "pow2").values
    check(got, emulation.quantize(decoded, "e4m3", (128, 1), kind or "pow2"))


def strided() -> dict[str, Tensor]:
    x = noise(64, 256, spread=1.0)
    return {
        "every second row": x[::2],
        "transposed": noise(256, 64, spread=1.0).t(),
        "part of wider rows": noise(8, 576, spread=1.0)[:, :512],
        "every second column": x[:, ::2],
        "one row repeated": x[:1].expand(40, 256),
        "slice of a batch": noise(2, 5, 256, spread=1.0)[:, 1:4],
    }


@pytest.mark.parametrize("case", strided())
@pytest.mark.parametrize("tile", [ROW_128, COLUMN_128, BLOCK_128], ids=str)
def test_strides_do_not_matter(case: str, tile: Tile) -> None:
    """Q12."""
    x = strided()[case]
    got, want = quantize(x, E4M3, tile), quantize(x.contiguous(), E4M3, tile)
    assert torch.equal(got.codes.view(torch.uint8), want.codes.view(torch.uint8))
    assert torch.equal(got.scale, want.scale)


@pytest.mark.parametrize(("shape", "grid"), [((0, 128), (0, 1)), ((0, 256), (0, 2)), ((3, 0, 256), (3, 0, 2))])
def test_no_tokens_give_no_codes_and_no_scales(shape: tuple[int, ...], grid: tuple[int, ...]) -> None:
    """Q14."""
    got = quantize(torch.zeros(shape), E4M3, ROW_128)
    assert got.codes.shape == shape
    assert got.scale.shape == grid
    assert got.codes.dtype == torch.float8_e4m3fn
    again = retile(got, COLUMN_128)
    assert again.decode().shape == shape


def test_experts_of_a_stack_never_share_a_tile() -> None:
    x = noise(3, 70, 130)
    got = quantize(x, E4M3, BLOCK_128, row_parts=2)
    for expert in range(3):
        check(got[expert], emulation.quantize(x[expert], "e4m3", (128, 128), "fp32", 2, 1))


@pytest.mark.parametrize("cols", [None, 1])
def test_every_expert_has_its_own_scale_where_a_scale_covers_all_tokens(cols: int | None) -> None:
    """One scale per expert (and per channel), repeated for each of the expert's blocks of 128 rows; experts may be empty."""
    x = noise(512, 40)
    groups = torch.tensor([0, 0, 2, 3])
    got = quantize(x, E4M3, Tile(None, cols), groups=groups)
    assert got.one_scale_per_group
    for rows in (slice(0, 256), slice(256, 384), slice(384, 512)):
        want = emulation.quantize(x[rows], "e4m3", (None, cols), "fp32")
        assert np.array_equal(got.decode()[rows].numpy(), want.values)
        assert np.array_equal(got.expanded_scale().expand(512, 40)[rows].numpy(), want.scale)
    x[300, 3] = torch.nan
    poisoned = torch.isnan(quantize(x, E4M3, Tile(None, cols), groups=groups).decode()).any(1)
    assert poisoned.tolist() == [False] * 256 + [True] * 128 + [False] * 128


def test_a_transposed_view_has_the_transposed_scale_grid() -> None:
    """G06: a square grid whose orientation no shape gives away."""
    sizes = torch.tensor([[1.0, 10.0], [100.0, 1000.0]])
    weight = torch.ones(256, 256) * sizes.repeat_interleave(128, 0).repeat_interleave(128, 1)
    got = quantize(weight, E4M3, BLOCK_128).transposed()
    assert torch.equal(got.scale, (sizes / 448).mT)
    assert torch.allclose(got.decode(), weight.mT)


def test_codes_take_the_bytes_they_should() -> None:
    x = noise(4, 256)
    assert quantize(x, E4M3, ROW_128).nbytes == 4 * (256 + 2 * 4)
    assert quantize(x, E5M2, ROW_128).codes.dtype == torch.float8_e5m2
    assert quantize(x, E5M6, ROW_128).nbytes == 4 * (384 + 2 * 4)
    assert quantize(x[:, :201], E5M6, ROW_128).codes.shape == (4, 303)
