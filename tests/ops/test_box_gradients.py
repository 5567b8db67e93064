"""Backward of every box in float64, with quantization off, against autograd of the formula; the norm, RoPE, the router,
the routed experts and the head have theirs beside their other tests.
"""

from collections.abc import Callable

import pytest
import torch
from support import recipe
from torch import Tensor

from dsv3fp8.model.linear import Linear
from dsv3fp8.ops.attention import attention
from dsv3fp8.ops.embedding import embedding, join_edges
from dsv3fp8.ops.exchange import combine, dispatch, make_plan
from dsv3fp8.ops.residual import residual_sum
from dsv3fp8.ops.stash import Activation, beside, keep
from dsv3fp8.ops.swiglu import swiglu

EXACT = recipe("fp32")  # float64 masters compute in float64


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [normal(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]


def assert_same_gradients(box: Callable[..., Tensor], formula: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    """Same values and, for one random gradient of the output, same gradients of every input."""
    got, want = box(*inputs), formula(*inputs)
    assert torch.allclose(got, want, rtol=1e-12, atol=1e-13)
    dy = normal(*want.shape, seed=99)
    for ours, theirs in zip(torch.autograd.grad(got, inputs, dy), torch.autograd.grad(want, inputs, dy), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-11, atol=1e-12)


def through(op: str, x: Activation, weight: Tensor, residual: Tensor | None = None, parts: int = 1) -> Tensor:
    """The linear box of x with this master."""
    layer = Linear(EXACT, op, weight.shape[1], weight.shape[0], parts).double()
    del layer.weight
    layer.weight = weight  # a leaf of the test's
    return layer(x, residual)


@pytest.mark.parametrize("parts", [1, 2])
def test_linear(parts: int) -> None:
    def box(x: Tensor, w: Tensor) -> Tensor:
        return through("gate_up", Activation(x, x.detach()), w, parts=parts)

    assert_same_gradients(box, lambda x, w: x @ w.T, leaves((7, 12), (10, 12)))


def test_linear_with_a_residual() -> None:
    def box(x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
        return through("out", Activation(x, x.detach()), w, residual)

    assert_same_gradients(box, lambda x, w, r: x @ w.T + r, leaves((7, 12), (10, 12), (7, 10)))


def test_linear_of_two_joined_tensors() -> None:
    """Multi-token prediction's projection, which keeps the two parts and not what they were joined to."""

    def box(left: Tensor, right: Tensor, w: Tensor) -> Tensor:
        joined = torch.cat((left, right), -1).detach()
        stash = beside(keep(left.detach()), keep(right.detach()))
        return through("mtp_projection", Activation(join_edges(left, right), joined, stash), w)

    assert_same_gradients(box, lambda a, b, w: torch.cat((a, b), 1) @ w.T, leaves((7, 4), (7, 4), (5, 8)))


@pytest.mark.parametrize("output", ["recompute", "keep"])
def test_swiglu_and_the_down_projection_behind_it(output: str) -> None:
    given = recipe("fp32", f"swiglu_output={output}")

    def box(h: Tensor, w: Tensor) -> Tensor:
        layer = Linear(given, "down", w.shape[1], w.shape[0])
        return through("down", swiglu(h, given, layer.quantizers), w)

    def formula(h: Tensor, w: Tensor) -> Tensor:
        gate, up = h.chunk(2, 1)
        return (gate / (1 + torch.exp(-gate)) * up) @ w.T

    assert_same_gradients(box, formula, leaves((7, 12), (5, 6)))


DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1], [4, 4, 4, 4, 4]])


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["causal", "documents"])
def test_attention_and_the_out_projection_behind_it(documents: Tensor | None) -> None:
    """The cache is the output itself here; wgrad of the projection reads it too."""

    def box(q: Tensor, k: Tensor, v: Tensor, w: Tensor, x: Tensor) -> Tensor:
        layer = Linear(EXACT, "out", w.shape[1], w.shape[0])
        return through("out", attention(q, k, v, 0.3, documents, EXACT, layer.quantizers), w, x)

    def formula(q: Tensor, k: Tensor, v: Tensor, w: Tensor, x: Tensor) -> Tensor:
        hidden = torch.ones(5, 5, dtype=torch.bool).triu(1).expand(2, 5, 5)
        if documents is not None:
            hidden = hidden | (documents[:, :, None] != documents[:, None, :])
        scores = (torch.einsum("bihd,bjhd->bhij", q, k) * 0.3).masked_fill(hidden[:, None], -torch.inf)
        return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).reshape(10, -1) @ w.T + x

    assert_same_gradients(box, formula, leaves((2, 5, 3, 6), (2, 5, 3, 6), (2, 5, 3, 4), (8, 12), (10, 8)))


def test_the_residual_sum_and_the_embedding() -> None:
    assert_same_gradients(residual_sum, lambda x, a, b: x + a + b, leaves((5, 3), (5, 3), (5, 3)))
    ids = torch.tensor([1, 4, 1, 0])

    def formula(table: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(ids, 6).double() @ table

    assert_same_gradients(lambda table: embedding(ids, table, "fp32"), formula, leaves((6, 3)))


def test_combine_is_the_transpose_of_dispatch() -> None:
    """<dispatch(x), rows> = <x, combine(rows)>: what backward of each is the other for."""
    plan = make_plan(torch.tensor([[1, 0], [2, 1], [1, 2], [0, 2]]), 4, torch.tensor([True, True, False, True]))
    x, rows = normal(4, 3), normal(plan.rows, 3, seed=1)
    there, back = dispatch(x, plan), combine(rows, plan)
    assert isinstance(there, Tensor)
    assert torch.allclose((there * rows).sum(), (x * back).sum(), rtol=1e-12)
