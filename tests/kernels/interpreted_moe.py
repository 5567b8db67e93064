"""The exchange, the router and the residual sum in Triton's interpreter: run by test_moe.py in a process of its own."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted_triton import _as_on_a_gpu, check
from placement import departing, gathered, place, routings, slots, summed
from torch import Tensor

from dsv3fp8.kernels import moe
from dsv3fp8.kernels.exchange import reference as exchange_reference
from dsv3fp8.kernels.exchange import triton as exchange
from dsv3fp8.kernels.exchange.reference import capacity
from dsv3fp8.kernels.quantize.reference import quantize
from dsv3fp8.kernels.residual import reference as residual_reference
from dsv3fp8.kernels.residual import triton as residual
from dsv3fp8.kernels.router import reference as router_reference
from dsv3fp8.kernels.router import triton as router
from dsv3fp8.kernels.router.reference import Rule
from dsv3fp8.precision.formats import E4M3
from dsv3fp8.precision.ledger import observe_ops
from dsv3fp8.precision.tiles import BLOCK_128, ROW_128, QuantizedTensor, Tile

__all__ = ["_as_on_a_gpu"]  # the fixture

Routing = tuple[np.ndarray, int, np.ndarray | None]


def layout(kernels: Any, case: Routing) -> exchange_reference.Layout:
    ids, experts, real = case
    mask = None if real is None else torch.from_numpy(real)
    return kernels.lay_out(torch.from_numpy(ids), experts, mask, capacity(*ids.shape, experts))


@settings(max_examples=25)
@given(routings())
def test_plans(case: Routing) -> None:
    """Against plain loops; what the reference gives beside it, too."""
    ids, experts, real = case
    copy, counts = place(ids, experts, real)
    got = layout(exchange, case)
    assert got.copy.tolist() == [*copy.tolist(), *[-1] * (len(got.copy) - len(copy))]
    assert np.array_equal(got.slot.numpy(), slots(copy, ids.shape))
    assert got.load.tolist() == counts
    for ours, theirs in zip(got, layout(exchange_reference, case), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


def test_a_plan_of_more_copies_than_the_programs_look_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several rounds in each program; as many experts as the kernels take."""
    monkeypatch.setattr(exchange, "_PROGRAMS", 3)
    ids = torch.rand(500, 512, generator=torch.Generator().manual_seed(0)).topk(2).indices
    case = ids.numpy(), 512, None
    for ours, theirs in zip(layout(exchange, case), layout(exchange_reference, case), strict=True):
        assert torch.equal(ours, theirs)


PAYLOADS = {
    "codes": lambda x: quantize(x, E4M3, ROW_128, "pow2"), "one scale": lambda x: quantize(x, E4M3, Tile(None, None)),
    "row scales": lambda x: quantize(x, E4M3, Tile(1, None)), "blocks": lambda x: quantize(x, E4M3, BLOCK_128),
    "bf16": lambda x: x.bfloat16(), "fp32": lambda x: x,
}  # fmt: skip


