"""The kernels of the exchange, the router and the residual sum: compiled for Hopper, on a GPU, and in the interpreter.

The interpreter runs interpreted_moe.py in a process of its own, because TRITON_INTERPRET=1 holds for a whole process.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", minversion="3.6")

from interpreter import run_interpreted
from placement import departing, place
from test_triton import check
from test_triton_compiles import compiled, resources

from dsv3fp8.kernels.exchange import reference as exchange_reference
from dsv3fp8.kernels.exchange import triton as exchange
from dsv3fp8.kernels.exchange.reference import capacity
from dsv3fp8.kernels.quantize.device import row_tiles
from dsv3fp8.kernels.quantize.reference import quantize
from dsv3fp8.kernels.residual import reference as residual_reference
from dsv3fp8.kernels.residual import triton as residual
from dsv3fp8.kernels.router import reference as router_reference
from dsv3fp8.kernels.router import triton as router
from dsv3fp8.kernels.router.reference import Rule
from dsv3fp8.precision.formats import E4M3
from dsv3fp8.precision.tiles import ROW_128, QuantizedTensor

__all__ = ["compiled"]  # the fixture

V3 = Rule("sigmoid", 8, 8, 4, True, 2.5)
V2_LITE = Rule("softmax", 6, 1, 1, False, 1.0)

NO_WIDTH = ("plan", "pick", "route V3", "route V2-Lite")


def launches(cols: int) -> dict[str, Callable[[], object]]:
    """Every kernel in every form that a recipe takes, at this width, and the router of V3 and V2-Lite."""
    tokens, top_k, experts = 128, 8, 8
    ids, real = torch.zeros(tokens, top_k, dtype=torch.int64), torch.ones(tokens, dtype=torch.bool)
    rows = capacity(tokens, top_k, experts)
    copy, slot = torch.zeros(rows, dtype=torch.int32), torch.zeros(tokens, top_k, dtype=torch.int32)
    x, out, weights = torch.zeros(tokens, cols).bfloat16(), torch.zeros(rows, cols).bfloat16(), torch.zeros(tokens, top_k)
    codes = row_tiles(tokens, cols, E4M3, "pow2", x.device)

    def routed(rule: Rule, experts: int) -> tuple[Callable[[], object], ...]:
        logits, kept = torch.zeros(tokens, experts), None if rule is V2_LITE else real
        _, _, given = router_reference.forward(logits, logits[0], rule, 2, kept)
        return (
            lambda: router.forward(logits, logits[0], rule, 2, kept),
            lambda: router.backward(given, torch.zeros(tokens, rule.top_k), torch.zeros(()), rule),
        )

    return {
        "plan": lambda: (exchange.lay_out(ids, experts, real, rows), exchange.lay_out(ids, 256, None, rows)),
        "dispatch codes": lambda: exchange.dispatch(codes, copy, slot),
        "dispatch bf16": lambda: exchange.dispatch(x, copy, slot),
        "pick": lambda: exchange.pick(weights, copy), "combine": lambda: exchange.combine(out, slot),
        "combine weighted": lambda: exchange.combine(out, slot, weights),
        "weigh": lambda: exchange.weigh(x, copy, slot, weights, out, x.dtype),
        "weigh cast": lambda: exchange.weigh_cast(x, copy, slot, weights, out, E4M3, "pow2"),
        "residual": lambda: residual.forward(x, x, x), "residual fp32": lambda: residual.forward(x, x.float()),
        "route V3": lambda: [launch() for launch in routed(V3, 256)],
        "route V2-Lite": lambda: [launch() for launch in routed(V2_LITE, 64)],
    }  # fmt: skip


WIDTHS = [(case, cols) for case in launches(128) for cols in (24, 200, 1024, 7168) if cols == 1024 or case not in NO_WIDTH]


@pytest.mark.parametrize(("case", "cols"), WIDTHS)
def test_nothing_spills_and_wide_rows_move_16_bytes_at_a_time(
    case: str, cols: int, compiled: list[Any], tmp_path: Path
) -> None:
    launches(cols)[case]()
    assert compiled
    for kernel in compiled:
        used, ptx = resources(kernel, tmp_path), kernel.asm["ptx"]
        assert (used["STACK"], used["LOCAL"]) == (0, 0), case
        assert not re.search(r"div\.(full|approx)", ptx)
        assert "atom" not in ptx
        if cols >= 1024 and re.match("dispatch|combine|weigh|residual", case):
            assert re.search(r"ld\.global\.v(4\.b32|2\.b64)", ptx)
            assert re.search(r"st\.global\.v(4\.b32|2\.b64)", ptx) or "weigh" in case


TOKEN_COUNTS = [0, 1, 16, 17, *range(100, 100 + 46 * 37, 37)]


def test_fifty_numbers_of_tokens_run_the_same_kernels(compiled: list[Any]) -> None:
    """P01: one variant of each kernel, whatever the loads are."""
    for tokens in TOKEN_COUNTS:
        ids, weights = torch.zeros(tokens, 2, dtype=torch.int64), torch.zeros(tokens, 2)
        made = exchange.lay_out(ids, 8, None, capacity(tokens, 2, 8))
        x, out = torch.zeros(tokens, 256).bfloat16(), torch.zeros(len(made.copy), 256).bfloat16()
        exchange.dispatch(row_tiles(tokens, 256, E4M3, "fp32", x.device), made.copy, made.slot)
        exchange.dispatch(x, made.copy, made.slot)
        exchange.pick(weights, made.copy)
        exchange.combine(out, made.slot)
        exchange.weigh_cast(x, made.copy, made.slot, weights, out, E4M3, "fp32")
        residual.forward(x, x, x)
        logits = torch.zeros(tokens, 8)
        _, _, kept = router.forward(logits, logits.new_zeros(8), dataclasses.replace(V2_LITE, top_k=2), 1, None)
        router.backward(kept, weights, torch.zeros(()), dataclasses.replace(V2_LITE, top_k=2))
    assert len(TOKEN_COUNTS) == 50
    # Ten kernels: dispatch has one for codes and one for values, and counting its copies takes one with PARTS for few of them.
    assert len({id(kernel) for kernel in compiled}) <= 16


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN, or numbers that are out of every range, wherever a kernel has yet to write."""
    empty = torch.empty

    def filled(*shape: object, **options: object) -> Tensor:
        out = empty(*shape, **options)  # type: ignore[call-overload]
        return out.fill_(torch.nan if out.is_floating_point() else 113)

    monkeypatch.setattr(torch, "empty", filled)
    monkeypatch.setattr(torch, "empty_like", lambda x: filled(x.shape, dtype=x.dtype, device=x.device))


