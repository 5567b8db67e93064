"""What a step puts on the wire: bytes counted on gloo ranks against the report's formulas; times, of made-up traces."""

from typing import Any

import pytest
import torch
from processes import Ranks, on_ranks
from support import build, nano, recipe

from dsv3fp8.data import Batch
from dsv3fp8.model.router import Router
from dsv3fp8.model.transformer import Transformer
from dsv3fp8.observe.bench.breakdown import Event
from dsv3fp8.observe.bench.scale.gathered import over_all
from dsv3fp8.observe.bench.scale.traffic import Call, Traffic
from dsv3fp8.observe.bench.scale.wire import by_what, over_ranks, wire_times
from dsv3fp8.parallel.experts import deal_out, expert_names
from dsv3fp8.parallel.ranks import ALONE
from dsv3fp8.training.config import OptimizerConfig
from dsv3fp8.training.optimizer import AdamW
from dsv3fp8.training.step import train_step

WAYS = {
    "dsv3": ("gate=before", 48 + 4), "dsv3, gate behind": ("gate=after", 48 + 4), "bf16": ("gate=before", 2 * 48),
    "rowwise": ("gate=before", 48 + 4), "fp32": ("gate=before", 4 * 48),
}  # fmt: skip
"""Recipes, and the bytes of a row of 48 values that is dispatched: codes and their scale, or the values."""
LAYERS, TOP_K = 2, 2


def made(ranks: Ranks, recipe_name: str, word: str) -> tuple[Transformer, AdamW]:
    """A dense and two MoE layers of width 48 with this rank's experts of 8, and their optimizer."""
    model = build(nano(layers=3, experts=8, mtp_depth=0), recipe(recipe_name, word))
    deal_out(model, ranks)
    return model, AdamW(model.parameter_groups(), OptimizerConfig(lr=1e-3, weight_decay=0.1))


def counted(ranks: Ranks, one_sided: bool) -> dict[str, list[Call]]:
    """The collectives of one step under each of WAYS; each rank has tokens of its own. one_sided: all to experts 0 and 1."""
    found = {}
    batch = Batch(torch.randint(96, (2, 21), generator=torch.Generator().manual_seed(ranks.index)), None)
    for name, (word, _) in WAYS.items():
        recipe_name = name.split(",")[0]
        model, optimizer = made(ranks, recipe_name, word)
        for module in model.modules():
            if one_sided and isinstance(module, Router):
                module.bias[:2] = 100
        with Traffic(48, 4 if recipe_name == "fp32" else 2) as traffic:
            train_step(model, optimizer, [batch], 1e-3, 1.0, ranks)
        found[name] = traffic.calls
    return found


@pytest.mark.parametrize("one_sided", [False, True])
def test_each_collective_carries_what_the_report_and_plan_say(one_sided: bool) -> None:
    """4 ranks, experts over 2 of them: T·k·(D + s·ceil(D/128)) out, 2·T·k·D home, and every gradient once round.

    Also where every second rank's experts get nothing, and nothing is what it sends home.
    """
    each = on_ranks(4, counted, one_sided, expert=2)
    copies = LAYERS * 2 * 20 * TOP_K  # of the tokens of a rank
    model, _ = made(ALONE, "dsv3", "gate=before")
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    of_experts = sum(sizes[name] for name in expert_names(model))
    for name, (_, row) in WAYS.items():
        calls = [rank[name] for rank in each]
        found = over_all(calls)
        plain = 4 * 48 if name == "fp32" else 2 * 48
        for out, home in (("dispatch", "combine"), ("combine's backward", "dispatch's backward")):
            assert found[out]["payload"] == copies * row, (name, out)
            assert found[home]["payload"] == copies * plain, (name, home)
            leaving, coming = (sum(call.sent for rank in calls for call in rank if call.what == what) for what in (out, home))
            assert leaving / row == coming / plain  # as many rows come home as have left
            assert 0 < leaving < 4 * copies * row
            assert not one_sided or leaving == 2 * copies * row
        arrived = sum(call.rows for rank in calls for call in rank if call.what == "dispatch")
        assert arrived == 4 * copies
        with_gates = {"gate weights"} if WAYS[name][0] == "gate=before" else set()
        assert found.keys() & {"gate weights"} == with_gates
        assert all(found[what]["payload"] == 2 * 4 * copies for what in with_gates)  # and their gradients
        assert found["counts"]["payload"] == LAYERS * 8 * 8
        reduced = [call for call in calls[0] if call.what == "all-reduce gradients"]
        assert sum(call.payload for call in reduced) == 2 * 4 * (sum(sizes.values()) - of_experts + of_experts // 2)
        assert sum(call.sent for call in reduced) == 2 * 4 * ((sum(sizes.values()) - of_experts) * 3 / 4 + of_experts / 2 / 2)
        assert sum(call.payload for call in calls[0] if call.what == "other") < 1000  # losses, loads, norms


def event(name: str, start: float, end: float) -> Event:
    return Event(name, round(start * 1e6), round(end * 1e6))


REDUCE, SEND = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "ncclDevKernel_SendRecv(…)"


def test_the_wire_of_a_trace_is_split_into_hidden_and_exposed() -> None:
    found = wire_times(
        [
            event("gemm", 0, 4), event("norm", 3, 6),
            event(SEND, 5, 9), event(REDUCE, 8, 12), event("memcpy", 11, 11.5), event("gemm", 13, 15),
        ]
    )  # fmt: skip
    assert (found["span_ms"], found["compute_ms"], found["wire_ms"]) == (15, 8.5, 7)
    assert found["hidden_ms"] == pytest.approx(1.5)
    assert found["kernels"] == [["SendRecv", 4.0], ["AllReduce", 4.0]]
    assert wire_times([])["span_ms"] == 0


def rank_of(*kernels: tuple[str, float]) -> dict[str, Any]:
    return {"span_ms": 10.0, "compute_ms": 5.0, "wire_ms": 4.0, "hidden_ms": 1.0, "kernels": [list(each) for each in kernels]}


def test_who_comes_last_tells_how_long_the_wire_takes_by_itself() -> None:
    """And bytes over that time are a bandwidth, by what was carried."""
    each = [
        rank_of(("SendRecv", 3), ("SendRecv", 1), ("AllReduce", 5)),
        rank_of(("SendRecv", 2), ("SendRecv", 4), ("AllReduce", 6)),
    ]
    assert over_ranks(each)["moving_ms"] == 2 + 1 + 5
    home, around = Call("combine", 64, 32.0, 1, "SendRecv"), Call("sum", 8, 8.0, 0, "AllReduce")
    calls = [[Call("dispatch", 64, sent, 1, "SendRecv"), Call("other", 8, 4.0), home, around] for sent in (10.0, 20.0)]
    assert by_what(each, calls) == {
        "dispatch": {"ms": 2, "sent": 20.0}, "combine": {"ms": 1, "sent": 32.0}, "sum": {"ms": 5, "sent": 8.0},
    }  # fmt: skip
    fewer = [rank[:1] for rank in calls]
    assert by_what(each, fewer) == {}, "not one kernel for each call"
    assert over_ranks([each[0], rank_of(("AllReduce", 5))])["moving_ms"] is None, "other kernels on another rank"
