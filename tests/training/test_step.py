"""One optimizer step and one validation on the real model, in FP32 where sums must agree."""

import copy
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from dsv3fp8.data import Batch
from dsv3fp8.kernels import backend
from dsv3fp8.model.transformer import Transformer
from dsv3fp8.ops import grouped
from dsv3fp8.training.config import OptimizerConfig
from dsv3fp8.training.optimizer import AdamW
from dsv3fp8.training.setup import build
from dsv3fp8.training.step import train_step, validate

CONTEXT = 12


def made(nano: Any, *words: str) -> tuple[Transformer, AdamW]:
    return build(nano("model.vocab_size=64", *words), torch.device("cpu"))


def tokens(sequences: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 64, (sequences, CONTEXT + 1), generator=torch.Generator().manual_seed(seed))


def whole(ids: torch.Tensor, documents: torch.Tensor | None = None, parts: int = 1) -> list[Batch]:
    cut = [None] * parts if documents is None else documents.chunk(parts)
    return [Batch(piece, part) for piece, part in zip(ids.chunk(parts), cut, strict=True)]


def snapshot(model: Transformer, optimizer: AdamW) -> dict[str, torch.Tensor]:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for kind, moments in (("first", optimizer.first), ("second", optimizer.second)):
        state |= {f"{kind}.{name}": tensor.clone() for name, tensor in moments.items()}
    return state | {"steps.": torch.tensor(optimizer.steps)}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    differing = [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]
    assert not differing


def capture_gradients(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """The gradients that the next steps hand to the optimizer."""
    captured: dict[str, torch.Tensor] = {}

    def step(self: AdamW, *_: Any) -> None:
        captured.update({name: p.grad.clone() for name, p in self.parameters.items() if p.grad is not None})

    monkeypatch.setattr(AdamW, "step", step)
    return captured


@pytest.mark.parametrize("isolated", [False, True])
def test_the_split_into_micro_batches_changes_no_loss_and_no_gradient(
    nano: Any, monkeypatch: pytest.MonkeyPatch, isolated: bool
) -> None:
    """T20, L02: 8 sequences as 1×8, 2×4 and 8×1; isolated documents give the parts unequal numbers of targets."""
    words = ("recipe=fp32", "model.balance_loss=0.1", "model.mtp_depth=2")
    documents = None
    if isolated:
        borders = torch.rand(8, CONTEXT + 1, generator=torch.Generator().manual_seed(1)) < torch.linspace(0, 0.6, 8)[:, None]
        documents = borders.int().cumsum(1).int()
    results, gradients = [], []
    for parts in (1, 2, 8):
        model, optimizer = made(nano, *words)
        gradients.append(capture_gradients(monkeypatch))
        results.append(train_step(model, optimizer, whole(tokens(8), documents, parts), lr=1e-3, clip_norm=0.0))
    for result, found in zip(results[1:], gradients[1:], strict=True):
        assert result.loss == pytest.approx(results[0].loss, rel=1e-6)
        assert result.mtp_losses == pytest.approx(results[0].mtp_losses, rel=1e-6)
        assert result.balance_loss == pytest.approx(results[0].balance_loss, rel=1e-5)
        assert result.grad_norm == pytest.approx(results[0].grad_norm, rel=1e-5)
        assert found.keys() == gradients[0].keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, gradients[0][name], rtol=1e-4, atol=1e-7)


def test_the_loss_is_the_mean_over_the_targets_that_count(nano: Any) -> None:
    """L02: against cross_entropy over the model's own logits; two documents and padding leave some targets out."""
    model, optimizer = made(nano, "recipe=fp32")
    ids = tokens(4)
    documents = torch.zeros(4, CONTEXT + 1, dtype=torch.int32)
    documents[1, 5:] = 1
    documents[2, 3:] = -1
    targets = ids[:, 1:].clone()
    targets[1, 4] = -100
    targets[2, 2:] = -100
    logits = model.logits(ids[:, :-1], documents[:, :-1])
    expected = float(cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100))
    result = train_step(model, optimizer, whole(ids, documents, parts=2), lr=0.0, clip_norm=1.0)
    assert result.loss == pytest.approx(expected, rel=1e-6)
    assert result.tokens == 4 * CONTEXT


