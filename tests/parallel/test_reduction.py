"""Gradients that travel during backward, against the same sums taken behind it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from one_step import made, sequences, share, whole_step
from processes import Ranks, on_ranks
from torch import Tensor, nn

from dsv3fp8.model.transformer import Transformer
from dsv3fp8.ops import accumulate
from dsv3fp8.parallel import ranks as rank_room
from dsv3fp8.parallel import reduction
from dsv3fp8.parallel.ranks import combine_over
from dsv3fp8.training.step import train_step

# Elements of a bucket, so that the small model has many of them.
SMALL = 4000


def step_beside_sums_behind(ranks: Ranks, parts: int) -> dict[str, Any]:
    """(whether a step's gradients have the bits of sums behind backward, its buckets in the order in which they left)."""
    rank_room.BUCKET_ELEMENTS = SMALL
    given = share(sequences(), ranks.index, ranks.count, parts)
    totals = whole_step(share(sequences(), 0, 1), 1)
    model, optimizer = made("dsv3", ranks=ranks)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    left: list[str] = []
    start = reduction.start_combining

    def noted(bucket: list[Tensor], operation: Any, group: Any) -> Callable[[], None]:
        of = {id(p.grad): names[id(p)] for p in model.parameters() if p.grad is not None}
        left.append(of[id(bucket[0])])
        return start(bucket, operation, group)

    reduction.start_combining = noted
    model.embedding.register_post_accumulate_grad_hook(lambda _: left.append("backward has ended"))
    train_step(model, optimizer, given, 1e-3, 1.0, ranks)
    reduction.start_combining = start

    alone, own = made("dsv3", ranks=ranks)
    losses = []
    for batch in given:
        losses.append(alone(batch.tokens, batch.documents))
        alone.objective(losses[-1], totals_of(totals)).backward()
    shared, experts = reduction.split_gradients(alone, own.parameters.values(), ranks)
    combine_over(shared, dist.ReduceOp.SUM, None)
    if ranks.replicas is not None and ranks.replicas.size() > 1:
        combine_over(experts, dist.ReduceOp.SUM, ranks.replicas)
    same = [name for name, p in own.parameters.items() if torch.equal(p.grad, optimizer.gradients[name])]
    return {"differing": sorted(own.parameters.keys() - set(same)), "left": left}


def totals_of(counted: Ranks) -> Any:
    from dsv3fp8.model.targets import Totals

    targets, *mtp, sequences_, _ = counted.sum_counts([])
    return Totals(targets, tuple(mtp), sequences_)


@pytest.mark.parametrize(("count", "expert", "parts"), [(4, 2, 1), (2, 1, 2), (2, 2, 1)])
def test_gradients_travel_during_backward_with_the_bits_of_sums_behind_it(count: int, expert: int, parts: int) -> None:
    """All ranks in one order, and of several micro-batches during the last alone."""
    first, *others = on_ranks(count, step_beside_sums_behind, parts, expert=expert)
    assert not first["differing"]
    assert all(other == first for other in others)
    ends = [place for place, name in enumerate(first["left"]) if name == "backward has ended"]
    assert len(ends) == parts
    early, late = first["left"][ends[-2] + 1 if parts > 1 else 0 : ends[-1]], first["left"][ends[-1] + 1 :]
    assert len(early) + len(late) + parts == len(first["left"])  # none left before the last micro-batch
    assert len(early) > len(late)
    layers = [name.split(".")[1] for name in early if name.startswith("layers.")]
    assert len(set(layers)) > 1
    assert layers == sorted(layers, reverse=True)
    assert any("experts" in name for name in early) == (expert != count)


class _AddsItself(torch.autograd.Function):
    """y = x w whose backward adds w's gradient to the running sum, as a kernel may."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        total = accumulate.running_sum(weight)
        if total is None:
            return dy * weight, x * dy
        total += x * dy
        accumulate.added(weight)
        return dy * weight, None


class Chain(nn.Module):
    """x w0 w1 w2, with what `GradientSums` asks of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.full((3,), 2.0))
        self.layers = nn.ModuleList(nn.ParameterList([nn.Parameter(torch.full((3,), 3.0))]) for _ in range(2))


def chained(ranks: Ranks) -> Any:
    rank_room.BUCKET_ELEMENTS = 3
    model = Chain()
    parameters = list(model.parameters())
    left: list[int] = []
    with reduction.GradientSums(model, parameters, ranks) as sums:  # type: ignore[arg-type]
        for number in range(2):
            x = torch.full((3,), 1.0 + ranks.index)
            for parameter in parameters:
                x = _AddsItself.apply(x, parameter)
            x.register_hook(lambda _: left.append(sums._left))
            with sums.backward(last=number == 1):
                x.sum().backward()
            left.append(sums._left)
        sums.finish()
    return left, [parameter.grad for parameter in parameters]


def test_a_gradient_that_a_kernel_adds_is_on_its_way_as_soon() -> None:
    """Not before it is there, and not later than the end of backward; no bucket leaves twice."""
    for left, gradients in on_ranks(2, chained):
        assert left == [0, 0, 0, 3]
        want = [2 * (1 + 2) * 9.0] + [2 * (1 + 2) * 6.0] * 2
        assert [gradient.tolist() for gradient in gradients] == [[each] * 3 for each in want]


def test_alone_nothing_travels() -> None:
    model, optimizer = made("bf16")
    assert isinstance(model, Transformer)
    with reduction.GradientSums(model, list(optimizer.parameters.values()), Ranks()) as sums, sums.backward(last=True):
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
