"""The router: selection, gate weights, ties, FP32 throughout, and the balance loss."""

from dataclasses import replace

import pytest
import torch
from support import relative
from torch import Tensor

from dsv3fp8.kernels.router.reference import Rule, affinity, select_experts, top_indices
from dsv3fp8.kernels.router.reference import balance_loss as balance_loss_and_kept
from dsv3fp8.kernels.router.reference import gate_weights as gate_weights_and_kept
from dsv3fp8.ops.norm import norm
from dsv3fp8.ops.router import route, router_logits


def rule(top_k: int = 2, groups: int = 1, kept: int = 1, **changed: object) -> Rule:
    return replace(Rule("sigmoid", top_k, groups, kept, True, 2.5), **changed)


def gate_weights(scores: Tensor, ids: Tensor, given: Rule) -> Tensor:
    return gate_weights_and_kept(scores, ids, given)[0]


def balance_loss(scores: Tensor, top_k: int, sequences: int, real: Tensor | None) -> Tensor:
    return balance_loss_and_kept(scores, top_k, sequences, real)[0]


def select(scores: list[float], bias: list[float] | float, top_k: int, groups: int = 1, kept: int = 1) -> set[int]:
    s = torch.tensor([scores])
    b = torch.full((len(scores),), bias) if isinstance(bias, float) else torch.tensor(bias)
    return set(select_experts(s, b, rule(top_k, groups, kept))[0].tolist())


def test_experts_come_from_kept_groups_whatever_the_bias() -> None:
    """T01: with biased scores below zero, dropped groups masked with 0 would win ({5, 6})."""
    assert select([0.9, 0.8, 0.7, 0.6, 0.1, 0.2, 0.1, 0.2], -1.0, 2, groups=2, kept=1) == {0, 1}


def test_a_group_scores_by_its_two_best() -> None:
    """One outstanding expert does not keep its group against two good ones."""
    assert select([0.9, 0.0, 0.6, 0.5], 0.0, 2, groups=2, kept=1) == {2, 3}
    assert select([0.9, 0.2, 0.1, 0.6, 0.4, 0.1], 0.0, 2, groups=2, kept=1) == {0, 1}


