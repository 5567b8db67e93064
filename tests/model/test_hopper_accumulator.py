"""Training on the tensor core's own sums: every recipe takes a step, and every GEMM of it is the emulator's, to the bit."""

from typing import Any

import emulation
import ml_dtypes
import numpy as np
import pytest
import tensor_core
import torch
from support import RECIPES, build, gradients, nano, recipe, windows
from torch import Tensor

from dsv3fp8.kernels.gemm import emulated
from dsv3fp8.model.linear import Linear
from dsv3fp8.ops.stash import Activation
from dsv3fp8.precision import accumulator
from dsv3fp8.precision.recipe import Recipe
from dsv3fp8.precision.tiles import QuantizedTensor

QUANTIZED = [name for name in RECIPES if recipe(name).quantizes]
# Halves of 72 put tiles that are cut in dgrad's K; every token goes to every expert: recipes choose no other ones.
CONFIG = nano(experts=4, top_k=4, dim=128, ffn=192, expert_ffn=72, kv_latent=64, q_latent=96)
BATCH = windows(CONFIG, batch=2, length=40)


@pytest.mark.parametrize("name", QUANTIZED)
def test_every_gemm_of_a_step_is_the_emulators(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense and grouped, forward and backward; the torch definition is asked again what each should have been."""
    seen = []
    compute = emulated.matmul_nt

    def recorded(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, every: int | str) -> Tensor:
        out = compute(a, b, out_dtype, every)
        assert torch.equal(out, accumulator.block_scaled(a, b, every).to(out_dtype))
        seen.append((a.tile.cols, b.tile.cols, every))
        return out

    monkeypatch.setattr(emulated, "matmul_nt", recorded)
    given = recipe(name, "accumulator=hopper")
    got = gradients(build(CONFIG, given), [BATCH])
    assert all(torch.isfinite(g).all() and g.abs().max() > 0 for g in got.values())
    # Forward, dgrad, wgrad of 5 attention linears a layer (3 layers with MTP's), 2 dense, 2 shared and 2 x 4 routed ones.
    assert len(seen) == 3 * (3 * 5 + 2 + 2 * 2 + 2 * 2 * 4)
    tiled = given.roles["input"].tile == "1x128"
    assert {width for cols_a, cols_b, _ in seen for width in (cols_a, cols_b)} == ({128} if tiled else {None})
    assert {every for *_, every in seen} == {given.promote_every}


def test_the_accumulator_and_the_interval_change_a_step_and_the_same_seed_gives_the_same_bits() -> None:
    words = [
        ("dsv3",), ("dsv3", "accumulator=hopper"), ("dsv3", "accumulator=hopper", "promote_every=32"),
        ("rowwise", "accumulator=hopper"), ("rowwise", "accumulator=hopper", "promote_every=256"), ("no_promotion",),
    ]  # fmt: skip
    long = windows(CONFIG, batch=8, length=40)  # wgrad sums over 320 tokens
    steps = [gradients(build(CONFIG, recipe(*given)), [long]) for given in words]
    for number, one in enumerate(steps):
        for other in steps[:number]:
            assert any(not torch.equal(one[key], other[key]) for key in one)
    again = gradients(build(CONFIG, recipe(*words[-1])), [long])
    assert all(torch.equal(again[key], steps[-1][key]) for key in again)


def quantized(x: Tensor, tile: tuple[int | None, int | None], fmt: str = "e4m3") -> tuple[np.ndarray, np.ndarray]:
    """Raw codes, and scales per element, by the tests' own quantizer."""
    made = emulation.quantize(x, fmt, tile, "fp32")
    dtype = ml_dtypes.float8_e4m3fn if fmt == "e4m3" else ml_dtypes.float8_e5m2
    return made.codes.astype(dtype).view(np.uint8), made.scale


def linear_step(given: Recipe, x: Tensor, weight: Tensor, dy: Tensor) -> dict[str, Tensor]:
    layer = Linear(given, "q_b", weight.shape[1], weight.shape[0])
    with torch.no_grad():
        layer.weight.copy_(weight)
    edge = torch.zeros(x.shape, dtype=x.dtype, requires_grad=True)
    y = layer(Activation(edge, layer.quantizers.quantize("input", x, 1)))
    y.backward(dy)
    assert edge.grad is not None
    assert layer.weight.grad is not None
    return {"y": y.detach(), "dx": edge.grad, "dw": layer.weight.grad}


@pytest.mark.parametrize("every", [32, 128])
@pytest.mark.parametrize("gradient", ["e4m3", "e5m2"])
def test_a_linears_three_products_are_those_of_exact_arithmetic(every: int, gradient: str) -> None:
    """From the contract alone: quantizer and sums are the tests' own. A sample of rows and columns."""
    generator = torch.Generator().manual_seed(0)
    tokens, inside, out = 200, 150, 140
    x, dy = (torch.randn(tokens, width, generator=generator).bfloat16() for width in (inside, out))
    weight = torch.randn(out, inside, generator=generator)
    words = ("accumulator=hopper", f"promote_every={every}", f"roles.gradient.format={gradient}")
    got = linear_step(recipe("dsv3", *words), x, weight, dy)

    qx, sx = quantized(x, (1, 128))
    qw, sw = quantized(weight, (128, 128))
    qdy, sdy = quantized(dy, (1, 128), gradient)
    qdyt, sdyt = quantized(dy, (128, 1), gradient)
    qxt, sxt = quantized(torch.from_numpy(emulation.quantize(x, "e4m3", (1, 128), "fp32").values), (128, 1))
    products: dict[str, tuple[Any, ...]] = {
        "y": (qx, qw, sx, sw, False, "e4m3"),
        "dx": (qdy, qw.T, sdy, sw.T, False, gradient),
        "dw": (qdyt.T, qxt.T, sdyt.T, sxt.T, True, gradient),
    }
    for name, (a, b, s_a, s_b, one_by_one, fmt) in products.items():
        rows, cols = [0, 3, a.shape[0] - 1], [0, 129, b.shape[0] - 1]
        scales = (np.ascontiguousarray(s[pick][:, ::128]) for s, pick in ((s_a, rows), (s_b, cols)))
        want = torch.from_numpy(tensor_core.block_scaled(a[rows], b[cols], *scales, every, one_by_one, 1, (fmt, "e4m3")))
        assert torch.equal(got[name][rows][:, cols], want.to(got[name].dtype)), name


def test_the_manifest_says_what_sums_and_that_it_is_to_the_bit() -> None:
    manifest = build(nano(), recipe("no_promotion")).manifest()
    rows = {row["op"]: row for row in manifest["backends"]}
    assert manifest["accumulator"] == "hopper"
    assert manifest["linears"]["out"]["promote_every"] == "never"
    for gemm in ("fprop", "dgrad", "wgrad"):
        assert rows[f"out.{gemm}"]["backend"] == "emulated"
        assert rows[f"out.{gemm}"]["exact"]
        assert "never promoted" in rows[f"out.{gemm}"]["reason"]
    plain = {row["op"]: row for row in build(nano(), recipe("dsv3")).manifest()["backends"]}
    assert not plain["out.fprop"]["exact"]
