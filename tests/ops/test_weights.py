"""Weight codes: what is kept of a master for fprop and dgrad, on the CPU and on a Hopper GPU."""

import pytest
import torch
from support import recipe

from dsv3fp8.ops.quantizers import LinearQuantizers
from dsv3fp8.ops.weights import WeightCodes
from dsv3fp8.precision.tiles import QuantizedTensor

SHAPES = [((256, 384), 1), ((2 * 72, 130), 2), ((3, 2 * 200, 576), 2)]


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["gate_up", "down"])
@pytest.mark.parametrize("name", ["dsv3", "tensorwise", "rowwise"])
@pytest.mark.parametrize(("shape", "parts"), SHAPES)
def test_a_gpu_makes_the_codes_of_the_cpu_and_stores_them_as_its_gemms_read_them(
    name: str, op: str, shape: tuple[int, ...], parts: int
) -> None:
    master = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    here, there = (WeightCodes(LinearQuantizers(recipe(name), op), row_parts=parts) for _ in range(2))
    on_gpu = master.cuda()
    for want, got in ((here.fprop(master), there.fprop(on_gpu)), (here.dgrad(master), there.dgrad(on_gpu))):
        assert isinstance(want, QuantizedTensor)
        assert isinstance(got, QuantizedTensor)
        assert torch.equal(got.codes.view(torch.uint8).cpu(), want.codes.view(torch.uint8))
        assert torch.equal(got.scale.cpu(), want.scale)
        assert (got.tile, got.shape, got.row_parts, got.col_parts) == (want.tile, want.shape, want.row_parts, want.col_parts)
        assert got.codes.is_contiguous()


def test_codes_follow_the_master_and_nothing_else() -> None:
    master = torch.randn(256, 384)
    codes = WeightCodes(LinearQuantizers(recipe("dsv3"), "down"))
    first = codes.fprop(master), codes.dgrad(master)
    assert (codes.fprop(master), codes.dgrad(master)) == first
    master[0, 0] = 1000.0
    again = codes.fprop(master)
    assert isinstance(again, QuantizedTensor)
    assert float(again.decode()[0, 0]) == pytest.approx(1000.0)
    dgrad = codes.dgrad(master)
    assert isinstance(dgrad, QuantizedTensor)
    assert torch.equal(dgrad.decode(), again.decode().mT)


def test_a_weight_that_is_not_quantized_has_no_second_copy() -> None:
    master = torch.randn(256, 384)
    codes = WeightCodes(LinearQuantizers(recipe("bf16"), "down"))
    fprop, dgrad = codes.fprop(master), codes.dgrad(master)
    assert not isinstance(fprop, QuantizedTensor)
    assert not isinstance(dgrad, QuantizedTensor)
    assert dgrad.data_ptr() == fprop.data_ptr()
