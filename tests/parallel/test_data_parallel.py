"""The step of 2 and 4 ranks against the same step on one, and against each rank's share on its own."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from one_step import SEQUENCES, made, result_of, sequences, share, step_alone, step_of_rank, whole_step
from processes import Ranks, on_ranks

from dsv3fp8.parallel.ranks import ALONE

# Sums of the same FP32 terms in another order, relative to a tensor's largest value.
TOLERANCE = {"fp32": 2e-6, "bf16": 2e-6}


def furthest(got: dict[str, Any], want: dict[str, Any]) -> tuple[float, str]:
    """(the largest error relative to its tensor's largest value, where)."""
    assert got.keys() == want.keys()
    return max(
        (float(np.abs(got[name] - np.asarray(each)).max() / max(np.abs(np.asarray(each)).max(), 1e-30)), name)
        for name, each in want.items()
    )


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
@pytest.mark.parametrize(("count", "parts"), [(2, 1), (2, 2), (4, 1)])
def test_loss_and_raw_gradients_are_those_of_one_rank(recipe: str, count: int, parts: int) -> None:
    """L02, T20: each rank has another number of targets."""
    one = step_alone(recipe, parts)
    for rank in on_ranks(count, step_of_rank, recipe, parts):
        for name in ("loss", "mtp", "balance", "norm"):
            assert rank[name] == pytest.approx(one[name], rel=TOLERANCE[recipe]), name
        assert rank["applied"]
        assert rank["tokens"] == one["tokens"]
        assert np.array_equal(rank["load"], one["load"].numpy())
        error, where = furthest(rank["gradients"], one["gradients"])
        assert error < TOLERANCE[recipe], where


@pytest.mark.parametrize("recipe", ["dsv3", "delayed"])
def test_all_ranks_move_to_the_same_bits(recipe: str) -> None:
    """T11, O08: weights, load-balance biases, amax histories, norm."""
    first, *others = on_ranks(4, step_of_rank, recipe, 1)
    for other in others:
        assert other["norm"] == first["norm"]
        assert all(np.array_equal(other["weights"][name], each) for name, each in first["weights"].items())


def test_a_quantized_step_is_the_sum_of_each_rank_s_own_tiles() -> None:
    """To the bit on two ranks: FP32 addition of two numbers has one order."""
    batch = sequences()
    sums: dict[str, torch.Tensor] = {}
    for index in range(2):
        model, optimizer = made("dsv3")
        given = whole_step(share(batch, 0, 1), model.config.mtp_depth)
        found = result_of(model, optimizer, share(batch, index, 2), given)["gradients"]
        sums = {name: sums[name] + each if sums else each for name, each in found.items()}
    for rank in on_ranks(2, step_of_rank, "dsv3", 1):
        differing = [name for name, each in sums.items() if not np.array_equal(rank["gradients"][name], each.numpy())]
        assert not differing
    one = step_alone("dsv3")["gradients"]
    assert furthest({name: each.numpy() for name, each in sums.items()}, one)[0] > 1e-3  # other tiles, other gradients


def poisoned_step(ranks: Ranks) -> dict[str, Any]:
    model, optimizer = made("bf16")
    before = copy.deepcopy(model.state_dict())
    batch = share(sequences(), ranks.index, ranks.count)
    if ranks.index == 1:
        model.layers[0].attention.register_forward_hook(lambda *_: _[2] * float("nan"))
    result = result_of(model, optimizer, batch, ranks)
    moved = [name for name, each in before.items() if not torch.equal(each, model.state_dict()[name])]
    return {"applied": result["applied"], "moved": moved, "steps": optimizer.steps}


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all() -> None:
    """O07."""
    for rank in on_ranks(2, poisoned_step):
        assert rank == {"applied": False, "moved": [], "steps": 0}


def talk(ranks: Ranks) -> list[Any]:
    buckets = [torch.full((3,), ranks.index + 1.0), torch.full((2, 2), 10.0**ranks.index), torch.ones(5).as_strided((2,), (4,))]
    ranks.add_up(buckets)
    return [
        *(each.flatten().tolist() for each in buckets),
        ranks.largest(ranks.index * 7), ranks.sum_counts([ranks.index, 1]), ranks.from_first(f"from {ranks.index}"),
    ]  # fmt: skip


def test_what_ranks_tell_one_another() -> None:
    told = [[3.0] * 3, [11.0] * 4, [2.0] * 2, 7, [1, 2], "from 0"]
    assert on_ranks(2, talk) == [told, told]
    assert (ALONE.largest(3), ALONE.sum_counts([1, 2]), ALONE.from_first("x")) == (3, [1, 2], "x")


def test_shares_cover_all_sequences() -> None:
    dealt = torch.cat([batch.tokens for index in range(4) for batch in share(sequences(), index, 4)])
    assert len(dealt) == SEQUENCES
    assert torch.equal(dealt, sequences().tokens)
