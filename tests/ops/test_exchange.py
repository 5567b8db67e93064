"""Dispatch and combine: where every token goes, in which order, and that inert rows stay inert."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from placement import gathered, place, routings, slots, summed
from torch import Tensor

from dsv3fp8.kernels import moe
from dsv3fp8.kernels.exchange.reference import ROWS, capacity
from dsv3fp8.kernels.quantize.reference import quantize
from dsv3fp8.ops.exchange import Plan, collect_copies, combine, dispatch, dispatch_copies, make_plan
from dsv3fp8.precision.formats import E4M3
from dsv3fp8.precision.tiles import BLOCK_128, ROW_128, Tile

EXPERTS = 4


def draw_ids(tokens: int, top_k: int = 2, seed: int = 0) -> Tensor:
    scores = torch.rand(tokens, EXPERTS, generator=torch.Generator().manual_seed(seed))
    return scores.topk(top_k).indices


ROUTINGS = {
    "random": draw_ids(300),
    "all to one (R02)": torch.stack((torch.full((200,), 2), torch.full((200,), 3)), 1),
    "one token": torch.tensor([[3, 1]]),
    "no tokens (R02)": torch.zeros(0, 2, dtype=torch.int64),
}


def token(plan: Plan) -> Tensor:
    return plan.copy // plan.slot.shape[1]


def live(plan: Plan) -> Tensor:
    return plan.copy >= 0


@pytest.mark.parametrize("case", ROUTINGS)
def test_rows_of_an_expert_are_consecutive_by_token_and_start_at_a_tile(case: str) -> None:
    ids = ROUTINGS[case]
    plan = make_plan(ids, EXPERTS, None)
    start = 0
    for expert in range(EXPERTS):
        tokens = [t for t in range(len(ids)) if expert in ids[t].tolist()]
        assert (plan.starts[expert], plan.counts[expert]) == (start, len(tokens))
        assert token(plan)[start : start + len(tokens)].tolist() == tokens
        assert live(plan)[start : start + len(tokens)].all()
        blocks = -(-len(tokens) // ROWS)
        assert not live(plan)[start + len(tokens) : start + blocks * ROWS].any()
        assert (plan.groups[start // ROWS : start // ROWS + blocks] == expert).all()
        assert (plan.blocks[expert : expert + 2] * ROWS).tolist() == [start, start + blocks * ROWS]
        start += blocks * ROWS
    assert plan.rows == start == len(plan.copy)
    assert len(plan.groups) == start // ROWS
    assert plan.load.tolist() == plan.counts


@settings(max_examples=60)
@given(routings())
def test_plans_of_any_size_in_rows_enough_for_any_choice(case: tuple[np.ndarray, int, np.ndarray | None]) -> None:
    """As on a GPU, where the host knows no counts: what follows the last expert's rows is inert."""
    ids, experts, real = case
    copy, counts = place(ids, experts, real)
    rows = capacity(*ids.shape, experts)
    assert len(copy) <= rows
    mask = None if real is None else torch.from_numpy(real)
    plan = Plan(rows, *moe.lay_out(torch.from_numpy(ids), experts, mask, rows))
    assert plan.copy.tolist() == [*copy.tolist(), *[-1] * (rows - len(copy))]
    assert np.array_equal(plan.slot.numpy(), slots(copy, ids.shape))
    assert plan.counts == counts
    groups = [expert for expert, count in enumerate(counts) for _ in range(-(-count // ROWS))]
    assert plan.groups.tolist() == groups + [-1] * (rows // ROWS - len(groups))
    exact = plan.exact()
    assert (exact.rows, exact.copy.tolist(), exact.groups.tolist()) == (len(copy), copy.tolist(), groups)
    values = np.random.default_rng(0).normal(size=(len(ids), 5)).astype(np.float32)
    sent = dispatch(torch.from_numpy(values), plan)
    assert np.array_equal(sent[: len(copy)], gathered(values, np.where(copy < 0, -1, copy // ids.shape[1]), 0.0))
    assert torch.count_nonzero(sent[len(copy) :]) == 0
    weights = np.random.default_rng(1).random(ids.shape, np.float32)
    for given_weights in (None, weights):
        got = combine(sent, plan, None if given_weights is None else torch.from_numpy(weights))
        assert np.array_equal(got, summed(sent.numpy(), plan.slot.numpy(), given_weights))


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(300, 2, 4), (1, 8, 256), (129, 1, 1), (4096, 8, 8), (16, 8, 256)])
def test_the_rows_that_any_choice_may_need_are_no_more_than_some_choice_does(tokens: int, top_k: int, experts: int) -> None:
    """One token at each of the first experts, the rest where they fill most blocks."""
    copies, most = tokens * top_k, 0
    for many in range(1, experts + 1):  # so many experts with as many tokens as may be, the others with one
        others = min(experts - many, copies)
        each = [min(tokens, (copies - others) // many)] * many
        each[0] = min(tokens, each[0] + (copies - others) % many)
        most = max(most, sum(-(-count // ROWS) for count in [*each, *[1] * others]))
    assert capacity(tokens, top_k, experts) >= most * ROWS
    assert capacity(tokens, top_k, experts) <= (most + 1) * ROWS


def test_padding_tokens_go_nowhere() -> None:
    """R06: no row, no weight, no output, no gradient; 2 x 8 tokens with 3 of padding and k = 2 make 26, not 32."""
    ids, real = draw_ids(16), torch.ones(16, dtype=torch.bool)
    real[[6, 7, 15]] = False
    plan = make_plan(ids, EXPERTS, real)
    assert sum(plan.counts) == 26
    assert not set(token(plan)[live(plan)].tolist()) & {6, 7, 15}
    out = combine(torch.ones(plan.rows, 3), plan)
    assert torch.equal(out, torch.where(real[:, None], 2.0, 0.0).expand(16, 3))
    assert torch.equal(collect_copies(torch.ones(plan.rows), plan), torch.where(real[:, None], 1.0, 0.0).expand(16, 2))


def poison(plan: Plan, rows: Tensor) -> Tensor:
    return torch.where(live(plan)[:, None], rows, torch.nan)


def test_combine_sums_each_tokens_rows_in_fp32_and_reads_no_inert_row() -> None:
    """R04: 256 + eight times 0.5 is 260, in BF16 it would stay 256."""
    ids = torch.arange(9).expand(5, 9).contiguous()
    plan = make_plan(ids, 9, None)
    values = torch.tensor([256.0, *[0.5] * 8])
    rows = poison(plan, values[plan.groups].repeat_interleave(ROWS)[:, None].expand(-1, 4)).bfloat16()
    assert torch.equal(combine(rows, plan), torch.full((5, 4), 260.0).bfloat16())
    weights = torch.full((5, 9), 0.25)
    assert torch.equal(combine(rows, plan, weights), torch.full((5, 4), 65.0).bfloat16())


@pytest.mark.parametrize("tile", [ROW_128, Tile(1, None), Tile(None, None), BLOCK_128], ids=str)
def test_codes_and_scales_travel_as_they_are(tile: Tile) -> None:
    """X03: every received row decodes to the row that was sent; inert rows are code 0."""
    x = torch.randn(300, 200, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 300)[:, None]
    sent = quantize(x, E4M3, tile)
    plan = make_plan(draw_ids(300), EXPERTS, None)
    received = dispatch(sent, plan)
    values = received.decode()
    assert torch.equal(values[live(plan)], sent.decode()[token(plan)[live(plan)]])
    assert torch.count_nonzero(values[~live(plan)]) == 0
    assert received.codes.dtype == torch.float8_e4m3fn
    assert received.tile.cols == tile.cols


def test_a_plain_payload_travels_too_and_inert_rows_are_zero() -> None:
    x = torch.randn(10, 4)
    x[0] = torch.nan  # the token that inert rows point at
    plan = make_plan(draw_ids(10), EXPERTS, torch.arange(10) > 0)
    received = dispatch(x, plan)
    assert torch.equal(received[live(plan)], x[token(plan)[live(plan)]])
    assert torch.count_nonzero(received[~live(plan)]) == 0


def test_copies_go_out_and_come_back() -> None:
    plan = make_plan(draw_ids(300), EXPERTS, None)
    weights = torch.rand(300, 2)
    rows = dispatch_copies(weights, plan)
    assert torch.count_nonzero(rows[~live(plan)]) == 0
    assert torch.equal(collect_copies(rows, plan), weights)
    nothing = make_plan(ROUTINGS["no tokens (R02)"], EXPERTS, None)
    assert combine(torch.zeros(0, 3), nothing).shape == (0, 3)
    assert collect_copies(torch.zeros(0), nothing).shape == (0, 2)
