"""What is computed while tokens are on the wire, and how often the host waits for a count."""

import warnings
from functools import partialmethod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from one_step import made, sequences, share
from processes import Ranks, on_ranks
from support import build, nano
from support import recipe as recipes
from test_graph_of_ranks import WIDE, tokens

from dsv3fp8.parallel.experts import deal_out
from dsv3fp8.parallel.wire import GroupWire


class Told:
    """A transfer that tells when it is waited for."""

    def __init__(self, work: Any, happened: list[str]) -> None:
        self._work, self._happened = work, happened

    def wait(self) -> None:
        self._happened.append("wait")
        self._work.wait()


def events(ranks: Ranks, gate: str) -> tuple[list[str], list[str]]:
    """What happens to the wire and to the shared expert in (forward, backward) of one MoE layer."""
    happened: list[str] = []
    real = dist.all_to_all_single

    def told(output: torch.Tensor, given: torch.Tensor, *rest: Any, **named: Any) -> Any:
        work = real(output, given, *rest, **named)
        if given.dtype is not torch.uint8:  # the counts
            return work
        happened.append("send")
        return Told(work, happened)

    dist.all_to_all_single = told
    model, _ = made("dsv3", f"gate={gate}", ranks=ranks, layers=2, mtp_depth=0)
    shared = model.layers[1].feed_forward.shared
    for name in ("gate_up", "down"):
        linear = getattr(shared, name)
        linear.register_forward_hook(lambda *_, name=name: happened.append(name))
        linear.weight.register_post_accumulate_grad_hook(lambda _, name=name: happened.append(name))
    (batch,) = share(sequences(), ranks.index, ranks.count)
    losses = model(batch.tokens, batch.documents)
    forward = happened.copy()
    happened.clear()
    model.objective(losses, losses.totals).backward()
    return forward, happened


@pytest.mark.parametrize("gate", ["before", "after"])
def test_half_of_the_shared_expert_runs_while_tokens_are_on_the_wire(gate: str) -> None:
    """Each way, forward and backward. The gate weights and their gradients travel where they are multiplied inside."""
    gates = 1 if gate == "before" else 0
    there, back = ["send"] * (2 + gates), ["wait"] * (2 + gates)  # codes and scales
    codes, arrived = ["send"] * 2, ["wait"] * 2
    home, at_home = ["send"] * (1 + gates), ["wait"] * (1 + gates)
    for forward, backward in on_ranks(2, events, gate, expert=2):
        assert forward == [*there, "gate_up", *back, "send", "down", "wait"]
        assert backward == [*codes, "down", *arrived, *home, "gate_up", *at_home]


def gradients_both_ways(ranks: Ranks, recipe: str, gate: str, device: str) -> list[str]:
    """Parameters whose gradients differ where every transfer is waited for at once."""

    def at_once(wire: GroupWire, rows: Any, real: Any) -> Any:
        there = real(wire, rows)()
        return lambda: there

    on_gpu = device == "cuda"
    model = build(nano(**{**(WIDE if on_gpu else {}), "layers": 3}), recipes(recipe, f"gate={gate}"))
    deal_out(model, ranks)
    model = model.to(torch.device(device, ranks.local) if on_gpu else device)
    model.invalidate_codes()
    found: list[dict[str, torch.Tensor]] = []
    for waiting in (False, True):
        for name in ("send", "send_back") if waiting else ():
            setattr(GroupWire, name, partialmethod(at_once, real=getattr(GroupWire, name)))
        model.zero_grad()
        for number in range(2):
            window = tokens(2 * number + ranks.index, 128 if on_gpu else 20, 4)[0].tokens.to(model.embedding.device)
            losses = model(window)
            model.objective(losses, losses.totals).backward()
        found.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    assert all(each.any() for each in found[0].values())
    return [name for name, each in found[0].items() if not torch.equal(each, found[1][name])]


WAYS = [("dsv3", "before"), ("dsv3", "after"), ("bf16", "before")]


@pytest.mark.parametrize(("recipe", "gate"), WAYS)
def test_gradients_have_the_bits_of_a_step_that_waits_for_every_transfer(recipe: str, gate: str) -> None:
    assert on_ranks(2, gradients_both_ways, recipe, gate, "cpu", expert=2) == [[], []]


@pytest.mark.gpu(2)
@pytest.mark.parametrize(("recipe", "gate"), WAYS)
def test_gradients_of_two_gpus_have_the_bits_of_a_step_that_waits_for_every_transfer(recipe: str, gate: str) -> None:
    assert on_ranks(2, gradients_both_ways, recipe, gate, "cuda", expert=2, device="cuda") == [[], []]


def host_reads(ranks: Ranks, recipe: str) -> tuple[int, int]:
    """How often a list of numbers is read from tensors in (forward, backward) of two MoE layers."""
    model, _ = made(recipe, ranks=ranks, mtp_depth=0)
    (batch,) = share(sequences(), ranks.index, ranks.count)
    reads: list[int] = []
    real = torch.Tensor.tolist
    torch.Tensor.tolist = lambda tensor: (reads.append(1), real(tensor))[1]  # type: ignore[method-assign]
    losses = model(batch.tokens, batch.documents)
    forward = len(reads)
    totals = losses.totals
    reads.clear()
    model.objective(losses, totals).backward()
    return forward, len(reads)


def test_counts_are_read_once_a_layer_and_not_in_backward() -> None:
    """Also where a GEMM is launched for every expert, which takes the counts from the host."""
    assert on_ranks(2, host_reads, "dsv3", expert=2) == [(2, 0)] * 2


def waits_on_gpu(ranks: Ranks, recipe: str) -> tuple[int, int]:
    """How often the host waits for the GPU in (forward, backward) of two MoE layers, warmed up."""
    device = torch.device("cuda", ranks.local)
    model = build(nano(**{**WIDE, "layers": 3, "mtp_depth": 0}), recipes(recipe))
    deal_out(model, ranks)
    model = model.to(device)
    model.invalidate_codes()
    counts = []
    for number in range(3):
        window = tokens(2 * number + ranks.index, 128, 4)[0].tokens.to(device)
        waits = []
        for half in ("forward", "backward"):
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn" if number == 2 else "default")
                if half == "forward":
                    losses = model(window)
                else:
                    losses.loss.backward()
                torch.cuda.set_sync_debug_mode("default")
            waits.append(sum("synchronizing" in str(each.message) for each in seen))
        counts.append(tuple(waits))
    return counts[-1]


@pytest.mark.gpu(2)
@pytest.mark.parametrize("recipe", ["dsv3", "bf16"])
def test_the_host_waits_for_a_gpu_once_a_layer_and_not_in_backward(recipe: str) -> None:
    assert on_ranks(2, waits_on_gpu, recipe, expert=2, device="cuda") == [(2, 0)] * 2
