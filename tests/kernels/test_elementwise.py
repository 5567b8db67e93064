"""The fused norm, SwiGLU and RoPE kernels: compiled for Hopper, on a GPU, and in the interpreter.

The interpreter runs interpreted_elementwise.py in a process of its own, because TRITON_INTERPRET=1 holds for a whole process.
"""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", minversion="3.6")

from interpreter import run_interpreted
from test_triton import check
from test_triton_compiles import compiled, resources

from dsv3fp8.kernels import backend, elementwise
from dsv3fp8.kernels.backend import Choice
from dsv3fp8.kernels.norm import reference as norm_reference
from dsv3fp8.kernels.norm import triton as norm
from dsv3fp8.kernels.quantize.device import row_tiles
from dsv3fp8.kernels.quantize.reference import quantize
from dsv3fp8.kernels.rope import reference as rope_reference
from dsv3fp8.kernels.rope import triton as rope
from dsv3fp8.kernels.swiglu import reference as swiglu_reference
from dsv3fp8.kernels.swiglu import triton as swiglu
from dsv3fp8.precision import cast_meter
from dsv3fp8.precision.formats import E4M3
from dsv3fp8.precision.tiles import COLUMN_128, ROW_128, values_of

__all__ = ["compiled"]  # the fixture
EPS = 1e-6


def launches(cols: int) -> dict[str, Callable[[], object]]:
    """Every kernel in every form that a recipe takes, at this width."""
    x, gamma, weight = torch.zeros(128, cols).bfloat16(), torch.ones(cols), torch.ones(128)
    h = torch.zeros(128, 2 * cols).bfloat16()
    cache = row_tiles(128, 2 * cols, E4M3, "fp32", h.device, col_parts=2)
    q, kv, v, k_rope = (torch.zeros(s).bfloat16() for s in ((1, 128, 2, 192), (1, 128, 2, 256), (1, 128, 2, 128), (1, 128, 64)))
    table, cast = torch.zeros(1, 128, 32), (E4M3, "fp32")
    return {
        "norm": lambda: norm.forward_cast(x, gamma, EPS, E4M3, "fp32", True),
        "norm backward": lambda: norm.backward(x, gamma, EPS, [x, x, x.float()], x),
        "norm backward fp32": lambda: norm.backward(x, gamma, EPS, [x.float()] * 3, x),
        "norm backward cast": lambda: norm.backward_cast(x[:, :1536], gamma[:1536], EPS, x[:, :1536], x[:, :64], E4M3, "fp32"),
        "swiglu": lambda: swiglu.forward_cast(h, weight, "fp32", True, E4M3, "fp32"),
        "swiglu again": lambda: swiglu.forward_again(cache, torch.bfloat16, weight, E4M3, "fp32"),
        "swiglu plain": lambda: swiglu.forward(h, torch.bfloat16, weight),
        "swiglu backward": lambda: swiglu.backward(h, x, torch.bfloat16, weight),
        "swiglu backward cast": lambda: swiglu.backward_cast(cache, x, weight, E4M3, "fp32"),
        "rope": lambda: rope.forward(q, kv, k_rope, table, table),
        "rope backward": lambda: rope.backward(q, q, v, table, table),
        "rope backward cast": lambda: rope.backward_cast(q, q, v, table, table, cast, cast),
    }


@pytest.mark.parametrize("cols", [2048, 7168])
@pytest.mark.parametrize("case", launches(128))
def test_nothing_spills_and_no_division_is_approximate(case: str, cols: int, compiled: list[Any], tmp_path: Path) -> None:
    launches(cols)[case]()
    assert compiled
    for kernel in compiled:
        used = resources(kernel, tmp_path)
        # With Triton 3.6 SwiGLU's backward, which casts 32,768 values of a block, keeps three addresses on the stack.
        assert used["STACK"] <= (16 if case == "swiglu backward cast" else 0), case
        assert used["LOCAL"] == 0, case
        assert kernel.metadata.shared <= 227 * 1024, case
        assert not re.search(r"div\.(full|approx)", kernel.asm["ptx"])


def test_the_widest_norm_fits_in_shared_memory(compiled: list[Any]) -> None:
    x, gamma = torch.zeros(8, 16384).bfloat16(), torch.ones(16384)
    norm.backward(x, gamma, EPS, [x.float()] * 3, x)
    assert compiled[0].metadata.shared <= 227 * 1024