def draw_ids(tokens: int, top_k: int, experts: int, seed: int = 0, liked: float = 1.0) -> Tensor:
    """Unequal loads: the first experts are chosen more often."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=generator, device="cuda")
    return (scores - liked * torch.arange(experts, device="cuda") / experts).topk(top_k).indices


SIZES = [  # tokens, choices, experts
    (0, 2, 4), (1, 1, 1), (16, 8, 256), (17, 2, 5), (127, 8, 8), (128, 1, 1), (129, 6, 64), (4096, 8, 8), (4099, 8, 256),
    (32768, 6, 64), (131072, 8, 256),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("tokens", "top_k", "experts"), SIZES)
def test_on_a_gpu_plans_equal_the_reference(tokens: int, top_k: int, experts: int, masked: bool, poisoned: None) -> None:
    ids = draw_ids(tokens, top_k, experts)
    real = torch.rand(tokens, device="cuda") > 0.2 if masked else None
    rows = capacity(tokens, top_k, experts)
    got, want = (kernels.lay_out(ids, experts, real, rows) for kernels in (exchange, exchange_reference))
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(ours, theirs)
    if tokens < 200:
        copy, _ = place(ids.cpu().numpy(), experts, None if real is None else real.cpu().numpy())
        assert got.copy[: len(copy)].tolist() == copy.tolist()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "cols"),
    [*((*size, 200) for size in SIZES[:8]), *((129, 6, 64, cols) for cols in (24, 1024, 1408)), (4099, 8, 256, 7168)],
)
def test_on_a_gpu_what_travels_equals_the_reference_to_the_bit(
    tokens: int, top_k: int, experts: int, cols: int, poisoned: None
) -> None:
    made = exchange.lay_out(draw_ids(tokens, top_k, experts), experts, None, capacity(tokens, top_k, experts))
    x, weights = torch.randn(tokens, cols, device="cuda").bfloat16(), torch.rand(tokens, top_k, device="cuda")
    for sent in (quantize(x, E4M3, ROW_128, "pow2"), x, x.float()):
        got, want = (kernels.dispatch(sent, made.copy, made.slot) for kernels in (exchange, exchange_reference))
        if isinstance(got, QuantizedTensor):
            check(got, want)
        else:
            assert torch.equal(got, want)
    rows = torch.where((made.copy >= 0)[:, None], torch.randn(len(made.copy), cols, device="cuda"), 0).bfloat16()
    for given in (None, weights):
        assert torch.equal(exchange.combine(rows, made.slot, given), exchange_reference.combine(rows, made.slot, given))
    assert torch.equal(exchange.pick(weights, made.copy), exchange_reference.pick(weights, made.copy))
    given_all = (x, made.copy, made.slot, weights, rows)
    ours, theirs = (kernels.weigh_cast(*given_all, E4M3, "pow2") for kernels in (exchange, exchange_reference))
    check(ours[0], theirs[0])
    assert torch.allclose(ours[1], theirs[1], rtol=1e-4, atol=1e-3)
    assert torch.equal(exchange.weigh(*given_all, x.dtype)[0], exchange_reference.weigh(*given_all, x.dtype)[0])
    assert torch.equal(residual.forward(x, x + 1, x.float() * 3), residual_reference.forward(x, x + 1, x.float() * 3))


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [size for size in SIZES[:8] if size[0]])
def test_on_a_gpu_rows_that_leave_a_rank_all_have_their_scales(tokens: int, top_k: int, experts: int, poisoned: None) -> None:
    """Without inert rows: 1 to 129 tokens make numbers of rows that no block divides."""
    made = departing(exchange.lay_out(draw_ids(tokens, top_k, experts), experts, None, capacity(tokens, top_k, experts)))
    x, weights = torch.randn(tokens, 200, device="cuda").bfloat16(), torch.rand(tokens, top_k, device="cuda")
    sent = quantize(x, E4M3, ROW_128, "pow2")
    check(*(kernels.dispatch(sent, made.copy, made.slot) for kernels in (exchange, exchange_reference)))
    given = (x, made.copy, made.slot, weights, torch.randn(len(made.copy), 200, device="cuda").bfloat16())
    check(*(kernels.weigh_cast(*given, E4M3, "pow2")[0] for kernels in (exchange, exchange_reference)))


RULES = [
    (256, V3), (64, V2_LITE), (8, dataclasses.replace(V3, groups=1, kept_groups=1)),
    (3, dataclasses.replace(V2_LITE, top_k=2)), (160, dataclasses.replace(V2_LITE, groups=8, kept_groups=3)),
    (1024, dataclasses.replace(V2_LITE, top_k=8)),
]  # fmt: skip


def routed(kernels: Any, logits: Tensor, rule: Rule, sequences: int, real: Tensor | None) -> dict[str, Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(3)
    bias = torch.randn(logits.shape[1], generator=generator, device="cuda") * 0.1
    weights, balance, kept = kernels.forward(logits, bias, rule, sequences, real)
    dweights = torch.randn(weights.shape, generator=generator, device="cuda")
    dlogits = kernels.backward(kept, dweights, torch.tensor(0.3, device="cuda"), rule)
    return {"weights": weights, "balance": balance, **kept._asdict(), "dlogits": dlogits}


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("sequences", "length"), [(1, 4096), (4, 1025), (3, 17)])
@pytest.mark.parametrize(("experts", "rule"), RULES)
def test_on_a_gpu_scores_and_ids_are_torchs(
    experts: int, rule: Rule, sequences: int, length: int, masked: bool, poisoned: None
) -> None:
    """To the bit; what sums over experts or choices but for their order."""
    logits = torch.randn(sequences * length, experts, device="cuda") * 3
    logits[0], logits[1] = -200.0, 0.0
    real = torch.rand(len(logits), device="cuda") > 0.3 if masked else None
    got, want = (routed(kernels, logits, rule, sequences, real) for kernels in (router, router_reference))
    for part, value in want.items():
        if value is None or part in ("scores", "ids", "chosen", "real", "tokens"):
            assert value is None if got[part] is None else torch.equal(got[part], value), part
        else:
            assert got[part].shape == value.shape
            assert torch.allclose(got[part], value, rtol=3e-6, atol=1e-6), part


@pytest.mark.gpu
def test_on_a_gpu_forty_times_the_same_gives_one_result() -> None:
    """E01, E04: no sum takes another order."""
    ids, real = draw_ids(4099, 8, 256), torch.rand(4099, device="cuda") > 0.1
    logits = torch.randn(4099, 256, device="cuda")
    x = torch.randn(4099, 1024, device="cuda").bfloat16()
    first = None
    for _ in range(40):
        made = exchange.lay_out(ids, 256, real, capacity(4099, 8, 256))
        rows = exchange.dispatch(x, made.copy, made.slot)
        assert isinstance(rows, Tensor)
        parts = routed(router, logits, V3, 1, real)
        _, dots = exchange.weigh(x, made.copy, made.slot, parts["weights"], rows, x.dtype)
        result = [*made, rows, exchange.combine(rows, made.slot, parts["weights"]), dots, *parts.values()]
        first = first or result
        for one, other in zip(first, result, strict=True):
            assert torch.equal(one, other)


@pytest.fixture
def _waiting_again() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.usefixtures("_waiting_again")
@pytest.mark.parametrize("overrides", [(), ("gate=after",)], ids="+".join)
@pytest.mark.parametrize("name", ["dsv3", "dsv3_pow2"])
def test_on_a_gpu_a_layer_waits_for_no_count_and_a_ledger_changes_no_bit(name: str, overrides: tuple[str, ...]) -> None:
    """Under a ledger rows are exact, else as many as any choice may need."""
    from support import nano, recipe

    from dsv3fp8.model.block import Block
    from dsv3fp8.model.sequence import Sequences
    from dsv3fp8.precision.ledger import observe_ops

    config = nano(dim=256, expert_ffn=128, experts=8, top_k=3, head_nope=64, head_rope=64, head_v=64, context=512)
    block = Block(config, recipe(name, *overrides), dense=False).cuda()
    generator = torch.Generator(device="cuda").manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(0, 0.05, generator=generator)
    tokens = torch.zeros(2, 200, dtype=torch.int64, device="cuda")
    documents = torch.where(torch.arange(200, device="cuda") < 180, 0, -1).expand(2, 200)
    sequences = dataclasses.replace(Sequences.of(config, tokens, None), real=(documents >= 0).flatten())
    x, dy = (torch.randn(400, 256, generator=generator, device="cuda").bfloat16() for _ in range(2))
    x.requires_grad_()

    def step() -> list[Tensor]:
        y, balance = block.feed_forward(x, sequences)
        inputs = [x, *(p for n, p in block.feed_forward.named_parameters())]
        return [y, *torch.autograd.grad((y * dy).sum() + balance, inputs)]

    with observe_ops() as ledger:
        observed = step()
    assert ledger.find("dispatch")
    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    alone = step()
    torch.cuda.set_sync_debug_mode("default")
    for one, other in zip(observed, alone, strict=True):
        assert torch.equal(one, other)


def test_kernels_in_the_interpreter() -> None:
    run_interpreted("interpreted_moe.py")
