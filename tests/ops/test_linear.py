"""The linear box against a float64 emulation of its quantized chain, and the life of its weight codes."""

from dataclasses import dataclass

import emulation
import numpy as np
import pytest
import torch
from emulation import bf16, matmul
from numpy.typing import NDArray
from support import recipe
from torch import Tensor

from dsv3fp8.model.linear import Linear
from dsv3fp8.ops.linear import linear
from dsv3fp8.ops.quantizers import LinearQuantizers
from dsv3fp8.ops.stash import Activation
from dsv3fp8.ops.weights import WeightCodes
from dsv3fp8.precision.recipe import Recipe

Tile = tuple[int | None, int | None]


@dataclass(frozen=True)
class Chain:
    """A recipe's row of the contract's table: tiles along fprop's and dgrad's K, their wgrad counterparts, formats, kind."""

    input: Tile = (1, 128)
    weight: Tile = (128, 128)
    gradient: Tile = (1, 128)
    weight_dgrad: Tile | None = None  # None: the same codes, transposed
    input_wgrad: Tile | None = (128, 1)
    gradient_wgrad: Tile | None = (128, 1)
    gradient_format: str = "e4m3"
    kind: str = "fp32"


ROW, COLUMN, ALL = (1, None), (None, 1), (None, None)
CHAINS = {
    "dsv3": Chain(),
    "dsv3_pow2": Chain(kind="pow2"),
    "hybrid": Chain(gradient_format="e5m2"),
    "blockwise_grad": Chain(gradient=(128, 128), gradient_wgrad=None),
    "rowwise": Chain(ROW, ROW, ROW, weight_dgrad=COLUMN, input_wgrad=COLUMN, gradient_wgrad=COLUMN),
    "tensorwise": Chain(ALL, ALL, ALL, input_wgrad=None, gradient_wgrad=None),
}
SHAPES = [(130, 200, 144), (129, 576, 72), (3, 100, 200), (257, 130, 2), (1, 1, 1)]  # tokens, in, out


def operands(tokens: int, inside: int, out: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x and dY in BF16 whose tokens differ in size, and an FP32 master."""
    generator = torch.Generator().manual_seed(seed)

    def spread(rows: int, cols: int) -> Tensor:
        return torch.randn(rows, cols, generator=generator) * torch.exp(2 * torch.randn(rows, 1, generator=generator))

    return spread(tokens, inside).bfloat16(), spread(out, inside) * 0.1, (spread(tokens, out) * 1e-6).bfloat16()


def run(
    given: Recipe, op: str, x: Tensor, weight: Tensor, dy: Tensor, residual: Tensor | None = None, parts: int = 1,
    wide: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(y, dx, dw) of the box."""
    quantizers = LinearQuantizers(given, op)
    edge = torch.zeros(x.shape, dtype=torch.float32 if wide else x.dtype, requires_grad=True)
    master = weight.clone().requires_grad_()
    activation = Activation(edge, quantizers.quantize("input", x, 1))
    codes = WeightCodes(quantizers, row_parts=parts)
    y = linear(activation, master, quantizers, codes, residual=residual, out_parts=parts)
    y.backward(dy)
    assert edge.grad is not None
    assert master.grad is not None
    return y.detach(), edge.grad, master.grad


def assert_close(got: Tensor, a: NDArray[np.float32], b: NDArray[np.float32], rounded: bool) -> None:
    """got == a @ b, element by element, but for the rounding of fp32 sums and, if asked, of one BF16 rounding."""
    want, mass = matmul(a, b), matmul(np.abs(a), np.abs(b))
    allowed = 1e-6 * mass + (2.0**-8 * np.abs(want) if rounded else 0)
    assert (np.abs(got.double().numpy() - want) <= allowed).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CHAINS)
def test_all_three_gemms_are_those_of_the_quantized_chain(name: str, shape: tuple[int, int, int]) -> None:
    """G03: odd sizes too. Weight gradients are FP32 and unrounded; a wgrad operand is re-tiled from the fprop codes."""
    chain = CHAINS[name]
    x, weight, dy = operands(*shape)
    y, dx, dw = run(recipe(name), "q_b", x, weight, dy)
    assert (y.dtype, dx.dtype, dw.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)

    xq = emulation.quantize(x, "e4m3", chain.input, chain.kind).values
    wq = emulation.quantize(weight, "e4m3", chain.weight, chain.kind).values
    assert_close(y, xq, wq.T, rounded=True)
    gq = emulation.quantize(dy, chain.gradient_format, chain.gradient, chain.kind).values
    wd = wq if chain.weight_dgrad is None else emulation.quantize(weight, "e4m3", chain.weight_dgrad, chain.kind).values
    assert_close(dx, gq, wd, rounded=True)
    gt, xt = gq, xq
    if chain.gradient_wgrad:
        gt = emulation.quantize(dy, chain.gradient_format, chain.gradient_wgrad, chain.kind).values
    if chain.input_wgrad:
        xt = emulation.quantize(xq, "e4m3", chain.input_wgrad, chain.kind).values
    assert_close(dw, gt.T, xt, rounded=False)