def test_a_micro_batch_without_targets_contributes_nothing(nano: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """L01: the mean of an empty set must not make the step NaN."""
    empty = Batch(tokens(2, seed=9), torch.arange(CONTEXT + 1, dtype=torch.int32).expand(2, -1))
    full = Batch(tokens(2), torch.zeros(2, CONTEXT + 1, dtype=torch.int32))
    results, gradients = [], []
    for batches in ([full], [full, empty]):
        model, optimizer = made(nano, "recipe=fp32", "model.balance_loss=0.0")
        gradients.append(capture_gradients(monkeypatch))
        results.append(train_step(model, optimizer, batches, lr=1e-3, clip_norm=0.0))
    assert results[1].applied
    assert results[1].loss == results[0].loss
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(gradient, gradients[0][name], rtol=1e-6, atol=1e-9)


def test_a_step_without_any_target_is_finite(nano: Any) -> None:
    """L01."""
    model, optimizer = made(nano, "recipe=fp32")
    empty = Batch(tokens(2), torch.arange(CONTEXT + 1, dtype=torch.int32).expand(2, -1))
    result = train_step(model, optimizer, [empty], lr=1e-3, clip_norm=1.0)
    assert result.loss == 0.0
    assert result.applied


def test_validation_is_the_mean_over_all_its_targets(nano: Any) -> None:
    """L04: neither accumulation nor batch sizes enter."""
    model, _ = made(nano, "recipe=fp32")
    ids = tokens(5)
    logits = model.logits(ids[:, :-1])
    expected = float(cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))
    for parts in (1, 2, 5):
        assert validate(model, whole(ids, parts=parts), torch.device("cpu")) == pytest.approx(expected, rel=1e-6)
    assert model.training


@pytest.mark.parametrize("recipe", ["dsv3", "delayed", "static"])
def test_validation_leaves_biases_counts_and_histories_alone(nano: Any, recipe: str) -> None:
    """T13, O05: two steps with three validations between them, against two steps without."""
    states = []
    for validations in (0, 3):
        model, optimizer = made(nano, f"recipe={recipe}")
        train_step(model, optimizer, whole(tokens(2, seed=1)), lr=1e-3, clip_norm=1.0)
        for seed in range(validations):
            validate(model, whole(tokens(2, seed=10 + seed)), torch.device("cpu"))
        train_step(model, optimizer, whole(tokens(2, seed=2)), lr=1e-3, clip_norm=1.0)
        states.append(snapshot(model, optimizer))
    assert_same(*states)


def test_the_bias_moves_once_a_step_whatever_the_number_of_micro_batches(nano: Any) -> None:
    """T10: by ∓γ from the summed counts, not ∓2γ."""
    model, optimizer = made(nano, "model.bias_update_speed=0.25")
    train_step(model, optimizer, whole(tokens(4), parts=2), lr=1e-3, clip_norm=1.0)
    biases = [tensor for name, tensor in model.state_dict().items() if name.endswith("router.bias")]
    assert biases
    for bias in biases:
        assert set(bias.abs().tolist()) <= {0.0, 0.25}
        assert bias.any()
    assert not model.expert_load().any()


def test_a_frozen_bias_is_neither_trained_nor_decayed(nano: Any) -> None:
    """T16: γ = 0, weight decay, five steps."""
    model, optimizer = made(nano, "model.bias_update_speed=0.0", "optimizer.weight_decay=0.5")
    biases = {name: tensor for name, tensor in model.state_dict().items() if name.endswith("router.bias")}
    with torch.no_grad():
        for bias in biases.values():
            bias.fill_(0.125)
    for seed in range(5):
        train_step(model, optimizer, whole(tokens(2, seed)), lr=0.1, clip_norm=1.0)
    assert biases
    assert all(bool((bias == 0.125).all()) for bias in biases.values())
    assert not biases.keys() & optimizer.parameters.keys()