@pytest.mark.parametrize("seed", range(5))
def test_group_limited_selection_equals_a_plain_search(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores, bias = torch.rand(50, 12, generator=generator), torch.randn(12, generator=generator)
    got = select_experts(scores, bias, rule(3, 4, 2))
    for row, chosen in zip((scores + bias).tolist(), got.tolist(), strict=True):
        groups = [row[g * 3 : g * 3 + 3] for g in range(4)]
        best = sorted(range(4), key=lambda g: -sum(sorted(groups[g])[-2:]))[:2]
        allowed = [e for e in range(12) if e // 3 in best]
        assert chosen == sorted(allowed, key=lambda e: -row[e])[:3]


def test_the_bias_selects_and_never_weighs() -> None:
    """T02: experts 0 and 2 by biased scores, weights 1.875 and 0.625 from the unbiased ones."""
    scores, bias = torch.tensor([[0.6, 0.3, 0.2, 0.1]]), torch.tensor([0.0, 0.0, 0.5, 0.0])
    ids = select_experts(scores, bias, rule())
    weights = gate_weights(scores, ids, rule())
    assert dict(zip(ids[0].tolist(), weights[0].tolist(), strict=True)) == pytest.approx({0: 1.875, 2: 0.625})


def test_normalized_weights_sum_to_the_route_scale() -> None:
    """T04."""
    scores = affinity(torch.randn(20, 8, generator=torch.Generator().manual_seed(0)), "sigmoid")
    weights = gate_weights(scores, top_indices(scores, 3), rule())
    assert torch.allclose(weights.sum(-1), torch.full((20,), 2.5))


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_scores_of_zero_give_finite_weights_and_gradients(score: str) -> None:
    """T04: every sigmoid(-200) is 0 in fp32."""
    logits = torch.full((3, 4), -200.0, requires_grad=True)
    routing = route(logits, torch.zeros(4), rule(score=score), 1, None)
    (routing.weights.sum() + routing.balance).backward()
    assert torch.isfinite(routing.weights).all()
    assert torch.isfinite(logits.grad).all()


def test_the_route_scale_applies_without_normalization() -> None:
    """T05."""
    scores = torch.tensor([[0.6, 0.3, 0.2]])
    assert torch.allclose(gate_weights(scores, torch.tensor([[0, 2]]), rule(normalize=False)), torch.tensor([[1.5, 0.5]]))


def test_equal_scores_go_to_the_lowest_index() -> None:
    """T07: zero-init gate, BF16-rounded logits; torch.topk gives [6, 5] for eight equal ones."""
    assert select_experts(torch.full((4, 8), 0.5), torch.zeros(8), rule()).tolist() == [[0, 1]] * 4
    assert select_experts(torch.full((4, 8), 0.5), torch.zeros(8), rule(4, 4, 2)).tolist() == [[0, 1, 2, 3]] * 4
    rounded = torch.randn(300, 16, generator=torch.Generator().manual_seed(0)).mul(2).round().div(2)
    for row, chosen in zip(rounded.tolist(), top_indices(rounded, 5).tolist(), strict=True):
        assert chosen == sorted(range(16), key=lambda e: (-row[e], e))[:5]


def logits_of(y: Tensor, weight: Tensor) -> Tensor:
    edge = torch.zeros(y.shape, dtype=torch.float32, requires_grad=True)
    return router_logits(edge, weight, y, y, torch.ones(y.shape[-1]), 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_two_experts_that_bf16_cannot_tell_apart(dtype: torch.dtype) -> None:
    """T08: logits 8.00 and 8.03 under autocast; BF16 steps there are 0.0625."""
    y, weight = torch.ones(1, 2).bfloat16(), torch.tensor([[4.0, 4.0], [4.0, 4.03]])
    with torch.autocast("cpu", dtype=dtype):
        logits = logits_of(y, weight)
        ids, weights, balance = route(logits, torch.zeros(2), rule(1), 1, None)
    assert {t.dtype for t in (logits, weights, balance)} == {torch.float32}
    assert logits[0].tolist() == pytest.approx([8.0, 8.03], abs=1e-5)
    assert ids.tolist() == [[1]]


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_the_same_experts_as_in_fp64_on_8192_tokens(score: str) -> None:
    """T08."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(8192, 64, generator=generator).bfloat16()
    weight, bias = torch.randn(16, 64, generator=generator) * 0.05, torch.randn(16, generator=generator) * 0.01
    got = select_experts(affinity(logits_of(y, weight), score), bias, rule(4, 4, 2))
    exact = affinity(y.double() @ weight.double().mT, score)
    assert torch.equal(got, select_experts(exact, bias.double(), rule(4, 4, 2)))


def test_a_weight_narrowed_by_a_wrapper_is_refused() -> None:
    """T08: mixed precision of a sharding wrapper would choose other experts in silence."""
    with pytest.raises(TypeError, match="bfloat16: it must stay float32"):
        logits_of(torch.ones(2, 4).bfloat16(), torch.zeros(3, 4).bfloat16())


def test_backward_recomputes_the_norm_and_keeps_no_output_of_it() -> None:
    """Against autograd in float64; what is saved are the weight and the norm's input and gamma."""
    generator = torch.Generator().manual_seed(0)
    x, gamma, weight, grad = (
        torch.randn(*s, generator=generator, dtype=torch.float64).requires_grad_() for s in ((9, 8), (8,), (4, 8), (9, 4))
    )
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        normed = norm(x, gamma, 1e-6, (torch.float64,))
        logits = router_logits(normed.edges[0], weight, normed.y, x, gamma, 1e-6)
    got = torch.autograd.grad(logits, [x, gamma, weight], grad)
    exact = (gamma * x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6)) @ weight.mT
    for mine, want in zip(got, torch.autograd.grad(exact, [x, gamma, weight], grad), strict=True):
        assert relative(mine, want) < 1e-12
    assert {t.untyped_storage().data_ptr() for t in saved} == {t.untyped_storage().data_ptr() for t in (x, gamma, weight)}


def disjoint() -> Tensor:
    """Two sequences of 8 tokens that use experts {0, 1} and {2, 3} of four."""
    high = torch.tensor([7.0, 7.0, 1.0, 1.0]) / 16
    return torch.cat((high.expand(8, 4), high.flip(0).expand(8, 4)))


def test_the_balance_loss_is_taken_per_sequence() -> None:
    """T19: 1.75 a sequence for disjoint experts, where the batch as a whole would look balanced (1.0)."""
    scores = disjoint()
    assert float(balance_loss(scores, 2, 2, None)) == pytest.approx(2 * 1.75)
    assert float(balance_loss(scores, 2, 1, None)) == pytest.approx(1.0)
    split = balance_loss(scores[:8], 2, 1, None) + balance_loss(scores[8:], 2, 1, None)
    assert float(split) == pytest.approx(2 * 1.75)


def test_the_balance_loss_is_equations_17_to_20_and_so_is_its_gradient() -> None:
    scores = torch.rand(3 * 5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for sequence in scores.unflatten(0, (3, 5)):
        share = sequence / sequence.sum(-1, keepdim=True)
        for expert in range(6):
            hits = sum(expert in row.topk(2).indices.tolist() for row in sequence)
            total = total + 6 / (2 * 5) * hits * share[:, expert].mean()
    got = balance_loss(scores, 2, 3, None)
    assert got.item() == pytest.approx(total.item(), rel=1e-12)
    assert torch.allclose(*(torch.autograd.grad(loss, scores)[0] for loss in (got, total)), rtol=1e-10)


def test_padding_weighs_nothing_in_the_balance_loss() -> None:
    """A padded sequence has the loss of its real tokens; one of padding only has none."""
    scores = torch.rand(8, 6, generator=torch.Generator().manual_seed(1))
    real = torch.tensor([True] * 5 + [False] * 3)
    assert torch.allclose(balance_loss(scores, 2, 1, real), balance_loss(scores[:5], 2, 1, None))
    assert float(balance_loss(scores, 2, 1, torch.zeros(8, dtype=torch.bool))) == 0.0
    assert float(balance_loss(scores[:0], 2, 1, None)) == 0.0


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_the_gradient_of_the_logits_is_autograds(score: str, normalize: bool, masked: bool) -> None:
    """In float64, of weights and balance loss together, written out with one-hot masks; groups are dropped on the way."""
    generator = torch.Generator().manual_seed(0)
    logits, dweights = (torch.randn(12, n, generator=generator, dtype=torch.float64) for n in (8, 3))
    bias, given = torch.randn(8, generator=generator, dtype=torch.float64), rule(3, 4, 2, score=score, normalize=normalize)
    real = torch.rand(12, generator=generator) > 0.3 if masked else None
    logits.requires_grad_()
    ids, weights, balance = route(logits, bias, given, 2, real)
    scores = torch.sigmoid(logits) if score == "sigmoid" else torch.exp(logits) / torch.exp(logits).sum(1, keepdim=True)
    picked = torch.stack([row[i] for row, i in zip(scores, ids, strict=True)])
    want = 2.5 * (picked / picked.sum(1, keepdim=True) if normalize else picked)
    loss = torch.zeros((), dtype=torch.float64)
    for half in (slice(0, 6), slice(6, 12)):
        counted = torch.ones(6, dtype=torch.bool) if real is None else real[half]
        of_half = scores[half][counted]
        hits = torch.zeros(len(of_half), 8, dtype=torch.float64).scatter(1, of_half.topk(3).indices, 1.0).mean(0)
        loss = loss + (hits * 8 / 3 * (of_half / of_half.sum(1, keepdim=True)).mean(0)).sum()
    assert torch.allclose(weights, want, rtol=1e-12)
    assert torch.allclose(balance, loss, rtol=1e-12)
    grads = (torch.autograd.grad((w * dweights).sum() + 3.0 * b, logits)[0] for w, b in ((weights, balance), (want, loss)))
    assert torch.allclose(*grads, rtol=1e-11, atol=1e-12)