@pytest.mark.parametrize("name", ["dsv3", "hybrid", "blockwise_grad", "rowwise"])
def test_halves_of_a_fused_projection_are_tiled_on_their_own(name: str) -> None:
    """Gate and up rows of the weight, gate and up columns of dY; a scale over all of K is not cut."""
    chain = CHAINS[name]
    x, weight, dy = operands(140, 200, 2 * 72)
    y, dx, dw = run(recipe(name, "ops.gate_up.input.scale=fp32"), "gate_up", x, weight, dy, parts=2)
    xq = emulation.quantize(x, "e4m3", chain.input, "fp32").values
    wq = emulation.quantize(weight, "e4m3", chain.weight, "fp32", row_parts=2).values
    assert_close(y, xq, wq.T, rounded=True)
    gq = emulation.quantize(dy, chain.gradient_format, chain.gradient, "fp32", col_parts=2).values
    wd = wq if chain.weight_dgrad is None else emulation.quantize(weight, "e4m3", chain.weight_dgrad, "fp32").values
    assert_close(dx, gq, wd, rounded=True)
    gt = gq
    if chain.gradient_wgrad:
        gt = emulation.quantize(dy, chain.gradient_format, chain.gradient_wgrad, "fp32", col_parts=2).values
    assert chain.input_wgrad is not None
    assert_close(dw, gt.T, emulation.quantize(xq, "e4m3", chain.input_wgrad, "fp32").values, rounded=False)


def test_dgrad_reads_the_transposed_scale_grid() -> None:
    """G06: tile sizes [[1, 10], [100, 1000]] on a square weight, where a wrong orientation has the right shape."""
    sizes = torch.tensor([[1.0, 10.0], [100.0, 1000.0]]).repeat_interleave(128, 0).repeat_interleave(128, 1)
    x, weight, dy = operands(64, 256, 256)
    weight = torch.sign(weight) * sizes
    _, dx, _ = run(recipe("dsv3"), "q_b", x, weight, dy)
    assert_close(dx, emulation.quantize(dy, "e4m3", (1, 128), "fp32").values, weight.numpy(), rounded=True)


def test_a_residual_is_added_in_fp32_before_the_one_rounding() -> None:
    x, weight, dy = operands(64, 200, 96)
    residual = (torch.randn(64, 96) * 50).bfloat16().requires_grad_()
    y, _, _ = run(recipe("dsv3"), "out", x, weight, dy, residual=residual)
    exact = (
        matmul(
            emulation.quantize(x, "e4m3", (1, 128), "pow2").values,
            emulation.quantize(weight, "e4m3", (128, 128), "fp32").values.T,
        )
        + residual.detach().double().numpy()
    )
    assert torch.equal(y, torch.from_numpy(bf16(exact)).bfloat16())
    assert torch.equal(residual.grad, dy)


def test_an_fp32_edge_gets_an_unrounded_gradient() -> None:
    """Where it is summed with others before the one rounding: q_a and kv_a."""
    x, weight, dy = operands(64, 200, 96)
    _, dx, _ = run(recipe("dsv3"), "q_a", x, weight, dy, wide=True)
    assert dx.dtype == torch.float32
    gq, wq = emulation.quantize(dy, "e4m3", (1, 128), "fp32"), emulation.quantize(weight, "e4m3", (128, 128), "fp32")
    assert_close(dx, gq.values, wq.values, rounded=False)


@pytest.mark.parametrize("name", [*CHAINS, "delayed", "static", "bf16", "fp32"])
def test_no_tokens_give_empty_outputs_and_exact_zero_weight_gradients(name: str) -> None:
    """Q14, R02."""
    x, weight, dy = operands(0, 200, 96)
    dtype = torch.float32 if name == "fp32" else torch.bfloat16
    y, dx, dw = run(recipe(name), "q_b", x.to(dtype), weight, dy.to(dtype))
    assert (y.shape, dx.shape) == ((0, 96), (0, 200))
    assert torch.equal(dw, torch.zeros(96, 200))


