"""Weights cut over 2 and 4 ranks against one rank that holds them whole."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from one_step import made, result_of, sequences, share, step_alone, whole, whole_step
from processes import Ranks, on_ranks
from test_checkpoints import load_and_validate, train_and_save
from test_data_parallel import TOLERANCE, furthest
from test_expert_parallel import holds
from test_graph_of_ranks import WIDE
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsv3fp8.config import load_config
from dsv3fp8.data import Batch
from dsv3fp8.model.experts import RoutedExperts
from dsv3fp8.model.linear import Linear
from dsv3fp8.model.transformer import Transformer
from dsv3fp8.observe.plan.memory import Planned
from dsv3fp8.observe.plan.stash import load_of
from dsv3fp8.observe.plan.weights import units
from dsv3fp8.observe.plan.wire import transfers
from dsv3fp8.ops import shards
from dsv3fp8.ops.weights import WeightCodes
from dsv3fp8.parallel.config import ParallelConfig
from dsv3fp8.parallel.experts import expert_names
from dsv3fp8.parallel.placement import local_part
from dsv3fp8.precision import ledger
from dsv3fp8.precision.gathered import GatheredWeight
from dsv3fp8.precision.tiles import QuantizedTensor
from dsv3fp8.training.setup import build
from dsv3fp8.training.step import train_step, validate

LAYOUTS = [(2, 2, 1), (4, 4, 1), (4, 2, 1), (2, 2, 2), (4, 4, 4), (4, 4, 2), (4, 2, 2), (4, 2, 4)]  # ranks, shard, expert


def steps_of_rank(ranks: Ranks) -> dict[str, Any]:
    """A step of every recipe, with its accumulation."""
    return {
        f"{name} {parts}": result_of(*made(name, ranks=ranks), share(sequences(), ranks.index, ranks.count, parts), ranks)
        for name, parts in (("fp32", 2), ("bf16", 1), ("dsv3", 1))
    }


@pytest.mark.parametrize(("count", "cut", "expert"), LAYOUTS)
def test_a_step_is_that_of_one_rank(count: int, cut: int, expert: int) -> None:
    """Loss, raw gradients and norm; under dsv3 those of the tiles each rank holds, and the same bits on all ranks."""
    results = on_ranks(count, steps_of_rank, shard=cut, expert=expert)
    tiles = emulated(count, expert)
    for rank in results:
        holds(rank["fp32 2"], step_alone("fp32", 2), TOLERANCE["fp32"])
        holds(rank["bf16 1"], step_alone("bf16"), TOLERANCE["bf16"])
        error, where = furthest(rank["dsv3 1"]["gradients"], tiles)
        assert error < 1e-6, where
        for name, result in rank.items():
            assert result["norm"] == results[0][name]["norm"]
            moved = result["weights"], results[0][name]["weights"]
            assert all(np.array_equal(moved[0][each], moved[1][each]) for each in moved[0])


def plain_step(ranks: Ranks) -> dict[str, Any]:
    return result_of(*made("fp32", ranks=ranks), share(sequences(), ranks.index, ranks.count), ranks)


def test_experts_that_are_dealt_out_cut_and_copied() -> None:
    """Two replicas of two expert groups, whose experts are cut in two."""
    one = step_alone("fp32")
    for rank in on_ranks(8, plain_step, shard=4, expert=2):
        holds(rank, one, TOLERANCE["fp32"])


def two_steps(ranks: Ranks, name: str, device: str) -> dict[str, Any]:
    """Raw gradients of the second step, and the weights behind it; nothing is clipped."""
    model, optimizer = made(name, ranks=ranks, device=device, **(WIDE if device == "cuda" else {}))
    for seed in range(2):
        batch = [Batch(each.tokens, None) for each in share(sequences(seed), ranks.index, ranks.count)]
        train_step(model, optimizer, batch, 1e-3, 0.0, ranks)
    return whole(model, optimizer.gradients, ranks) | {f"of {k}": v for k, v in whole(model, model.state_dict(), ranks).items()}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(2))])
@pytest.mark.parametrize("name", ["bf16", "dsv3"])
def test_two_ranks_that_cut_their_weights_take_the_steps_of_two_that_copy_them(name: str, device: str) -> None:
    """To the bit, codes of updated weights among it: a sum of two has one order."""
    copied, cut = (on_ranks(2, two_steps, name, device, shard=shard, device=device)[0] for shard in (1, 2))
    assert [each for each in copied if not np.array_equal(copied[each], cut[each])] == []


def emulated(count: int, expert: int) -> dict[str, np.ndarray]:
    """The gradients of a quantized step: experts see the tokens of their group, all else those of its rank."""
    batch = sequences()

    def summed(parts: int) -> dict[str, Tensor]:
        sums: dict[str, Tensor] = {}
        for index in range(parts):
            model, optimizer = made("dsv3")
            given = whole_step(share(batch, 0, 1), model.config.mtp_depth)
            found = result_of(model, optimizer, share(batch, index, parts), given)["gradients"]
            sums = {name: sums[name] + each if sums else each for name, each in found.items()}
        return sums

    by_rank, by_group = summed(count), summed(count // expert)
    of_experts = set(expert_names(made("dsv3")[0]))
    return {name: (by_group if name in of_experts else by_rank)[name].numpy() for name in by_rank}


# Borders inside tiles and halves, rows that 4 ranks do not share evenly, three experts.
ODD = {"dim": 136, "ffn": 150, "expert_ffn": 141, "experts": 3, "top_k": 2, "vocab_size": 97, "q_latent": 130, "layers": 2}


def reading(model: Transformer) -> list[tuple[str, nn.Module, str, WeightCodes]]:
    """(name, module, parameter's name there, what reads it) of every weight that a GEMM reads."""
    found: list[tuple[str, nn.Module, str, WeightCodes]] = []
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            found.append((name, module, "weight", module.codes))
        elif isinstance(module, RoutedExperts):
            found.append((f"{name}.gate_up", module, "gate_up", module.gate_up_codes))
            found.append((f"{name}.down", module, "down", module.down_codes))
    return [*found, ("head", model, "embedding" if model.config.tied_head else "head", model.head_codes)]


def differing_codes(ranks: Ranks) -> tuple[list[str], int]:
    """(where the gathered operands are not bit for bit those of one rank, after an update; how many were compared)."""
    bad, compared = [], 0
    for name in ("dsv3", "rowwise", "delayed"):
        cut, optimizer = made(name, ranks=ranks, **ODD)
        alone, _ = made(name, **ODD)
        batch = share(sequences(), ranks.index, ranks.count)
        train_step(cut, optimizer, batch, lr=1e-2, clip_norm=1.0, ranks=ranks)
        alone.load_state_dict(whole(cut, cut.state_dict(), ranks))
        cut(batch[0].tokens)  # makes the codes of the new weights
        assert isinstance(cut, FSDPModule)
        for module in cut.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
        for (where, here, parameter, codes), (_, there, _, by_one) in zip(reading(cut), reading(alone), strict=True):
            got, want = getattr(here, parameter), getattr(there, parameter)
            assert isinstance(got, GatheredWeight)
            for mine, its in ((codes.fprop(got), by_one.fprop(want)), (codes.dgrad(got), by_one.dgrad(want))):
                pairs = [(mine, its)]
                if isinstance(mine, QuantizedTensor) and isinstance(its, QuantizedTensor):
                    assert (mine.tile, mine.shape, mine.row_parts) == (its.tile, its.shape, its.row_parts)
                    pairs = [(mine.codes.view(torch.uint8), its.codes.view(torch.uint8)), (mine.scale, its.scale)]
                compared += 1
                bad += [f"{name} {where}" for a, b in pairs if not torch.equal(a, b)]  # type: ignore[arg-type]
        for state, its in zip(cut.state_dict().items(), alone.state_dict().items(), strict=True):
            if ".states.weight." in state[0] and not torch.equal(state[1], its[1]):
                bad.append(f"{name} {state[0]}")
    return bad, compared


@pytest.mark.parametrize("count", [2, 4])
def test_gathered_codes_are_those_of_the_whole_weight(count: int) -> None:
    """Bit for bit, also where borders cut tiles, and after an update under amaxes that are kept."""
    for bad, compared in on_ranks(count, differing_codes, shard=count):
        assert not bad
        assert compared > 60


class Gathered(TorchDispatchMode):
    """The bytes that this rank hands to every all-gather of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allgather_base" in str(func):
            self.sizes.append(args[1].nbytes)
        return func(*args, **(kwargs or {}))


def padded(parameter: Tensor, count: int) -> int:
    """Values of the largest part: of rows, or of an odd number of experts, which are cut in rows."""
    rows = parameter.shape[1] if parameter.dim() == 3 else parameter.shape[0]
    return -(-rows // count) * parameter.numel() // rows


def what_travels(ranks: Ranks, name: str) -> dict[str, Any]:
    """One step of two micro-batches: bytes gathered, what they should be, casts, and parts that are of no use any more."""
    model, optimizer = made(name, ranks=ranks, **ODD)
    casts, cast = [0], shards.quantize
    shards.quantize = lambda *given, **named: (casts.append(1), cast(*given, **named))[1]
    coded = {f"{where}.weight" for where, _, _, codes in reading(model) if codes.quantizers.gemm.weight.quantized}
    coded |= {where.removesuffix(".weight") for where in coded}
    root = blocks = 0
    for where, parameter in model.named_parameters():
        wide = parameter.dim() == 1 or "router" in where
        size = (1 if where in coded else 4 if wide else 2) * padded(parameter, ranks.count)
        of_root = ("hidden_norm.weight", "embedding_norm.weight", ".0.norm.weight")
        if where in ("embedding", "head", "norm.weight") or where.endswith(of_root):
            root += size
        else:
            blocks += size
    with Gathered() as found:
        train_step(model, optimizer, share(sequences(), ranks.index, ranks.count, 2), 1e-3, 1.0, ranks)
    made_anew = sum(casts)
    even, optimizer = made(name, ranks=ranks)
    with Gathered() as evenly:
        train_step(even, optimizer, share(sequences(), ranks.index, ranks.count, 2), 1e-3, 1.0, ranks)
    layout, config = ParallelConfig(dp_shard=ranks.count), even.config
    plan = Planned(config, even.recipe, layout, units(config), load_of(config, layout, 80, 1.0), accumulate=2, moment_bytes=4)
    planned = [transfer.payload for transfer in transfers(plan, node=8) if transfer.what.startswith("gather ")]
    assert ranks.count * sum(evenly.sizes) == sum(planned)
    return {"bytes": sum(found.sizes), "want": 2 * (2 * blocks + root), "casts": made_anew, "coded": len(coded) // 2}


@pytest.mark.parametrize("name", ["dsv3", "bf16"])
def test_codes_travel_and_are_made_once_a_step(name: str) -> None:
    """A byte a weight that is quantized, else 2 or 4, forward and backward of both micro-batches, the root's once in each."""
    for rank in on_ranks(2, what_travels, name, shard=2):
        assert rank["bytes"] == rank["want"]
        assert rank["casts"] == rank["coded"]
        assert (rank["coded"] > 0) == (name == "dsv3")


def odd_steps(ranks: Ranks) -> dict[str, Any]:
    """Steps of models whose rows and experts do not divide, and what parts of one kind or another leave behind."""
    results = {}
    cases = {
        "odd": (("fp32",), ODD),
        "tied": (("fp32",), {"tied_head": True}),
        "no MTP": (("bf16",), {"mtp_depth": 0, "shared_experts": 0}),
        "none": (("dsv3",), {}),
        "norms_and_up": (("dsv3", "recompute=norms_and_up"), {}),
    }
    for case, (words, sizes) in cases.items():
        batch = share(sequences(), ranks.index, ranks.count, 2)
        results[case] = result_of(*made(*words, ranks=ranks, **sizes), batch, ranks)
    return results


def test_odd_sizes_a_tied_head_and_recomputation() -> None:
    alone = odd_steps(Ranks())
    for rank in on_ranks(4, odd_steps, shard=4):
        for case in ("odd", "tied", "no MTP"):
            holds(rank[case], alone[case], 2e-6)
        kept, again = rank["none"]["gradients"], rank["norms_and_up"]["gradients"]
        assert all(np.array_equal(kept[name], again[name]) for name in kept)


def faults(ranks: Ranks) -> dict[str, Any]:
    found: dict[str, Any] = {}
    model, optimizer = made("bf16", ranks=ranks)
    before = {name: local_part(each).clone() for name, each in model.state_dict().items()}
    handle = None
    if ranks.index == 1:
        handle = model.layers[0].attention.register_forward_hook(lambda *given: given[2] * float("nan"))
    batch = share(sequences(), ranks.index, ranks.count)
    result = train_step(model, optimizer, batch, 1e-3, 1.0, ranks)
    same = all(torch.equal(local_part(model.state_dict()[name]), each) for name, each in before.items())
    found["skipped"] = not result.applied and same and optimizer.steps == 0
    if handle is not None:
        handle.remove()
    found["goes on"] = train_step(model, optimizer, batch, 1e-3, 1.0, ranks).applied

    # Every expert but one is out of reach in each micro-batch: most get their first token in the last one.
    model, optimizer = made("bf16", ranks=ranks, experts=2, top_k=1, layers=2, mtp_depth=0)
    turns = iter([0, 1])

    def send_all_to_one(*_: Any) -> None:
        chosen = next(turns)
        for name, buffer in model.named_buffers():
            if name.endswith("router.bias"):
                buffer.copy_(torch.tensor([100.0, 0.0] if chosen == 0 else [0.0, 100.0]))

    handle = model.register_forward_pre_hook(send_all_to_one)
    found["load"] = train_step(model, optimizer, share(sequences(), ranks.index, ranks.count, 2), 1e-3, 1.0, ranks).expert_load
    found["first"] = {name: each for name, each in whole(model, optimizer.gradients, ranks).items() if "experts" in name}
    handle.remove()
    loss = validate(model, [Batch(batch[0].tokens, None)], torch.device("cpu"), ranks)
    found["after validation"] = all(isinstance(each, DTensor) for each in model.parameters())
    found["loss"] = loss
    return found


def test_steps_that_are_not_finite_and_experts_that_come_late() -> None:
    """O07, O10: a NaN on one rank moves nothing anywhere; a first gradient in the last micro-batch is a gradient."""
    alone = faults(Ranks())
    for rank in on_ranks(2, faults, shard=2):
        assert rank["skipped"]
        assert rank["goes on"]
        assert (rank["load"] > 0).all()
        assert furthest(rank["first"], {name: np.asarray(each) for name, each in alone["first"].items()})[0] < 2e-6
        assert rank["after validation"]
        assert rank["loss"] == pytest.approx(alone["loss"], abs=0.2)


def observed(ranks: Ranks) -> tuple[list[Any], list[Any]]:
    model, optimizer = made("dsv3", ranks=ranks)
    with ledger.observe_ops() as log:
        train_step(model, optimizer, share(sequences(), 0, 2), 1e-3, 1.0, ranks)
    rows = [
        (
            r.scope,
            r.node,
            r.column,
            r.computes_in,
            *((t.name, t.format, t.tile, t.scale, t.shape) for t in (*r.operands, *r.kept)),
        )
        for r in log.records
    ]
    return rows, [*log.unreported, *log.unsaved]


def test_the_ledger_tells_what_the_ops_of_a_cut_model_read() -> None:
    """All as on one rank, but for the embedding, whose rows were rounded before they were gathered."""
    want, _ = observed(Ranks())
    for rows, wrong in on_ranks(2, observed, shard=2):
        assert not wrong
        assert len(rows) == len(want)
        for row, its in zip(rows, want, strict=True):
            if row[1] == "embedding":
                assert ("w_embedding", "bf16") in [part[:2] for part in row[4:]]
            else:
                assert row == its


def parts_that_differ(ranks: Ranks) -> list[str]:
    """Built in parts against cut from the model of one rank."""
    config = load_config(["model=nano", "recipe=dsv3", "model.vocab_size=97", "training.seed=5"])
    alone, _ = build(config, torch.device("cpu"))
    model, optimizer = build(config, torch.device("cpu"), ranks)
    bad = []
    wanted = alone.state_dict()
    for name, each in whole(model, model.state_dict(), ranks).items():
        if not torch.equal(each, wanted[name]):
            bad.append(name)
    kept = sum(local_part(each).numel() for each in optimizer.first.values())
    return [*bad, f"keeps {kept}"] if kept > 0.6 * sum(each.numel() for each in alone.parameters()) else bad


@pytest.mark.parametrize(("cut", "expert"), [(1, 2), (2, 1), (2, 2)])
def test_a_model_built_in_parts_has_the_weights_of_one_process(cut: int, expert: int) -> None:
    bad = on_ranks(2, parts_that_differ, shard=cut, expert=expert)
    assert all(not each or (cut == 1 and len(each) == 1 and each[0].startswith("keeps")) for each in bad)


@pytest.fixture(scope="module")
def cut_in_four(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A checkpoint of four ranks that cut the weights, and each expert of two groups in two; its validation loss."""
    folder = tmp_path_factory.mktemp("cut")
    losses = {each["loss"] for each in on_ranks(4, train_and_save, folder, shard=4, expert=2)}
    assert len(losses) == 1
    return folder, losses.pop()


@pytest.mark.parametrize(("count", "cut", "expert"), [(1, 1, 1), (2, 1, 2), (2, 2, 1), (4, 2, 2), (4, 4, 2)])
def test_a_checkpoint_of_one_layout_loads_in_another(
    cut_in_four: tuple[Path, float], count: int, cut: int, expert: int
) -> None:
    """K01, K13: every part of every tensor, bit for bit, and the same validation loss."""
    folder, loss = cut_in_four
    if count == 1:
        loaded = [load_and_validate(Ranks(), folder)]
    else:
        loaded = on_ranks(count, load_and_validate, folder, shard=cut, expert=expert)
    for found in loaded:
        assert found["wrong"] == []
        assert found["steps"] == 2
        assert found["loss"] == pytest.approx(loss, rel=1e-6)
