"""Experts dealt out over 2 and 4 ranks against one rank that holds them all."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from one_step import SEQUENCES, made, result_of, sequences, share, step_alone, step_of_rank, whole_step
from processes import Ranks, on_ranks
from test_data_parallel import TOLERANCE, furthest

from dsv3fp8.data import Batch
from dsv3fp8.parallel import reduction
from dsv3fp8.parallel.experts import expert_names
from dsv3fp8.parallel.ranks import ALONE
from dsv3fp8.precision import ledger
from dsv3fp8.training.step import train_step


def holds(rank: dict[str, Any], one: dict[str, Any], tolerance: float) -> None:
    """A rank's step is that of one rank, within a tolerance relative to each tensor's largest value."""
    for name in ("loss", "mtp", "balance", "norm"):
        assert rank[name] == pytest.approx(one[name], rel=tolerance), name
    assert np.array_equal(rank["load"], np.asarray(one["load"]))
    error, where = furthest(rank["gradients"], one["gradients"])
    assert error < tolerance, where


@pytest.mark.parametrize("gate", ["before", "after"])
@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
@pytest.mark.parametrize(("count", "expert", "parts"), [(2, 2, 2), (4, 2, 1), (4, 4, 1)])
def test_loss_and_raw_gradients_are_those_of_one_rank(recipe: str, count: int, expert: int, parts: int, gate: str) -> None:
    """X03, O08."""
    one = step_alone(recipe, parts, f"gate={gate}")
    for rank in on_ranks(count, step_of_rank, recipe, parts, f"gate={gate}", expert=expert):
        holds(rank, one, TOLERANCE[recipe])


@pytest.mark.parametrize("gate", ["before", "after"])
@pytest.mark.parametrize(("count", "expert"), [(2, 2), (4, 2), (4, 4)])
def test_a_quantized_step_is_that_of_the_tiles_each_rank_holds(count: int, expert: int, gate: str) -> None:
    """Experts see the tokens of their group, by source rank, then token; everything else those of its rank."""
    batch = sequences()

    def summed(parts: int) -> dict[str, torch.Tensor]:
        sums: dict[str, torch.Tensor] = {}
        for index in range(parts):
            model, optimizer = made("dsv3", f"gate={gate}")
            given = whole_step(share(batch, 0, 1), model.config.mtp_depth)
            found = result_of(model, optimizer, share(batch, index, parts), given)["gradients"]
            sums = {name: sums[name] + each if sums else each for name, each in found.items()}
        return sums

    of_experts = set(expert_names(made("dsv3")[0]))
    by_rank, by_group = summed(count), summed(count // expert)
    want = {name: (by_group if name in of_experts else by_rank)[name].numpy() for name in by_rank}
    for rank in on_ranks(count, step_of_rank, "dsv3", 1, f"gate={gate}", expert=expert):
        error, where = furthest(rank["gradients"], want)
        assert error < 1e-6, where
        assert furthest(rank["gradients"], by_rank)[0] > 1e-3  # experts under each rank's own tiles are others
        assert rank["norm"] == pytest.approx(float(np.sqrt(sum(np.square(g, dtype=float).sum() for g in want.values()))))


def test_ranks_move_to_the_same_bits() -> None:
    first, *others = on_ranks(4, step_of_rank, "dsv3", 1, expert=2)
    for other in others:
        assert other["norm"] == first["norm"]
        assert all(np.array_equal(other["weights"][name], each) for name, each in first["weights"].items())


def step_with_a_wrong_factor(ranks: Ranks) -> dict[str, Any]:
    """Divides the gradients of experts by the size of their group, as a mean over it would."""
    right = reduction.start_combining

    def wrong(bucket: list[torch.Tensor], operation: Any, group: Any) -> Any:
        wait = right(bucket, operation, group)
        return lambda: (wait(), torch._foreach_div_(bucket, ranks.expert) if group is ranks.replicas else None)

    reduction.start_combining = wrong
    return step_of_rank(ranks, "fp32", 1)


def test_a_planted_factor_on_the_gradients_of_experts_is_caught() -> None:
    one = step_alone("fp32")
    for rank in on_ranks(4, step_with_a_wrong_factor, expert=2):
        with pytest.raises(AssertionError):
            holds(rank, one, TOLERANCE["fp32"])


def observed_step(ranks: Ranks, recipe: str, gate: str) -> dict[str, Any]:
    """(what the ledger says of the exchange, the bytes that were handed to the collectives) of one step."""
    carried: list[int] = []
    real = dist.all_to_all_single

    def counted(output: torch.Tensor, given: torch.Tensor, *rest: Any, **named: Any) -> Any:
        if given.dtype is torch.uint8:
            carried.append(given.nbytes)
        return real(output, given, *rest, **named)

    dist.all_to_all_single = counted
    model, optimizer = made(recipe, f"gate={gate}", ranks=ranks, mtp_depth=0)
    with ledger.observe_ops() as log:
        train_step(model, optimizer, [Batch(share(sequences(), ranks.index, ranks.count)[0].tokens, None)], 1e-3, 1.0, ranks)
    assert not log.unreported
    assert not log.unsaved
    wires = {f"{name} {column}": [r.wire for r in log.find(name, column)] for name, column in EXCHANGES}
    return {"wires": wires, "carried": sum(carried), "dim": model.config.dim, "top_k": model.config.top_k}


EXCHANGES = (("dispatch", "forward"), ("combine", "forward"), ("combine", "backward"), ("dispatch", "backward"))


@pytest.mark.parametrize("gate", ["before", "after"])
@pytest.mark.parametrize("recipe", ["dsv3", "bf16"])
def test_the_wire_carries_the_payload_and_nothing_else(recipe: str, gate: str) -> None:
    """T·k·(D + s·ceil(D/128)) bytes of dispatch, s = 4 for a scale stored in FP32, and 2·T·k·D of combine."""
    carried = expected = 0
    for rank in on_ranks(2, observed_step, recipe, gate, expert=2):
        tokens, dim = 4 * 20, rank["dim"]
        copies = tokens * rank["top_k"]
        codes = copies * (dim + 4 * -(-dim // 128)) if recipe == "dsv3" else 2 * copies * dim
        want = {"dispatch forward": codes, "combine forward": 2 * copies * dim}
        want |= {"combine backward": codes, "dispatch backward": 2 * copies * dim}
        assert rank["wires"] == {name: [size] * 2 for name, size in want.items()}  # two layers with experts
        gates = 2 * 4 * copies if gate == "before" else 0  # there, and their gradients back
        expected += 2 * (sum(want.values()) + gates)
        carried += rank["carried"]
    assert carried == expected


def lonely_step(ranks: Ranks, recipe: str, padded: bool) -> dict[str, Any]:
    """All tokens choose the experts of rank 0; those of rank 1 are padding, or are sent away like the others."""
    model, optimizer = made(recipe, ranks=ranks)
    for name, buffer in model.named_buffers():
        if name.endswith("router.bias"):
            buffer[: len(buffer) // 2] += 100.0
    batch = sequences()
    if padded:
        assert batch.documents is not None
        batch.documents[SEQUENCES // 2 :] = -1
    return result_of(model, optimizer, share(batch, ranks.index, ranks.count), ranks)


@pytest.mark.parametrize(("recipe", "padded"), [("dsv3", True), ("fp32", True), ("fp32", False)])
def test_experts_without_tokens_and_a_rank_without_any(recipe: str, padded: bool) -> None:
    """X01, L01, L02, R01, R02: exact zeros, no hang forward or backward, and the step of one rank that has all of them."""
    one = lonely_step(ALONE, recipe, padded)
    for rank in on_ranks(2, lonely_step, recipe, padded, expert=2):
        assert rank["applied"]
        assert np.isfinite(rank["loss"])
        assert not rank["load"][:, 4:].any()
        for name, each in rank["gradients"].items():
            assert np.isfinite(each).all(), name
            assert not name.endswith(("experts.gate_up", "experts.down")) or not each[4:].any()
        if recipe == "fp32":
            holds(rank, one, TOLERANCE["fp32"])