@settings(max_examples=20)
@given(routings(130), st.sampled_from(list(PAYLOADS)), st.sampled_from([1, 3, 24, 200, 1040]))
def test_dispatch_and_combine(case: Routing, payload: str, cols: int) -> None:
    """Codes, scales and values as they are, nothing in inert rows; sums in order of choice, inert rows unread."""
    ids, made = case[0], layout(exchange_reference, case)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(len(ids), cols, generator=generator)
    sent = PAYLOADS[payload](x)
    got, want = (kernels.dispatch(sent, made.copy, made.slot) for kernels in (exchange, exchange_reference))
    if isinstance(got, QuantizedTensor):
        assert isinstance(want, QuantizedTensor)
        check(got, want)
        if sent.tile == ROW_128 and len(ids):
            assert got.scale.mT.is_contiguous()
    else:
        assert torch.equal(got, want)
        copy = made.copy.numpy()
        plain = gathered(sent.float().numpy(), np.where(copy < 0, -1, copy // ids.shape[1]), 0.0)
        assert np.array_equal(got.float().numpy(), plain)
    rows = torch.where((made.copy >= 0)[:, None], torch.randn(len(made.copy), cols, generator=generator), torch.nan)
    weights = torch.rand(ids.shape, generator=generator)
    for dtype in (torch.bfloat16, torch.float32):
        for given_weights in (None, weights):
            total = exchange.combine(rows.to(dtype), made.slot, given_weights)
            assert torch.equal(total, exchange_reference.combine(rows.to(dtype), made.slot, given_weights))
            loops = summed(
                rows.to(dtype).float().numpy(), made.slot.numpy(), None if given_weights is None else weights.numpy()
            )
            assert torch.equal(total, torch.from_numpy(loops).to(dtype))
    for values, index in ((weights, made.copy), (rows[:, 0].contiguous(), made.slot)):
        assert torch.equal(exchange.pick(values, index), exchange_reference.pick(values, index))


@settings(max_examples=20)
@given(routings(130), st.sampled_from([1, 200, 384]))
def test_rows_as_they_leave_a_rank(case: Routing, cols: int) -> None:
    """Without inert rows, so that their number is anything: codes and scales of each, also of the last."""
    ids, made = case[0], departing(layout(exchange_reference, case))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(len(ids), cols, generator=generator)
    sent = quantize(x, E4M3, ROW_128, "pow2")
    for got in (exchange.dispatch(sent, made.copy, made.slot), exchange.dispatch(x, made.copy, made.slot)):
        want = exchange_reference.dispatch(sent if isinstance(got, QuantizedTensor) else x, made.copy, made.slot)
        if isinstance(got, QuantizedTensor):
            assert isinstance(want, QuantizedTensor)
            check(got, want)
        else:
            assert torch.equal(got, want)
    out, weights = torch.randn(len(made.copy), cols, generator=generator), torch.rand(ids.shape, generator=generator)
    given_all = x.bfloat16(), made.copy, made.slot, weights, out.bfloat16()
    ours, theirs = (kernels.weigh_cast(*given_all, E4M3, "pow2") for kernels in (exchange, exchange_reference))
    check(ours[0], theirs[0])
    assert torch.equal(exchange.weigh(*given_all, torch.float32)[0], exchange_reference.weigh(*given_all, torch.float32)[0])


@pytest.mark.parametrize("cols", [1, 200, 384])
@pytest.mark.parametrize("kind", ["fp32", "pow2"])
def test_backward_of_a_combine_that_weighs(kind: str, cols: int) -> None:
    generator = torch.Generator().manual_seed(0)
    ids, real = torch.rand(150, 5, generator=generator).topk(3).indices, torch.arange(150) % 7 > 0
    made = exchange_reference.lay_out(ids, 5, real, capacity(150, 3, 5))
    dy, weights = torch.randn(150, cols, generator=generator).bfloat16(), torch.rand(150, 3, generator=generator)
    out = torch.where((made.copy >= 0)[:, None], torch.randn(len(made.copy), cols, generator=generator), 0).bfloat16()
    given_all = (dy, made.copy, made.slot, weights, out)
    ours, theirs = (kernels.weigh_cast(*given_all, E4M3, kind) for kernels in (exchange, exchange_reference))
    check(ours[0], theirs[0])
    assert torch.allclose(ours[1], theirs[1], rtol=1e-5, atol=1e-5)
    for dtype in (torch.bfloat16, torch.float32):
        mine, want = (kernels.weigh(*given_all, dtype) for kernels in (exchange, exchange_reference))
        assert torch.equal(mine[0], want[0])
        assert torch.allclose(mine[1], want[1], rtol=1e-5, atol=1e-5)


RULE = Rule("sigmoid", 3, 1, 1, True, 2.5)
RULES = {
    "plain": (8, RULE), "softmax": (64, replace(RULE, score="softmax", normalize=False, top_k=6)),
    "groups": (12, replace(RULE, groups=4, kept_groups=2)), "groups of one": (5, replace(RULE, groups=5, kept_groups=3)),
    "V3": (256, replace(RULE, top_k=8, groups=8, kept_groups=4)), "one expert": (1, replace(RULE, top_k=1)),
    "all experts": (6, replace(RULE, top_k=6)), "softmax of few": (3, replace(RULE, score="softmax", top_k=2)),
}  # fmt: skip


def route(kernels: Any, logits: Tensor, bias: Tensor, rule: Rule, sequences: int, real: Tensor | None) -> dict[str, Tensor]:
    weights, balance, kept = kernels.forward(logits, bias, rule, sequences, real)
    dweights = torch.randn(weights.shape, generator=torch.Generator().manual_seed(5))
    dlogits = kernels.backward(kept, dweights, torch.tensor(0.7), rule)
    return {"weights": weights, "balance": balance, **kept._asdict(), "dlogits": dlogits}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("sequences", "length"), [(1, 70), (2, 33), (3, 1), (2, 0)])
@pytest.mark.parametrize("name", RULES)
def test_routing(name: str, sequences: int, length: int, masked: bool) -> None:
    """Ids of rounded logits, with many ties, are equal; the rest but for the order of sums and the interpreter's exp."""
    experts, rule = RULES[name]
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(sequences * length, experts, generator=generator) * 4).round() / 4
    bias = torch.randn(experts, generator=generator).round() / 2
    real = torch.rand(sequences * length, generator=generator) > 0.3 if masked else None
    got, want = (route(kernels, logits, bias, rule, sequences, real) for kernels in (router, router_reference))
    for part, value in want.items():
        if value is None or part in ("ids", "real", "tokens", "frequency"):
            assert value is None if got[part] is None else torch.equal(got[part], value), part
        else:
            assert got[part].shape == value.shape
            assert torch.allclose(got[part], value, rtol=2e-6, atol=1e-6), part