@pytest.mark.parametrize(("heads", "nope", "turned", "v_width"), [(1, 2, 2, 1), (2, 16, 8, 24)])
def test_rope_of_small_models_compiles(heads: int, nope: int, turned: int, v_width: int, compiled: list[Any]) -> None:
    """Down to blocks in which a thread has one value."""
    widths = ((heads, nope + turned), (heads, nope + v_width), (turned,))
    q, kv, k_rope = (torch.zeros(1, 128, *width).bfloat16() for width in widths)
    table = torch.zeros(1, 128, turned // 2)
    rope.forward(q, kv, k_rope, table, table)
    rope.backward_cast(q, q, kv[..., :v_width], table, table, (E4M3, "fp32"), (E4M3, "pow2"))
    assert len(compiled) == 4


@pytest.mark.parametrize("cols", [1, 24])
def test_norms_and_swiglu_of_small_models_compile(cols: int, compiled: list[Any]) -> None:
    names = [name for name in launches(cols) if "rope" not in name]
    for name in names:
        launches(cols)[name]()
    assert len(compiled) >= len(names)


def test_a_fused_swiglu_is_counted_without_a_change_of_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's casts count nothing; what the reference counts, and nothing else of it, is taken."""

    class Kernels:
        @staticmethod
        def forward_cast(*arguments: Any) -> Any:
            with cast_meter.uncounted():
                cache, act = swiglu_reference.forward_cast(*arguments)
            return cache, dataclasses.replace(act, codes=torch.full_like(act.codes.view(torch.uint8), 9).view(act.codes.dtype))

    h = torch.randn(128, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    h[:, :64] *= 1e-9
    arguments = (h, torch.ones(128), "fp32", True, E4M3, "fp32")
    with cast_meter.measure_casts() as want:
        swiglu_reference.forward_cast(*arguments)
    monkeypatch.setattr(elementwise, "choose_swiglu", lambda *_: Choice("triton", "pretended"))
    for room in (backend, elementwise):
        monkeypatch.setattr(room, "triton_kernels", lambda _: Kernels)
    with cast_meter.measure_casts() as meter:
        _, act = elementwise.swiglu_forward_cast(*arguments)
    assert set(act.codes.view(torch.uint8).unique().tolist()) == {9}
    assert meter.counts() == want.counts()
    assert meter.counts().flushed > 0


def draw(rows: int, cols: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator) * torch.exp(2 * torch.randn(rows, 1, generator=generator))
    x[1] = 0
    return x.bfloat16().cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [128, 200, 512, 576, 1024, 1408, 2048, 4096, 7168])
@pytest.mark.parametrize("rows", [5, 300])
def test_on_a_gpu_norms_cast_their_bf16_result_to_the_bit(rows: int, cols: int) -> None:
    x, gamma, dy, rail = draw(rows, cols), 1 + 0.1 * torch.randn(cols, device="cuda"), draw(rows, cols, 1), draw(rows, cols, 2)
    y, cast = norm.forward_cast(x, gamma, EPS, E4M3, "fp32", True)
    assert y is not None
    check(cast, quantize(y, E4M3, ROW_128))
    check(norm.forward_cast(x, gamma, EPS, E4M3, "fp32", False)[1], cast)
    assert torch.equal(norm.forward(x, gamma, EPS), y)
    assert (y != norm_reference.forward(x, gamma, EPS)).float().mean() < 0.005
    dx, dgamma = norm.backward(x, gamma, EPS, [dy, dy.float()], rail)
    want, dgamma_want = norm_reference.backward(x, gamma, EPS, [dy, dy.float()], rail)
    assert (dx != want).float().mean() < 0.01
    assert torch.allclose(dgamma, dgamma_want, rtol=1e-4, atol=1e-5 * float(dgamma_want.abs().max()))
    by_row, by_column, _ = norm.backward_cast(x, gamma, EPS, dy, None, E4M3, "pow2")
    dx = norm.backward(x, gamma, EPS, [dy], None)[0]
    check(by_row, quantize(dx, E4M3, ROW_128, "pow2"))
    check(by_column, quantize(dx, E4M3, COLUMN_128, "pow2"))


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "cols"), [(5, 200), (130, 576), (257, 1408), (1024, 2048)])
def test_on_a_gpu_swiglu_equals_the_reference_to_the_bit(rows: int, cols: int) -> None:
    h, dout, weight = draw(rows, 2 * cols), draw(rows, cols, 1), torch.rand(rows, device="cuda")
    h[0, 0] = -1e4
    got, want = (k.forward_cast(h, weight, "fp32", True, E4M3, "fp32") for k in (swiglu, swiglu_reference))
    check(got[0], want[0])
    check(got[1], want[1])
    got, want = (k.backward_cast(got[0], dout, weight, E4M3, "fp32") for k in (swiglu, swiglu_reference))
    check(got[0], want[0])
    check(got[1], want[1])
    assert torch.allclose(got[2], want[2], rtol=1e-4, atol=1e-5 * float(want[2].abs().max()))
    for given in (h, swiglu_reference.cast_input(h, "fp32")):
        values = values_of(given)
        assert torch.equal(swiglu.forward(given, h.dtype, weight), swiglu_reference.forward(values, h.dtype, weight))
        (dh, dweight), (dh_want, dweight_want) = (
            swiglu.backward(given, dout, h.dtype, weight), swiglu_reference.backward(values, dout, h.dtype, weight)
        )  # fmt: skip
        assert torch.equal(dh, dh_want)
        assert torch.allclose(dweight, dweight_want, rtol=1e-4, atol=1e-5 * float(dweight_want.abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(2, 70, 5), (2, 256, 4)], ids=["cut blocks", "whole blocks"])
def test_on_a_gpu_rope_equals_the_reference_to_the_bit(size: tuple[int, int, int]) -> None:
    """size: windows, tokens of each, heads."""
    tokens = size[:2]
    q, kv, k_rope = (torch.randn(s, device="cuda").bfloat16() for s in ((*size, 192), (*size, 256), (*tokens, 64)))
    angles, dv = torch.randn(1, tokens[1], 32, device="cuda"), torch.randn(*size, 128, device="cuda").bfloat16()
    tables, cast = (angles.cos(), angles.sin()), (E4M3, "fp32")
    for got, want in zip(*(k.forward(q, kv, k_rope, *tables) for k in (rope, rope_reference)), strict=True):
        assert torch.equal(got, want)
    got, want = (k.backward(q, q, dv, *tables) for k in (rope, rope_reference))
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    assert (got[2] != want[2]).float().mean() < 0.005
    ours, theirs = (k.backward_cast(q, q, dv, *tables, cast, cast) for k in (rope, rope_reference))
    for i in range(2):
        check(ours[i][0], theirs[i][0])
        check(ours[i][1], theirs[i][1])
    assert (ours[2] != theirs[2]).float().mean() < 0.005


def test_fused_kernels_in_the_interpreter() -> None:
    run_interpreted("interpreted_elementwise.py")