@pytest.mark.parametrize("name", [*CHAINS, "delayed", "static"])
def test_zeros_stay_exact_zeros(name: str) -> None:
    """Q01: a weight that is zero but for one element, and dY of zero."""
    x, weight, dy = operands(64, 200, 96)
    weight = torch.zeros_like(weight)
    weight[0, 0] = 1
    y, dx, dw = run(recipe(name), "q_b", x, weight, torch.zeros_like(dy))
    assert torch.count_nonzero(y[:, 1:]) == 0
    assert torch.isfinite(y).all()
    assert torch.equal(dx, torch.zeros_like(dx))
    assert torch.equal(dw, torch.zeros_like(dw))


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_poisoned_token_shows_in_its_output_and_in_the_weight_gradient(name: str, poison: float) -> None:
    """Q05: what is not finite is never hidden as a saturated 448."""
    x, weight, dy = operands(64, 200, 96)
    x[5, 7] = poison
    y, _, dw = run(recipe(name), "q_b", x, weight, dy)
    assert not torch.isfinite(y[5]).any()
    assert not torch.isfinite(dw[:, 7]).any()
    _, dx, _ = run(recipe(name), "q_b", x.nan_to_num(), weight, torch.where(torch.arange(64)[:, None] == 5, poison, dy))
    assert not torch.isfinite(dx[5]).any()


def test_what_is_kept_is_float8_codes_with_scales_and_nothing_else() -> None:
    x, weight, dy = operands(130, 256, 96)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        run(recipe("dsv3"), "q_b", x, weight, dy)
    kept = [(t.dtype, tuple(t.shape)) for t in saved if t.shape != weight.shape]
    assert kept == [(torch.float8_e4m3fn, (130, 256)), (torch.float32, (130, 2))]


def make_linear(name: str = "dsv3") -> Linear:
    layer = Linear(recipe(name), "q_b", 256, 128)
    torch.nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(0))
    return layer


def output_and_dx(layer: Linear) -> tuple[Tensor, Tensor]:
    x, _, dy = operands(4, 256, 128)
    edge = torch.zeros(4, 256, dtype=torch.bfloat16, requires_grad=True)
    y = layer(Activation(edge, layer.quantizers.quantize("input", x, 1)))
    y.backward(dy)
    assert edge.grad is not None
    return y.detach(), edge.grad


def replace_by_optimizer(layer: Linear, new: Tensor) -> None:
    layer.weight.grad = layer.weight.detach() - new
    torch.optim.SGD(layer.parameters(), lr=1.0).step()


def replace_by_load(layer: Linear, new: Tensor) -> None:
    layer.load_state_dict({"weight": new})


def replace_by_assignment(layer: Linear, new: Tensor) -> None:
    layer.weight.data = new.clone()


@pytest.mark.parametrize("change", [replace_by_optimizer, replace_by_load, replace_by_assignment])
@pytest.mark.parametrize("name", ["dsv3", "rowwise", "bf16"])
def test_no_code_is_older_than_its_master(change: object, name: str) -> None:
    """O05, Q16: forward and dgrad after a step or a load read the new weights, in both orientations."""
    layer, fresh = make_linear(name), make_linear(name)
    before, _ = output_and_dx(layer)
    new = torch.randn(128, 256, generator=torch.Generator().manual_seed(1))
    change(layer, new)  # type: ignore[operator]
    fresh.load_state_dict({"weight": layer.weight.detach()})
    got, want = output_and_dx(layer), output_and_dx(fresh)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    assert not torch.equal(got[0], before)


def test_codes_are_made_once_for_all_micro_batches_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """O05: and give the same bits as codes made each time."""
    layer, made = make_linear(), []
    quantize = layer.quantizers.quantize

    def counted(role: str, *args: object, **kwargs: object) -> object:
        made.append(role)
        return quantize(role, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(layer.quantizers, "quantize", counted)
    results = [output_and_dx(layer) for _ in range(3)]
    assert made.count("weight") == 1
    layer.codes.invalidate()
    again = output_and_dx(layer)
    assert made.count("weight") == 2
    for y, dx in results:
        assert torch.equal(y, again[0])
        assert torch.equal(dx, again[1])


def test_weight_gradients_of_micro_batches_add_up_in_fp32() -> None:
    """O11: 512 equal micro-batches give 512 times the gradient of one, which BF16 could not hold."""
    layer = make_linear("bf16")
    x, dy = torch.ones(1, 256, dtype=torch.bfloat16), torch.ones(1, 128, dtype=torch.bfloat16)
    for _ in range(512):
        layer(Activation(torch.zeros(1, 256, dtype=torch.bfloat16, requires_grad=True), x)).backward(dy)
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32
    assert torch.equal(layer.weight.grad, torch.full((128, 256), 512.0))