@pytest.mark.parametrize("recipe", ["dsv3", "delayed"])
@pytest.mark.parametrize("where", ["gradient", "weight"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_that_is_not_finite_moves_no_state(nano: Any, recipe: str, where: str, bad: float) -> None:
    """O07: weights, moments, biases and amax histories stay; the next clean step is that of a run without the bad one."""
    model, optimizer = made(nano, f"recipe={recipe}")
    train_step(model, optimizer, whole(tokens(2, seed=1)), lr=1e-3, clip_norm=1.0)
    clean = copy.deepcopy(model.state_dict())
    before = snapshot(model, optimizer)
    if where == "gradient":
        hook = model.embedding.register_hook(lambda gradient: torch.full_like(gradient, bad))
    else:
        with torch.no_grad():
            model.embedding[0, 0] = bad
        model.invalidate_codes()
    ids = tokens(2, seed=2)
    ids[:, 3] = 0  # reads the bad weight
    result = train_step(model, optimizer, whole(ids), lr=1e-3, clip_norm=1.0)
    assert not result.applied
    if where == "gradient":
        hook.remove()
    else:
        with torch.no_grad():
            model.embedding.copy_(clean["embedding"])
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_same(snapshot(model, optimizer), before)


def test_huge_finite_gradients_are_clipped_and_applied(nano: Any) -> None:
    """Case fact 8: gradients around 1e20 must not silently become a step of zero."""
    model, optimizer = made(nano, "recipe=fp32", "optimizer.weight_decay=0.0")
    before = model.embedding.detach().clone()
    hook = model.embedding.register_hook(lambda gradient: gradient * 1e20)
    result = train_step(model, optimizer, whole(tokens(2)), lr=1e-3, clip_norm=1.0)
    hook.remove()
    assert result.applied
    assert 1e17 < result.grad_norm < 1e22
    assert torch.isfinite(optimizer.second["embedding"]).all()
    assert not torch.equal(model.embedding, before)


def test_gradients_whose_squares_overflow_are_skipped_where_nothing_clips_them(nano: Any) -> None:
    model, optimizer = made(nano, "recipe=fp32")
    before = snapshot(model, optimizer)
    model.embedding.register_hook(lambda gradient: gradient * 1e25)
    result = train_step(model, optimizer, whole(tokens(2)), lr=1e-3, clip_norm=0.0)
    assert math.isfinite(result.grad_norm)
    assert not result.applied
    assert_same(snapshot(model, optimizer), before)


def test_experts_may_add_to_the_gradient_so_far_and_change_no_bit(nano: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that sums micro-batches itself, played; a single backward outside of a step gives its gradient to autograd."""
    sums: list[bool] = []

    def wgrad_together(
        dy: torch.Tensor, x: torch.Tensor, blocks: torch.Tensor, dtype: Any, spec: Any, into: torch.Tensor | None
    ) -> torch.Tensor:
        ends = [128 * int(block) for block in blocks]
        product = torch.stack([dy[i:j].float().mT @ x[i:j].float() for i, j in pairwise(ends)])
        sums.append(into is not None)
        return product if into is None else into.add_(product)

    monkeypatch.setattr(backend, "grouped_wgrad", wgrad_together)
    states = []
    for adds in (True, False):
        if not adds:
            monkeypatch.setattr(grouped, "running_sum", lambda _: None)
        model, optimizer = made(nano, "recipe=bf16", "model.mtp_depth=0")
        for seed in range(2):
            assert train_step(model, optimizer, whole(tokens(6, seed), parts=3), lr=1e-3, clip_norm=1.0).applied
        states.append(snapshot(model, optimizer))
    assert sums == [i >= 2 for i in range(6)] * 2 + [False] * 12  # one MoE layer, two wgrads in each of three backward passes
    assert_same(*states)
    losses = model(tokens(2))
    for _ in range(2):
        weight = next(parameter for name, parameter in model.named_parameters() if name.endswith("experts.down"))
        found = torch.autograd.grad(model.objective(losses, losses.totals), weight, retain_graph=True)
        assert found[0].any()


def test_the_update_is_adamw_on_the_clipped_gradient(nano: Any) -> None:
    model, optimizer = made(nano, "recipe=fp32")
    oracle_model, _ = made(nano, "recipe=fp32")
    groups = oracle_model.parameter_groups()
    oracle = torch.optim.AdamW(
        [
            {"params": [p for _, p in groups["decay"]], "weight_decay": 0.1},
            {"params": [p for _, p in groups["no_decay"]], "weight_decay": 0.0},
        ],
        lr=1e-3,
        betas=(0.9, 0.95),
    )
    assert isinstance(optimizer.config, OptimizerConfig)
    for seed in range(3):
        batches = whole(tokens(2, seed))
        train_step(model, optimizer, batches, lr=1e-3, clip_norm=0.5)
        losses = oracle_model(batches[0].tokens)
        oracle_model.objective(losses, losses.totals).backward()
        torch.nn.utils.clip_grad_norm_(oracle_model.parameters(), 0.5)
        oracle.step()
        oracle.zero_grad()
        oracle_model.end_step(True)
    for (name, mine), theirs in zip(model.named_parameters(), oracle_model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6, msg=name)
