"""Dispatch and combine of one layer over expert ranks: in E4M3 with its cast, and in BF16, each alone on the wire."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.distributed as dist

from dsv3fp8.kernels import backend
from dsv3fp8.observe.bench.rates import Call
from dsv3fp8.observe.bench.scale.launch import Report
from dsv3fp8.observe.bench.timing import event_ms, one_line
from dsv3fp8.ops.exchange import combine, dispatch
from dsv3fp8.parallel.ranks import Ranks, join
from dsv3fp8.parallel.wire import GroupWire, make_plan
from dsv3fp8.precision.formats import E4M3
from dsv3fp8.precision.tiles import ROW_128
from dsv3fp8.training.checks import select_device

CALLS = 10  # in one sample
CAST, CODES, PLAIN, BACK = "dispatch in E4M3, cast counted", "dispatch in E4M3", "dispatch in BF16", "combine in BF16"
ALONE_CODES, ALONE_PLAIN = "all_to_all alone, the bytes of E4M3", "all_to_all alone, the bytes of BF16"


@dataclass(frozen=True)
class ExchangeSize:
    """Tokens of each rank, their width, how many of how many experts they go to."""

    name: str
    tokens: int
    dim: int
    top_k: int
    experts: int


FULL = (ExchangeSize("medium", 16384, 2048, 4, 16), ExchangeSize("V3", 4096, 7168, 8, 256))
TINY = (ExchangeSize("tiny", 64, 256, 2, 8),)


def measure_exchange(report: Report, sizes: Sequence[ExchangeSize], device_name: str, count: int, rounds: int) -> None:
    """Reports of each size {way: {"ms": samples of this rank, "sent": bytes that leave it, "captured": whether replayed}}."""
    device = select_device(device_name)
    with join(device, count) as ranks:
        for size in sizes:
            torch.manual_seed(ranks.index)
            report(size.name, {"size": asdict(size), "ways": _measure(size, device, ranks, rounds)})


def _measure(size: ExchangeSize, device: torch.device, ranks: Ranks, rounds: int) -> dict[str, object]:
    group = ranks.expert_group
    assert group is not None
    x = torch.empty(size.tokens, size.dim, dtype=torch.bfloat16, device=device).normal_()
    ids = torch.rand(size.tokens, size.experts, device=device).topk(size.top_k, -1).indices
    plan = make_plan(ids, size.experts, None, group)
    assert isinstance(plan.wire, GroupWire)
    codes = backend.quantize(x, E4M3, ROW_128, "pow2")
    rows = torch.empty(plan.rows, size.dim, dtype=torch.bfloat16, device=device).normal_()
    row_bytes = {1: size.dim + codes.scale.shape[1] * codes.scale.element_size(), 2: 2 * size.dim}
    leaving, arriving = plan.wire.leaving, plan.wire.arriving
    away, home = sum(leaving) - leaving[ranks.index], sum(arriving) - arriving[ranks.index]

    def alone(width: int) -> Call:
        given = torch.zeros(sum(leaving), width, dtype=torch.uint8, device=device)
        taken = torch.empty(sum(arriving), width, dtype=torch.uint8, device=device)
        return partial(dist.all_to_all_single, taken, given, arriving, leaving, group=group)

    ways: dict[str, tuple[Call, int]] = {
        CAST: (lambda: dispatch(backend.quantize(x, E4M3, ROW_128, "pow2"), plan), away * row_bytes[1]),
        CODES: (lambda: dispatch(codes, plan), away * row_bytes[1]),
        PLAIN: (lambda: dispatch(x, plan), away * row_bytes[2]),
        BACK: (lambda: combine(rows, plan), home * row_bytes[2]),
        ALONE_CODES: (alone(row_bytes[1]), away * row_bytes[1]),
        ALONE_PLAIN: (alone(row_bytes[2]), away * row_bytes[2]),
    }
    samplers = {name: _sampler(call, device, ranks) for name, (call, _) in ways.items()}
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):  # all ways take turns
        for name, (sample, _) in samplers.items():
            ranks.wait()
            samples[name].append(sample() / CALLS)
    return {
        name: {"ms": samples[name], "sent": sent, "captured": samplers[name][1]} for name, (_, sent) in ways.items()
    }  # fmt: skip


def _sampler(call: Call, device: torch.device, ranks: Ranks) -> tuple[Callable[[], float], bool]:
    """(milliseconds of CALLS calls, whether they replay a CUDA graph). All ranks do the same."""

    def several() -> None:
        for _ in range(CALLS):
            call()

    call()
    if device.type != "cuda":
        return lambda: _host_ms(several), False
    torch.cuda.synchronize(device)
    graph, failed = torch.cuda.CUDAGraph(), 0
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's own thread looks at events meanwhile
            several()
    except RuntimeError as error:
        print(f"exchange: not recorded: {one_line(error)}", flush=True)
        failed = 1
    if ranks.largest(failed):
        return lambda: event_ms(several), False
    graph.replay()
    torch.cuda.synchronize(device)
    return lambda: event_ms(graph.replay), True


def _host_ms(call: Call) -> float:
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e3
