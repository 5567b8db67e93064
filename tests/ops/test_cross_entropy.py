"""Cross-entropy in chunks against F.cross_entropy in float64, gradients of every shape of use, and its memory."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import relative
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsv3fp8.ops import cross_entropy as module
from dsv3fp8.ops.cross_entropy import IGNORED, cross_entropy, head_logits
from dsv3fp8.ops.embedding import embedding
from dsv3fp8.ops.quantizers import LinearQuantizers
from dsv3fp8.ops.weights import WeightCodes
from dsv3fp8.precision.recipe import Recipe

TOKENS, DIM, VOCABULARY = 13, 8, 15


def case(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, head weight, targets of which the first and one more are ignored."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, DIM, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, DIM, generator=generator, dtype=torch.float64)
    weight = weight.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    targets[[0, 7]] = IGNORED
    return hidden, weight, targets


def codes(compute: str) -> WeightCodes:
    return WeightCodes(LinearQuantizers(Recipe(name="plain", compute=compute), "head"))


def ours(hidden: Tensor, weight: Tensor, targets: Tensor, compute: str = "fp32") -> Tensor:
    return cross_entropy(hidden, hidden, weight, targets, codes(compute))


@pytest.fixture(params=[2**24, 4 * VOCABULARY, 1], ids=["one chunk", "chunks of four", "one row at a time"])
def chunked(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_VALUES", request.param)


USES = {
    "sum (L08: an expanded gradient)": lambda loss: loss.sum(),
    "weights per token (L06)": lambda loss: (loss * torch.linspace(-1, 2, TOKENS, dtype=loss.dtype)).sum(),
    "every second token (L08)": lambda loss: loss[::2].sum(),
    "square": lambda loss: (loss * loss).sum(),
    "some tokens masked out": lambda loss: torch.where(torch.arange(TOKENS) % 3 == 0, loss, 0).sum(),
}


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("use", USES)
def test_loss_and_gradients_equal_those_of_torch(use: str) -> None:
    hidden, weight, targets = case()
    got = ours(hidden, weight, targets)
    want = F.cross_entropy(hidden @ weight.mT, targets, ignore_index=IGNORED, reduction="none")
    assert torch.allclose(got, want, rtol=1e-12)
    assert torch.count_nonzero(got[[0, 7]]) == 0
    gradients = torch.autograd.grad(USES[use](got), [hidden, weight])
    for mine, expected in zip(gradients, torch.autograd.grad(USES[use](want), [hidden, weight]), strict=True):
        assert torch.allclose(mine, expected, rtol=1e-9, atol=1e-12)


def test_a_loss_per_token_of_any_shape_may_be_summed() -> None:
    """L08: (64, 2) then .sum(), whose gradient has strides (0, 0)."""
    hidden, weight, _ = case()
    hidden = hidden.detach().repeat(10, 1)[:128].requires_grad_()
    targets = torch.arange(128) % VOCABULARY
    got = torch.autograd.grad(ours(hidden, weight, targets).view(64, 2).sum(), [hidden, weight])
    want = torch.autograd.grad(F.cross_entropy(hidden @ weight.mT, targets, reduction="sum"), [hidden, weight])
    for mine, expected in zip(got, want, strict=True):
        assert torch.allclose(mine, expected, rtol=1e-9, atol=1e-12)


def test_nothing_valid_contributes_nothing() -> None:
    """L01: all ignored, and no tokens at all."""
    hidden, weight, targets = case()
    for rows in (TOKENS, 0):
        part = hidden.detach()[:rows].requires_grad_()
        loss = ours(part, weight, torch.full_like(targets[:rows], IGNORED)).sum()
        gradients = torch.autograd.grad(loss, [part, weight])
        assert float(loss.detach()) == 0.0
        assert all(torch.equal(g, torch.zeros_like(g)) for g in gradients)


def test_extreme_logits_stay_finite() -> None:
    hidden, weight = torch.tensor([[1e4], [-1e4]]).requires_grad_(), torch.tensor([[1.0], [-1.0]]).requires_grad_()
    loss = ours(hidden, weight, torch.tensor([1, 1]))
    assert loss.tolist() == [2e4, 0.0]
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(loss.sum(), [hidden, weight]))


def test_neither_pass_writes_into_what_it_was_given() -> None:
    """L07: logits read after the loss are what they were before."""
    hidden, weight, targets = case(torch.float32)
    before = [t.detach().clone() for t in (hidden, weight, targets)]
    logits = head_logits(hidden.detach(), weight, codes("fp32"))
    loss = ours(hidden, weight, targets)
    grad = torch.ones_like(loss)
    loss.backward(grad)
    assert all(torch.equal(a, b) for a, b in zip(before, (hidden, weight, targets), strict=True))
    assert torch.equal(grad, torch.ones_like(loss))
    assert torch.equal(head_logits(hidden.detach(), weight, codes("fp32")), logits)


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation returned."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


def test_all_logits_never_exist_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward hold chunks of logits only, and sum the head's gradient in FP32."""
    tokens, vocabulary, dim = 400, 500, 8
    monkeypatch.setattr(module, "CHUNK_VALUES", 16 * vocabulary)
    hidden = torch.randn(tokens, dim).bfloat16().requires_grad_()
    weight = torch.randn(vocabulary, dim).requires_grad_()
    with LargestTensor() as seen:
        ours(hidden, weight, torch.arange(tokens), "bf16").sum().backward()
    assert seen.largest == 16 * vocabulary
    assert weight.grad.dtype == torch.float32


def test_in_bf16_the_loss_is_fp32() -> None:
    hidden, weight, targets = case(torch.bfloat16)
    loss = ours(hidden, weight, targets, "bf16")
    logits = hidden.double() @ weight.bfloat16().double().mT
    want = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
    assert loss.dtype == torch.float32
    assert torch.allclose(loss.double(), want, rtol=1e-5)
    got = torch.autograd.grad(loss.sum(), [hidden, weight])
    for mine, expected in zip(got, torch.autograd.grad(want.sum(), [hidden, weight]), strict=True):
        assert relative(mine.double(), expected.double()) < 2.0**-7


def test_embedding_gradients_of_a_repeated_token_sum_in_fp32() -> None:
    """512 gradients of one in BF16 would sum to 256."""
    weight = torch.randn(4, 2).requires_grad_()
    out = embedding(torch.full((512,), 3), weight, "bf16")
    assert torch.equal(out[0], weight[3].bfloat16())
    out.sum().backward()
    assert weight.grad[3].tolist() == [512.0, 512.0]
    assert torch.count_nonzero(weight.grad[:3]) == 0
