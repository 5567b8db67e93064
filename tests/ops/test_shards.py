"""Codes made from the parts of a weight are those of the whole weight, wherever the borders fall."""

import pytest
import torch
from support import recipe
from torch import Tensor

from dsv3fp8.ops.quantizers import LinearQuantizers
from dsv3fp8.ops.shards import Part, ShardCodes, tile_amax
from dsv3fp8.ops.weights import WeightCodes
from dsv3fp8.precision.tiles import QuantizedTensor, Tile

RECIPES = ["dsv3", "dsv3_pow2", "hybrid", "rowwise", "tensorwise", "delayed", "static"]
# (shape, halves, dimension that is cut, parts): borders on tiles, in tiles, in the second half, parts without rows.
CUTS = [
    ((512, 256), 1, 0, 2),
    ((512, 256), 1, 0, 3),
    ((400, 130), 2, 0, 2),
    ((2 * 200, 130), 2, 0, 7),
    ((5, 17), 1, 0, 4),
    ((3, 2 * 72, 200), 2, 0, 2),
    ((3, 2 * 150, 200), 2, 1, 4),
    ((2, 260, 129), 1, 1, 2),
]


def quantizers(name: str, shape: tuple[int, ...], *words: str) -> LinearQuantizers:
    op = "expert_gate_up" if len(shape) == 3 else "gate_up"
    return LinearQuantizers(recipe(name, *words), op, shape[0] if len(shape) == 3 else 0)


def master(shape: tuple[int, ...]) -> Tensor:
    """Values of very different sizes from tile to tile, and one tile of zeros."""
    generator = torch.Generator().manual_seed(0)
    made = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp() ** 3
    made[..., :128, :128] *= 100
    made[..., : shape[-2] // 3, 128:] = 0
    return made


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.contiguous().view(torch.uint8))


def joined(whole: Tensor, halves: int, dim: int, count: int, made_by: LinearQuantizers) -> list[QuantizedTensor]:
    """What the ranks gather, each having made its part's codes."""
    length = whole.shape[dim]
    each = -(-length // count)
    firsts = [min(i * each, length) for i in range(count)]
    pieces = [whole.narrow(dim, first, min(each, length - first)) for first in firsts]
    parts = [Part(tuple(whole.shape), dim, first) for first in firsts]
    shards = [ShardCodes(made_by, halves, part) for part in parts]
    amaxes = [shard.amaxes(piece) for shard, piece in zip(shards, pieces, strict=True)]
    largest = [torch.stack(grids).amax(0) for grids in zip(*amaxes, strict=True)]
    padded = list(whole.shape)
    padded[dim] = each
    for shard, piece in zip(shards, pieces, strict=True):
        shard.make(piece, largest, torch.Size(padded))
    assert all(same_bits(a, b) for shard in shards for a, b in zip(shard.scales, shards[0].scales, strict=True))
    codes = [torch.cat(made, dim).narrow(dim, 0, length) for made in zip(*(shard.codes for shard in shards), strict=True)]
    return shards[0].assembled(codes, shards[0].scales)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(("shape", "halves", "dim", "count"), CUTS)
def test_parts_make_the_codes_of_the_whole(name: str, shape: tuple[int, ...], halves: int, dim: int, count: int) -> None:
    whole = master(shape)
    codes = WeightCodes(quantizers(name, shape), halves)
    wanted = [codes.fprop(whole)]
    if not codes.quantizers.gemm.weight.one_orientation:
        wanted.append(codes.dgrad(whole).transposed())  # type: ignore[union-attr]
    got = joined(whole, halves, dim, count, quantizers(name, shape))
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert isinstance(other, QuantizedTensor)
        assert same_bits(one.codes, other.codes)
        assert same_bits(one.scale, other.scale)
        assert (one.tile, one.shape, one.row_parts, one.format) == (other.tile, other.shape, other.row_parts, other.format)


def test_tiles_along_the_gemm_s_k_in_either_orientation() -> None:
    """Weights in tiles of 1x128, of which dgrad reads 128x1."""
    whole = master((300, 200))
    words = ("roles.weight.tile=1x128",)
    codes = WeightCodes(quantizers("dsv3", (300, 200), *words))
    got = joined(whole, 1, 0, 4, quantizers("dsv3", (300, 200), *words))
    for one, other in zip(got, (codes.fprop(whole), codes.dgrad(whole).transposed()), strict=True):  # type: ignore[union-attr]
        assert isinstance(other, QuantizedTensor)
        assert same_bits(one.decode(), other.decode())


def test_a_scale_that_is_kept_observes_the_whole_weight() -> None:
    whole = master((400, 130))
    alone, cut = quantizers("delayed", (400, 130)), quantizers("delayed", (400, 130))
    WeightCodes(alone).fprop(whole)
    joined(whole, 1, 0, 3, cut)
    assert float(cut.states["weight"].current) == float(alone.states["weight"].current) == float(whole.abs().max())  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_poisons_its_tile_in_every_part(value: float) -> None:
    whole = torch.ones(256, 256)
    whole[100, 200] = value
    (got,) = joined(whole, 1, 0, 4, quantizers("dsv3", (256, 256)))
    bad = torch.zeros(2, 2, dtype=torch.bool)
    bad[0, 1] = True
    assert torch.equal(torch.isnan(got.scale), bad)


def test_a_part_says_nothing_of_tiles_that_lie_elsewhere() -> None:
    grid = tile_amax(-torch.ones(100, 130), Tile(128, 128), 2, Part((600, 130), 0, 250))
    assert grid[:, 0].tolist() == [0, 1, 1, 1, 0, 0]  # rows 250 to 299 and 300 to 349 of halves of 300
