"""The reference GEMM: fp32 sums whatever surrounds it, scales that are constant along K applied once."""

import emulation
import pytest
import torch
from emulation import matmul
from torch import Tensor

from dsv3fp8.kernels.gemm.reference import matmul_nt
from dsv3fp8.kernels.quantize.reference import quantize
from dsv3fp8.precision.formats import E4M3, E5M2
from dsv3fp8.precision.tiles import BLOCK_128, ROW_128, Tile

SHAPES = [(1, 1, 1), (3, 130, 5), (64, 576, 200), (0, 128, 4), (4, 128, 0)]  # M, K, N


def draw(m: int, k: int, n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.exp(2 * torch.randn(m, 1, generator=generator))
    return torch.randn(m, k, generator=generator) * sizes, torch.randn(n, k, generator=generator)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "tiles", [(ROW_128, BLOCK_128), (ROW_128, ROW_128), (Tile(1, None), Tile(1, None)), (Tile(None, None),) * 2], ids=str
)
def test_quantized_operands_multiply_as_their_values_do(shape: tuple[int, int, int], tiles: tuple[Tile, Tile]) -> None:
    a, b = draw(*shape)
    got = matmul_nt(quantize(a, E5M2, tiles[0]), quantize(b, E4M3, tiles[1]), torch.float32)
    left = emulation.quantize(a, "e5m2", (tiles[0].rows, tiles[0].cols), "fp32").values
    right = emulation.quantize(b, "e4m3", (tiles[1].rows, tiles[1].cols), "fp32").values
    mass = torch.from_numpy(matmul(abs(left), abs(right).T))
    assert got.dtype == torch.float32
    assert ((got.double() - torch.from_numpy(matmul(left, right.T))).abs() <= 1e-6 * mass).all()


def test_scales_constant_along_k_multiply_the_finished_sum_once() -> None:
    """fp32(s_a * s_b) times an exact sum of codes: bit for bit."""
    a, b = (torch.randint(-8, 9, (5, 300), generator=torch.Generator().manual_seed(s)).float() for s in (0, 1))
    qa, qb = (quantize(t * 0.3, E4M3, Tile(1, None)) for t in (a, b))
    sums = (qa.codes.double() @ qb.codes.double().mT).float()
    assert torch.equal(sums.double(), qa.codes.double() @ qb.codes.double().mT)  # exact in fp32, in any order
    assert torch.equal(matmul_nt(qa, qb, torch.float32), sums * (qa.scale * qb.scale.mT))


def test_sums_are_fp32_under_autocast_and_rounded_once() -> None:
    """512 products of one: a BF16 accumulator would stop at 256."""
    ones = torch.ones(1, 512, dtype=torch.bfloat16)
    quantized = quantize(torch.ones(1, 512), E4M3, ROW_128, "pow2")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for a, b in ((ones, ones), (quantized, quantized), (quantized, ones)):
            for dtype in (torch.float32, torch.bfloat16):
                out = matmul_nt(a, b, dtype)
                assert out.dtype == dtype
                assert out.item() == 512.0
        exact = matmul_nt(torch.full((1, 1), 1 + 2.0**-20), torch.ones(1, 1), torch.float32)
    assert exact.item() == 1 + 2.0**-20


def test_float64_stays_float64() -> None:
    a, b = (t.double() for t in draw(3, 40, 5))
    assert torch.equal(matmul_nt(a, b, torch.float64), a @ b.mT)
