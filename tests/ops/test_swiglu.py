"""SwiGLU and the quantize box before it."""

import emulation
import pytest
import torch
from support import recipe, relative
from torch import Tensor

from dsv3fp8.kernels.swiglu.reference import backward as swiglu_backward
from dsv3fp8.kernels.swiglu.reference import forward as swiglu_forward
from dsv3fp8.ops.quantizers import LinearQuantizers
from dsv3fp8.ops.stash import Activation
from dsv3fp8.ops.swiglu import swiglu


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_gate_half_comes_first() -> None:
    """S01."""
    h = torch.tensor([[1.0, -1.0, 2.0, 3.0]])  # gate, gate, up, up
    assert torch.allclose(swiglu_forward(h, torch.float32), torch.tensor([[1.4621, -0.8068]]), atol=1e-4)


@pytest.mark.parametrize("weighted", [False, True])
def test_backward_equals_autograd_of_the_formula(weighted: bool) -> None:
    h, grad = draw(7, 20).requires_grad_(), draw(7, 10, seed=1)
    weight = draw(7, seed=2).requires_grad_() if weighted else None
    gate, up = h[:, :10], h[:, 10:]
    want = gate / (1 + torch.exp(-gate)) * up * (1 if weight is None else weight[:, None])
    assert torch.allclose(swiglu_forward(h, torch.float64, weight), want, rtol=1e-12)
    dh, dweight = swiglu_backward(h, grad, torch.float64, weight)
    inputs = [h] if weight is None else [h, weight]
    expected = torch.autograd.grad(want, inputs, grad)
    assert torch.allclose(dh, expected[0], rtol=1e-10)
    if weight is not None:
        assert dweight is not None
        assert torch.allclose(dweight, expected[1], rtol=1e-10)


def test_extreme_gates_stay_finite() -> None:
    h = torch.tensor([[-1e4, 1e4, -88.0, 88.0, 1.0, 1.0, 1.0, 1.0]])
    dh, _ = swiglu_backward(h, torch.ones(1, 4), torch.float32)
    assert torch.isfinite(swiglu_forward(h, torch.float32)).all()
    assert torch.isfinite(dh).all()


def run(*overrides: str, name: str = "dsv3") -> tuple[Activation, Tensor, Tensor, list[Tensor]]:
    """(what the down projection gets, h, dh for a fixed gradient, what was saved)."""
    given = recipe(name, *overrides)
    h = (draw(20, 2 * 200) * 3).bfloat16().requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        out = swiglu(h, given, LinearQuantizers(given, "down"))
    out.edge.backward(draw(20, 200, seed=1).bfloat16())
    assert h.grad is not None
    return out, h.detach(), h.grad, saved


@pytest.mark.parametrize("source", ["cache", "bf16"])
def test_forward_reads_h_as_the_recipe_says_and_backward_its_e4m3_cache(source: str) -> None:
    """Halves tiled on their own, fp32 scales; straight-through."""
    out, h, dh, saved = run(f"swiglu_input={source}")
    cached = torch.from_numpy(emulation.quantize(h, "e4m3", (1, 128), "fp32", col_parts=2).values)
    gate, up = (cached if source == "cache" else h.float()).double().chunk(2, -1)
    activation = (gate * torch.sigmoid(gate) * up).bfloat16()
    want = emulation.quantize(activation, "e4m3", (1, 128), "fp32")
    differing = out.operand.decode() != torch.from_numpy(want.values)
    assert differing.float().mean() < 0.01  # fp32 silu may fall on the other side of a BF16 tie
    expected, _ = swiglu_backward(cached.double(), draw(20, 200, seed=1).bfloat16().double(), torch.float64)
    assert relative(dh.double(), expected) < 2.0**-8
    assert [t.dtype for t in saved] == [torch.float8_e4m3fn, torch.float32]


def test_a_kept_output_and_a_recomputed_one_have_the_same_bits() -> None:
    recomputed, kept = run()[0], run("swiglu_output=keep")[0]
    a, b = recomputed.stash.restore(recomputed.stash.tensors), kept.stash.restore(kept.stash.tensors)
    assert torch.equal(a.codes.view(torch.uint8), b.codes.view(torch.uint8))
    assert torch.equal(a.scale, b.scale)
    assert [t.shape[-1] for t in recomputed.stash.tensors] == [400, 4]  # the input's codes and scales
    assert [t.shape[-1] for t in kept.stash.tensors] == [200, 2]


def test_the_output_is_recomputed_from_the_cache_also_where_forward_read_h_itself() -> None:
    """swiglu_output says what is kept, whatever swiglu_input says."""
    through_cache, from_h = run()[0], run("swiglu_input=bf16")[0]
    a, b = (out.stash.restore(out.stash.tensors) for out in (through_cache, from_h))
    assert torch.equal(a.codes.view(torch.uint8), b.codes.view(torch.uint8))
    assert not torch.equal(from_h.operand.codes.view(torch.uint8), b.codes.view(torch.uint8))
    kept = run("swiglu_input=bf16", "swiglu_output=keep")[0]
    assert kept.stash.tensors[0] is kept.operand.codes


def test_a_bf16_cache_keeps_h_itself() -> None:
    out, h, dh, saved = run(name="bf16_cache")
    assert [(t.dtype, t.shape) for t in saved] == [(torch.bfloat16, h.shape)]
    expected, _ = swiglu_backward(h.double(), draw(20, 200, seed=1).bfloat16().double(), torch.float64)
    assert relative(dh.double(), expected) < 2.0**-8
    assert out.operand.codes.dtype == torch.float8_e4m3fn
