"""The ledger: it changes no bit, reads formats off memory, and holds what autograd keeps against what ops reported."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import RECIPES, build, gradients, nano, recipe, windows
from torch import Tensor

from dsv3fp8.kernels.quantize.reference import quantize
from dsv3fp8.model.block import Block
from dsv3fp8.model.sequence import Sequences
from dsv3fp8.model.transformer import Transformer
from dsv3fp8.ops.exchange import Plan
from dsv3fp8.precision import ledger as ledger_module
from dsv3fp8.precision.formats import E4M3, E5M6
from dsv3fp8.precision.ledger import Ledger, describe, here, observe_ops
from dsv3fp8.precision.tiles import ROW_128, Tile

VARIANTS = [
    *((name,) for name in RECIPES), ("dsv3", "recompute=norms"), ("dsv3", "recompute=norms_and_up"),
    ("delayed", "recompute=norms_and_up"), ("dsv3", "gate=after"), ("bf16", "gate=after"), ("dsv3", "swiglu_output=keep"),
]  # fmt: skip


def step(*names: str) -> tuple[Transformer, dict[str, Tensor]]:
    config = nano()
    model = build(config, recipe(*names))
    return model, gradients(model, [windows(config, seed=s) for s in range(2)])


@pytest.mark.parametrize("names", VARIANTS, ids="+".join)
def test_looking_changes_no_bit_and_everything_kept_is_reported(names: tuple[str, ...]) -> None:
    """Two micro-batches: gradients and kept scales with the ledger on are those with it off."""
    model, want = step(*names)
    with observe_ops() as ledger:
        observed, got = step(*names)
    assert want.keys() == got.keys()
    assert all(torch.equal(want[key], got[key]) for key in want)
    for (key, a), b in zip(model.state_dict().items(), observed.state_dict().values(), strict=True):
        assert torch.equal(a, b), key
    assert ledger.unreported == []
    assert ledger.unsaved == []
    assert ledger.kept_bytes(padding=True) == sum(saved.bytes for saved in ledger.saved)
    assert {r.scope for r in ledger.records} == {"", "layers.0", "layers.1", "mtp.0"}


def test_off_no_tensor_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("an op reported without a ledger")

    for name in ("describe", "Node", "Ledger", "_computes_in"):
        monkeypatch.setattr(ledger_module, name, refuse)
    step("dsv3")


def test_off_nothing_is_recorded_and_an_inner_ledger_hands_back_to_the_outer() -> None:
    assert here("q_a") is None
    with observe_ops() as outer:
        with observe_ops() as inner:
            assert here("q_a").ledger is inner  # type: ignore[union-attr]
        assert here("q_a").ledger is outer  # type: ignore[union-attr]
    assert ledger_module.active() is None
    step("dsv3")
    assert outer.records == inner.records == []


def test_backward_outside_of_the_ledger_is_not_recorded() -> None:
    config = nano()
    model, batch = build(config, recipe("dsv3")), windows(config)
    with observe_ops() as ledger:
        losses = model(batch)
    count = len(ledger.records)
    model.objective(losses, losses.totals).backward()
    assert len(ledger.records) == count > 0
    assert {r.column for r in ledger.records} == {"forward"}


def test_without_a_graph_ops_are_recorded_and_nothing_is_kept() -> None:
    config = nano()
    with observe_ops() as ledger, torch.no_grad():
        build(config, recipe("dsv3"))(windows(config))
    assert ledger.find("attention", scope="layers.1")
    assert ledger.kept_bytes() == 0
    assert ledger.unsaved == ledger.saved == []


@pytest.mark.parametrize("name", ["dsv3", "tensorwise", "delayed"])
@pytest.mark.parametrize("tokens", [0, 1, 129])
def test_few_tokens_and_empty_experts_are_observed_too(name: str, tokens: int) -> None:
    config = nano(context=129)
    block = Block(config, recipe(name), dense=False)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    x = torch.randn(tokens, config.dim).bfloat16().requires_grad_()
    with observe_ops() as ledger:
        block(x, Sequences.of(config, torch.zeros(1, tokens, dtype=torch.int64), None))[0].float().sum().backward()
    assert ledger.find("dispatch")[0].outputs[0].shape[1] == config.dim
    assert ledger.unreported == ledger.unsaved == []


def test_it_survives_json() -> None:
    with observe_ops() as ledger:
        step("dsv3")
    back = Ledger.from_dict(json.loads(json.dumps(ledger.to_dict())))
    assert back.records == ledger.records
    assert back.saved == ledger.saved


@pytest.mark.parametrize("kind", ["fp32", "pow2"])
def test_the_scale_kind_is_read_off_the_bits(kind: str) -> None:
    """Not off what the tensor says of itself."""
    x = quantize(torch.randn(40, 300), E4M3, ROW_128, kind)
    record = describe("x", dataclasses.replace(x, scale_kind="fp32" if kind == "pow2" else "pow2"))
    assert (record.format, record.tile, record.scale, record.bytes) == ("e4m3", "1x128", kind, 40 * 300 + 40 * 3 * 4)


def test_packed_e5m6_takes_one_and_a_half_bytes_and_its_scale() -> None:
    record = describe("x", quantize(torch.randn(10, 256), E5M6, ROW_128, "pow2"))
    assert (record.format, record.bytes) == ("e5m6", 10 * (256 * 3 // 2 + 2 * 4))


def test_a_scale_grid_that_is_none_of_its_tile_is_refused() -> None:
    x = quantize(torch.randn(200, 300), E4M3, ROW_128)
    with pytest.raises(ValueError, match=r"tiles 128x128 has \(2, 3\) scales, not \(200, 3\)"):
        describe("x", dataclasses.replace(x, tile=Tile(128, 128)))


@pytest.mark.parametrize(("name", "row"), [("dsv3", 48 + 4), ("bf16", 96), ("rowwise", 48 + 4), ("tensorwise", 48)])
def test_bytes_on_the_wire(name: str, row: int) -> None:
    """Dispatch T k (D + 4 ceil(D / 128)) and the mirrored gradient; combine and its mirror 2 T k D."""
    config = nano(mtp_depth=0)
    with observe_ops() as ledger:
        gradients(build(config, recipe(name)), [windows(config, batch=2, length=20)])
    sent = {(r.node, r.column): r.wire for r in ledger.records if r.wire}
    copies = 40 * config.top_k
    assert sent == {
        ("dispatch", "forward"): copies * row, ("combine", "backward"): copies * row,
        ("combine", "forward"): copies * 96, ("dispatch", "backward"): copies * 96,
    }  # fmt: skip


def hidden_tensors(node: Any, seen: set[int]) -> Iterator[Tensor]:
    """Tensors that an op's context, closures and dataclasses hold beside autograd; masters, codes and modules apart."""
    stack = list(vars(node).values()) if hasattr(node, "__dict__") else []
    while stack:
        value = stack.pop()
        if id(value) in seen or isinstance(value, (torch.nn.Module, Ledger, Plan)):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            stack += value
        elif type(value).__name__ != "WeightCodes" and dataclasses.is_dataclass(value):
            stack += [getattr(value, f.name) for f in dataclasses.fields(value)]
        elif closure := getattr(value, "__closure__", None):
            stack += [cell.cell_contents for cell in closure]


@pytest.mark.parametrize("names", VARIANTS, ids="+".join)
def test_no_op_holds_a_tensor_beside_what_it_saves(names: tuple[str, ...]) -> None:
    """Saved-tensor hooks see what goes through autograd only; the plan of the exchange, reported as held, is all there is."""
    config = nano()
    losses = build(config, recipe(*names))(windows(config))
    seen: set[int] = set()
    nodes, found = [(losses.loss + losses.balance + losses.mtp[0]).grad_fn], []
    visited = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        found += [(node.name(), t.shape) for t in hidden_tensors(node, seen) if t.numel()]
        nodes += [following for following, _ in node.next_functions]
    assert len(visited) > 100
    assert found == []


def test_the_plan_of_the_exchange_is_reported_as_held() -> None:
    with observe_ops() as ledger:
        step("dsv3")
    held = {r.node: sum(t.bytes for t in r.held) for r in ledger.records if r.held}
    assert held.keys() == {"dispatch"}
    assert held["dispatch"] > 0
