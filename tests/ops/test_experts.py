"""Routed experts against a plain loop over tokens in float64, and against an emulation of the quantized chain."""

from dataclasses import dataclass, replace

import emulation
import numpy as np
import pytest
import torch
from emulation import bf16, matmul
from support import recipe
from torch import Tensor

from dsv3fp8.ops import exchange
from dsv3fp8.ops.exchange import make_plan
from dsv3fp8.ops.experts import ExpertsCall, Journey
from dsv3fp8.ops.quantizers import LinearQuantizers
from dsv3fp8.ops.weights import WeightCodes
from dsv3fp8.precision.recipe import Recipe

EXPERTS, DIM, HIDDEN = 4, 200, 72


@dataclass
class Case:
    """x [T, D], gate weights [T, K], the experts' masters, expert ids [T, K], gradient of the output; which tokens are real."""

    x: Tensor
    weights: Tensor
    gate_up: Tensor
    down: Tensor
    ids: Tensor
    dy: Tensor
    real: Tensor | None = None


def draw(
    ids: Tensor, dtype: torch.dtype = torch.bfloat16, dim: int = DIM, hidden: int = HIDDEN, experts: int = EXPERTS
) -> Case:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    tokens = len(ids)
    sizes = torch.exp(normal(tokens, 1))
    masters = torch.promote_types(dtype, torch.float32)
    return Case(
        (normal(tokens, dim) * sizes).to(dtype), torch.rand(ids.shape, generator=generator).to(masters) + 0.1,
        (normal(experts, 2 * hidden, dim) * dim**-0.5).to(masters), (normal(experts, dim, hidden) * hidden**-0.5).to(masters),
        ids, (normal(tokens, dim) * 1e-5 / sizes).to(dtype),
    )  # fmt: skip


def random_ids(tokens: int, experts: int = EXPERTS, top_k: int = 2) -> Tensor:
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(1))
    scores[:, 0] += 0.3  # an expert with more than a tile of tokens
    return scores.topk(top_k).indices


@dataclass
class Result:
    y: Tensor
    dx: Tensor
    dweights: Tensor
    dgate_up: Tensor
    ddown: Tensor


def run(case: Case, given: Recipe) -> Result:
    experts = len(case.gate_up)
    gate_up = LinearQuantizers(given, "expert_gate_up", experts, per_expert=("weight", "gradient"))
    down = LinearQuantizers(given, "expert_down", experts, per_expert=("weight", "input"))
    plan = make_plan(case.ids, experts, case.real)
    call = ExpertsCall(plan, given, gate_up, down, WeightCodes(gate_up, row_parts=2), WeightCodes(down))
    edge = torch.zeros_like(case.x, requires_grad=True)
    weights, *masters = leaves = [t.clone().requires_grad_() for t in (case.weights, case.gate_up, case.down)]
    journey = Journey(edge, gate_up.quantize("input", case.x, 1), weights, call)
    journey.edge = journey.work(journey.edge, (masters[0], masters[1]))
    y = journey.come_back()
    y.backward(case.dy)
    return Result(y.detach(), edge.grad, *(leaf.grad for leaf in leaves))


def plain_loop(case: Case, after: bool) -> Result:
    """One token and one expert at a time, gradients by autograd."""
    x, weights, gate_up, down = (t.clone().requires_grad_() for t in (case.x, case.weights, case.gate_up, case.down))
    rows = []
    for t in range(len(x)):
        total = torch.zeros_like(x[t])
        for k, expert in enumerate(case.ids[t].tolist()):
            if case.real is not None and not case.real[t]:
                continue
            gate, up = (gate_up[expert] @ x[t]).chunk(2)
            act = gate * torch.sigmoid(gate) * up
            total = total + (weights[t, k] * (down[expert] @ act) if after else down[expert] @ (weights[t, k] * act))
        rows.append(total)
    y = torch.stack(rows) if rows else (x * 0)
    grads = torch.autograd.grad(y, [x, weights, gate_up, down], case.dy, allow_unused=True, materialize_grads=True)
    return Result(y.detach(), *grads)


