"""The kernels outside the layers in Triton's interpreter: run by test_outer.py in a process of its own."""

import pytest
import torch
from interpreted_triton import _as_on_a_gpu

from dsv3fp8.config import load_config
from dsv3fp8.data import Batch
from dsv3fp8.kernels import outer
from dsv3fp8.kernels.backend import Choice
from dsv3fp8.kernels.cross_entropy import reference as cross_entropy_reference
from dsv3fp8.kernels.cross_entropy import triton as cross_entropy
from dsv3fp8.kernels.cross_entropy.reference import IGNORED
from dsv3fp8.kernels.embedding import reference as embedding_reference
from dsv3fp8.kernels.embedding import triton as embedding
from dsv3fp8.kernels.optimizer import reference as optimizer_reference
from dsv3fp8.kernels.optimizer import triton as optimizer
from dsv3fp8.training.setup import build
from dsv3fp8.training.step import train_step

__all__ = ["_as_on_a_gpu"]  # the fixture


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (5, 200), (3, 9000), (0, 10)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cross_entropy(rows: int, cols: int, dtype: torch.dtype) -> None:
    """Ignored targets, an expanded and a strided gradient, maxima that come last, logits far from zero and not finite."""
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(rows, cols, generator=generator)
    targets = torch.randint(cols, (rows,), generator=generator)
    if rows > 2:
        logits[0, -1], logits[1] = 80, logits[1] - 1e4
        targets[2] = IGNORED
    if rows > 4:
        logits[3, 7], logits[4, 11], logits[4, :3] = torch.nan, torch.inf, -torch.inf
    loss, lse = cross_entropy.forward(logits, targets)
    want_loss, want_lse = cross_entropy_reference.forward(logits, targets)
    assert torch.allclose(lse, want_lse, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert torch.allclose(loss, want_loss, rtol=1e-5, atol=1e-5, equal_nan=True)
    for dloss in (torch.ones(()).expand(rows), torch.randn(2 * rows, generator=generator)[::2]):
        got, want = (k.backward(logits, want_lse, targets, dloss, dtype) for k in (cross_entropy, cross_entropy_reference))
        assert got.dtype == want.dtype == dtype
        close = 2**-7 if dtype == torch.bfloat16 else 1e-5  # the interpreter's exp is numpy's
        assert torch.allclose(got.float(), want.float(), rtol=close, atol=1e-30, equal_nan=True)


def test_rows_of_minus_infinity_have_no_logarithm() -> None:
    """As torch.logsumexp has it: -inf, and NaN where that is taken off itself."""
    logits = torch.full((1, 5000), -torch.inf)
    assert cross_entropy.forward(logits, torch.tensor([0]))[1].tolist() == [-torch.inf]


@pytest.mark.parametrize(("vocabulary", "cols", "tokens"), [(1, 1, 1), (7, 130, 90), (40, 16, 33), (5, 8, 0), (2, 9, 401)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_embedding(vocabulary: int, cols: int, tokens: int, dtype: torch.dtype) -> None:
    """Ids that repeat often and ids that are absent; ids and gradients with strides."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(vocabulary, cols, generator=generator)
    ids = (torch.randint(vocabulary, (2 * tokens,), generator=generator) // 2)[::2]
    got, want = (k.forward(ids, weight, dtype) for k in (embedding, embedding_reference))
    assert torch.equal(got, want)
    dx = torch.randn(cols, tokens, generator=generator).to(dtype).mT
    got, want = (k.backward(ids, dx, vocabulary) for k in (embedding, embedding_reference))
    assert got.dtype == torch.float32
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)
    assert torch.equal(got == 0, want == 0)


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("beta1", [0.9, 0.25])
def test_adamw(moments: torch.dtype, beta1: float) -> None:
    """Tensors of less than a block, of whole blocks and beyond; a gradient off the 16-byte grid; clipping; a skipped step."""
    generator = torch.Generator().manual_seed(0)
    sizes, decayed = [3, 2 * optimizer._BLOCK, 2 * optimizer._BLOCK + 5], [True, False, True]

    def draw(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        return [torch.randn(size, generator=generator).to(dtype) for size in sizes]

    weights, gradients, first, second = draw(), draw(), draw(moments), [t.abs() for t in draw(moments)]
    gradients[2] = torch.cat((torch.zeros(1), gradients[2]))[1:]
    factor, lr, decay, steps, betas, eps = 0.25, 0.1, 0.5, 3, (beta1, 0.95), 1e-8
    tensors = optimizer.Tensors(sizes, decayed, torch.device("cpu"))
    root, rate = (1 - betas[1] ** steps) ** 0.5, -lr / (1 - betas[0] ** steps)
    for applied in (0.0, 1.0):
        before = [[t.clone() for t in group] for group in (weights, first, second)]
        scalars = torch.tensor([applied, factor, 1 - lr * decay, 1 / root, rate])
        optimizer.update(tensors, weights, gradients, first, second, scalars, betas, eps)
        if not applied:
            assert all(
                torch.equal(a, b)
                for new, old in zip((weights, first, second), before, strict=True)
                for a, b in zip(new, old, strict=True)
            )
    old_weights, old_first, old_second = before
    for i in range(len(sizes)):
        rates = optimizer_reference.Rates(lr, decay if decayed[i] else 0.0, betas, eps, steps)
        parts = [[t] for t in (old_weights[i], gradients[i] * factor, old_first[i], old_second[i])]
        optimizer_reference.update(*parts, rates)
        for got, want in ((weights[i], parts[0][0]), (first[i], parts[2][0]), (second[i], parts[3][0])):
            close = {"rtol": 1e-5, "atol": 1e-6} if got.dtype == torch.float32 else {"rtol": 2**-7, "atol": 0}
            torch.testing.assert_close(got, want, **close)


NANO = (
    "data=synthetic", "recipe=bf16", "model.vocab_size=64", "model.dim=16", "model.layers=2", "model.heads=1",
    "model.q_latent=8", "model.kv_latent=8", "model.head_nope=8", "model.head_rope=4", "model.head_v=8", "model.ffn=16",
    "model.expert_ffn=8", "model.experts=2", "model.top_k=1", "model.groups=1", "model.kept_groups=1",
)  # fmt: skip


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_whole_steps_with_a_skipped_one(monkeypatch: pytest.MonkeyPatch, moments: str) -> None:
    """Loss, clipping, moments and the number of updates are those of torch; the second of four steps has a NaN gradient."""
    generator = torch.Generator().manual_seed(0)
    batches = [Batch(torch.randint(64, (2, 9), generator=generator), None) for _ in range(4)]
    runs, losses = [], []
    for backend in ("reference", "triton"):
        monkeypatch.setattr(outer, "choose", lambda *_, backend=backend: Choice(backend, "as asked"))
        model, adamw = build(load_config([*NANO, f"optimizer.moments={moments}"]), torch.device("cpu"))
        for step, batch in enumerate(batches):
            before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            hook = model.head.register_hook(lambda gradient: gradient * torch.nan) if step == 1 else None
            result = train_step(model, adamw, [batch], lr=1e-2, clip_norm=0.5)
            assert result.applied == (step != 1)
            if hook:
                hook.remove()
                assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
            else:
                losses.append(result.loss)
        assert adamw.steps == 3
        runs.append([*model.state_dict().values(), *adamw.first.values(), *adamw.second.values()])
    assert losses[:3] == pytest.approx(losses[3:], rel=1e-3)
    for got, want in zip(*runs, strict=True):
        assert (got.double() - want.double()).norm() <= 0.02 * want.double().norm() + 1e-12