@pytest.mark.parametrize("name", ["plain", "groups", "V3"])
def test_numbers_that_are_none_choose_experts_as_torch_sorts_them(name: str) -> None:
    """NaN above all, infinities, zeros of either sign equal: ids are in range and different, whatever the logits are."""
    experts, rule = RULES[name]
    generator = torch.Generator().manual_seed(0)
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0])
    logits, bias = (odd[torch.randint(6, s, generator=generator)] for s in ((60, experts), (experts,)))
    (_, _, ours), (_, _, theirs) = (k.forward(logits, bias, rule, 1, None) for k in (router, router_reference))
    assert torch.equal(ours.ids, theirs.ids)


@pytest.mark.parametrize("branches", [0, 1, 2])
@pytest.mark.parametrize("shape", [(3, 5), (130, 48), (0, 4)])
def test_residual_sums(shape: tuple[int, int], branches: int) -> None:
    x, *rest = (torch.randn(shape).bfloat16() for _ in range(1 + branches))
    for others in (rest, [b.float() for b in rest]):
        assert torch.equal(residual.forward(x, *others), residual_reference.forward(x, *others))


@pytest.mark.parametrize("gate", ["before", "after"])
def test_a_step_through_the_kernels_reports_and_gives_what_the_reference_does(
    gate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums in another order may round a code the other way; a wrong row, weight or gradient would be seen in all."""
    from support import build, gradients, nano, recipe, windows

    config, grads, ledgers = nano(groups=2, kept_groups=1), [], []
    window = windows(config)
    documents = torch.where(torch.arange(window.shape[1]) < 17, 0, -1).expand(window.shape)
    for against in ("not asked for", None):
        monkeypatch.setattr(moe, "against_triton", lambda _, why=against: why)
        with observe_ops() as ledger:
            grads.append(gradients(build(config, recipe("dsv3", f"gate={gate}")), [window], [documents]))
        ledgers.append(ledger)
    assert ledgers[0].records == ledgers[1].records
    assert not ledgers[1].unreported
    assert not ledgers[1].unsaved
    for name, want in grads[0].items():
        assert torch.nn.functional.cosine_similarity(want.flatten(), grads[1][name].flatten(), 0) > 0.999, name