ROUTINGS = {
    "random": random_ids(40),
    "tokens per expert 0, 5, 0, 3 (R01)": torch.tensor([[1]] * 5 + [[3]] * 3),
    "all to the first (R02)": torch.zeros(8, 1, dtype=torch.int64),
    "all to the last (R02)": torch.full((8, 1), 3),
    "no tokens (R02)": torch.zeros(0, 2, dtype=torch.int64),
    "every expert for every token": torch.arange(4).expand(9, 4).contiguous(),
}


@pytest.mark.parametrize("gate", ["before", "after"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_unquantized_they_equal_a_plain_loop(routing: str, gate: str) -> None:
    """In float64, where both places of the gate weight are the same equation."""
    case = draw(ROUTINGS[routing], torch.float64, dim=10, hidden=6)
    got, want = run(case, recipe("fp32", f"gate={gate}")), plain_loop(case, gate == "after")
    for name in vars(want):
        assert torch.allclose(getattr(got, name), getattr(want, name), rtol=1e-9, atol=1e-18), name
    for expert in set(range(4)) - set(ROUTINGS[routing].flatten().tolist()):
        assert torch.count_nonzero(got.dgate_up[expert]) == torch.count_nonzero(got.ddown[expert]) == 0


@pytest.mark.parametrize("gate", ["before", "after"])
def test_padding_tokens_take_no_part(gate: str) -> None:
    """R06: their output is 0, and nothing flows back to them or from them, whatever they hold."""
    case = draw(random_ids(16), torch.float64, dim=10, hidden=6)
    real = torch.ones(16, dtype=torch.bool)
    real[[0, 7, 15]] = False
    got, want = run(replace(case, real=real), recipe("fp32", f"gate={gate}")), plain_loop(replace(case, real=real), False)
    poisoned = replace(case, real=real, x=torch.where(real[:, None], case.x, torch.nan))
    for name in vars(want):
        assert torch.allclose(getattr(got, name), getattr(want, name), rtol=1e-9, atol=1e-18), name
        assert torch.equal(getattr(run(poisoned, recipe("fp32", f"gate={gate}")), name), getattr(got, name))
    assert torch.count_nonzero(got.y[~real]) == torch.count_nonzero(got.dx[~real]) == 0


@pytest.mark.parametrize("name", ["bf16", "dsv3", "rowwise", "tensorwise", "delayed", "blockwise_grad"])
@pytest.mark.parametrize("routing", [r for r in ROUTINGS if "R0" in r])
def test_quantized_empty_experts_get_exact_zeros_in_poisoned_memory(name: str, routing: str) -> None:
    """R01, R02, R04: freed buffers full of NaN lie where the outputs will."""
    case = draw(ROUTINGS[routing])
    garbage = [torch.full_like(t, torch.nan) for t in (case.gate_up, case.down, case.x) for _ in range(3)]
    garbage += [torch.full((128 * n, width), torch.nan) for n in (1, 2, 4) for width in (DIM, HIDDEN, 2 * HIDDEN)]
    del garbage
    got = run(case, recipe(name))
    for part in vars(got).values():
        assert torch.isfinite(part).all()
    assert got.y.shape == case.x.shape
    used = set(case.ids.flatten().tolist())
    for expert in range(EXPERTS):
        for grad in (got.dgate_up[expert], got.ddown[expert]):
            assert (torch.count_nonzero(grad) > 0) == (expert in used)


def test_any_top_k_up_to_all_experts_drops_nothing() -> None:
    """R07: no capacity to clamp; every (token, choice) has a row."""
    ids = torch.arange(4).expand(8, 4)
    assert sum(make_plan(ids, 4, None).counts) == 32


Tile = tuple[int | None, int | None]
ROW, COLUMN, ALL, BLOCK = (1, None), (None, 1), (None, None), (128, 128)


@dataclass(frozen=True)
class Chain:
    """What a recipe says of the routed experts. Tiles along fprop's or dgrad's K, and along the tokens for wgrad."""

    operand: Tile = (1, 128)
    weight: Tile = BLOCK
    weight_dgrad: Tile | None = None
    gradient: Tile = (1, 128)
    operand_tokens: Tile = (128, 1)
    gradient_tokens: Tile = (128, 1)
    gradient_format: str = "e4m3"
    payload: str = "pow2"
    kind: str = "fp32"


CHAINS = {
    "dsv3": Chain(),
    "dsv3_pow2": Chain(kind="pow2"),
    "hybrid": Chain(gradient_format="e5m2"),
    "blockwise_grad": Chain(gradient=BLOCK, gradient_tokens=BLOCK),
    "rowwise": Chain(ROW, ROW, COLUMN, ROW, COLUMN, COLUMN, payload="fp32"),
    "tensorwise": Chain(ALL, ALL, None, ALL, ALL, ALL, payload="fp32"),
}


def emulated(case: Case, chain: Chain, after: bool) -> Result:
    """The contract's rows 9 to 16 and their backward, one expert at a time, exact sums."""
    form, kind = chain.gradient_format, chain.kind
    payload = emulation.quantize(case.x, "e4m3", chain.operand, chain.payload).values
    dy, weights = emulation.array(case.dy), emulation.array(case.weights)
    sent_dy = emulation.quantize(dy, form, chain.gradient, chain.payload).values
    copies = dy[:, None] * weights[:, :, None]  # fp32, one for every (token, choice)
    if chain.gradient == ALL:  # one scale for all that is sent
        copies = emulation.quantize(copies.reshape(-1, DIM), form, ALL, chain.payload).values.reshape(copies.shape)
    outs = np.zeros((*case.ids.shape, DIM))
    dxs, dweights = np.zeros((*case.ids.shape, DIM)), np.zeros(case.ids.shape)
    dgate_up, ddown = np.zeros(case.gate_up.shape), np.zeros(case.down.shape)
    for expert in range(EXPERTS):
        token, choice = (i.numpy() for i in torch.where(case.ids == expert))
        gate_weight = weights[token, choice][:, None]
        w1 = emulation.quantize(case.gate_up[expert], "e4m3", chain.weight, kind, row_parts=2).values
        w2 = emulation.quantize(case.down[expert], "e4m3", chain.weight, kind).values
        w1_dgrad, w2_dgrad = w1, w2
        if chain.weight_dgrad:
            w1_dgrad = emulation.quantize(case.gate_up[expert], "e4m3", chain.weight_dgrad, kind).values
            w2_dgrad = emulation.quantize(case.down[expert], "e4m3", chain.weight_dgrad, kind).values
        received = payload[token]
        h = emulation.quantize(bf16(matmul(received, w1.T)), "e4m3", (1, 128), kind, col_parts=2).values.astype(np.float64)
        gate, up = h[:, :HIDDEN], h[:, HIDDEN:]
        sigmoid = 1 / (1 + np.exp(-gate))
        act = gate * sigmoid * up
        operand = emulation.quantize(bf16(act if after else act * gate_weight), "e4m3", chain.operand, kind).values
        out = bf16(matmul(operand, w2.T))
        outs[token, choice] = out * gate_weight if after else out

        received_dy = sent_dy[token]
        if after:
            received_dy = copies[token, choice]
            if chain.gradient != ALL:
                received_dy = emulation.quantize(received_dy, form, chain.gradient, chain.payload).values
            dweights[token, choice] = (dy[token].astype(np.float64) * out).sum(1)
        dact = bf16(matmul(received_dy, w2_dgrad)).astype(np.float64)
        dy_tokens = emulation.quantize(received_dy, form, chain.gradient_tokens, chain.payload).values
        ddown[expert] = matmul(dy_tokens.T, emulation.quantize(operand, "e4m3", chain.operand_tokens, kind).values)
        if not after:
            dweights[token, choice] = (dact * act).sum(1)
            dact = dact * gate_weight
        dh = bf16(np.concatenate((dact * up * sigmoid * (1 + gate * (1 - sigmoid)), dact * gate * sigmoid), 1))
        along_n = emulation.quantize(dh, form, chain.gradient, kind, col_parts=2).values
        dxs[token, choice] = bf16(matmul(along_n, w1_dgrad))
        dh_tokens = emulation.quantize(dh, form, chain.gradient_tokens, kind, col_parts=2).values
        again = emulation.quantize(received, "e4m3", chain.operand_tokens, chain.payload).values
        dgate_up[expert] = matmul(dh_tokens.T, again)
    y, dx = bf16(outs.sum(1)), bf16(dxs.sum(1))
    return Result(*(torch.from_numpy(a) for a in (y, dx, dweights, dgate_up, ddown)))


@pytest.mark.parametrize("gate", ["before", "after"])
@pytest.mark.parametrize("name", CHAINS)
def test_quantized_they_equal_the_emulated_chain(name: str, gate: str) -> None:
    """Wgrad operands are re-tiled from received codes, and 128-token tiles restart at every expert.

    A sum may fall on the other side of a BF16 tie and move a code, which costs some 1e-4; a wrong tile or scale kind costs
    more than 1e-2, casting after the dispatch instead of before it 7e-4.
    """
    case = draw(random_ids(260))
    got, want = run(case, recipe(name, f"gate={gate}")), emulated(case, CHAINS[name], gate == "after")
    for part in vars(want):
        ours, theirs = getattr(got, part).double(), getattr(want, part).double()
        assert float((ours - theirs).norm() / theirs.norm()) < 5e-4, part


def test_what_is_kept_are_the_received_codes_and_swiglus_input_in_e4m3() -> None:
    """No BF16 activation: the payload as received, h through its cache, and the gate weights."""
    case, saved = draw(random_ids(260)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        run(case, recipe("dsv3"))
    rows = make_plan(case.ids, EXPERTS, None).rows
    masters = {case.weights.shape, case.gate_up.shape, case.down.shape}
    kept = [(t.dtype, tuple(t.shape)) for t in saved if t.shape not in masters]
    assert kept == [
        (torch.float8_e4m3fn, (rows, DIM)), (torch.float32, (rows, 2)),
        (torch.float8_e4m3fn, (rows, 2 * HIDDEN)), (torch.float32, (rows, 2)),
    ]  # fmt: skip


@pytest.mark.parametrize("gate", ["before", "after"])
@pytest.mark.parametrize("name", ["bf16", "dsv3", "rowwise", "tensorwise", "delayed", "blockwise_grad"])
def test_rows_for_any_choice_change_no_bit(name: str, gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where nobody waits for the counts: blocks of no expert follow the last one's."""
    case, given, given_rows = draw(random_ids(150)), recipe(name, f"gate={gate}"), []
    exact, make = run(case, given), exchange.Plan

    def plan(rows: int, *rest: Tensor) -> exchange.Plan:
        given_rows.append(rows)
        return make(rows, *rest)

    monkeypatch.setattr(exchange.Plan, "exact", lambda plan: plan)
    monkeypatch.setattr(exchange, "Plan", plan)
    got = run(case, given)
    monkeypatch.undo()
    for part, want in vars(exact).items():
        assert torch.equal(getattr(got, part), want), part
    assert given_rows[0] > make_plan(case.ids, EXPERTS, None).rows


def test_a_kept_swiglu_output_changes_no_bit() -> None:
    case = draw(random_ids(150))
    for a, b in zip(
        *(vars(run(case, recipe("dsv3", f"swiglu_output={o}"))).values() for o in ("keep", "recompute")), strict=True
    ):
        assert torch.equal(a, b)
