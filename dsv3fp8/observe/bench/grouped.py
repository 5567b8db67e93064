"""The experts' GEMMs: what a run takes, beside torch's BF16 grouped product."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F

from dsv3fp8.kernels import backend
from dsv3fp8.observe.bench import peers
from dsv3fp8.observe.bench.casts import COPY, copy_way
from dsv3fp8.observe.bench.operands import Setting, columns, rows, weight
from dsv3fp8.observe.bench.rates import Case, Table, Way
from dsv3fp8.ops.exchange import Plan, make_plan
from dsv3fp8.ops.grouped import grouped_rows, grouped_wgrad

PEER = "F.grouped_mm BF16"
SPEC = "expert_gate_up"


def grouped_tables(setting: Setting) -> list[Table]:
    """fprop, dgrad and wgrad of the grouped shapes, equal groups; and wgrad's bytes where its output bounds it."""
    tables = []
    for gemm, what in (
        ("fprop", "x [rows, K] · W [E, N, K]ᵀ, E4M3 1×128 · 128×128 → BF16"),
        ("dgrad", "dY [rows, N] · W [E, N, K], E4M3 1×128 · 128×128 → BF16"),
        ("wgrad", "dYᵀ · x of each expert, E4M3 128×1 · 128×1 → FP32, beta 0 (torch's: BF16 → BF16)"),
    ):
        cases = [
            Case(_named(shape), 2.0 * math.prod(shape), partial(grouped_ways, setting, gemm, shape))
            for shape in setting.sizes.grouped
        ]
        about = f"{what}; operands are quantized before the clock starts"
        tables.append(Table(f"grouped {gemm}", f"Grouped {gemm}", "TFLOP/s", PEER, about, cases))
    small = [shape for shape in setting.sizes.grouped if shape[1] <= 256]
    bytes_about = "bytes of operands, scales and the FP32 output, each once, beside a device copy"
    tables.append(
        Table(
            "grouped wgrad, bytes", "Grouped wgrad of small groups, by its bytes", "GB/s", COPY, bytes_about,
            [Case(_named(shape), float(_wgrad_bytes(shape)), partial(_bytes_ways, setting, shape)) for shape in small],
        )
    )  # fmt: skip
    return tables


def _named(shape: tuple[int, int, int, int]) -> str:
    experts, tokens, n, k = shape
    return f"{experts} × {tokens}, {k} → {n}"


def _wgrad_bytes(shape: tuple[int, int, int, int]) -> int:
    experts, tokens, n, k = shape
    return experts * (tokens * (n + k) + -(-tokens // 128) * (n + k) * 4 + 4 * n * k)


def _bytes_ways(setting: Setting, shape: tuple[int, int, int, int]) -> list[Way]:
    ours = next(way for way in _wgrad_ways(setting, shape) if way.name == "ours")
    return [ours, copy_way(setting)]


def grouped_ways(setting: Setting, gemm: str, shape: tuple[int, int, int, int]) -> list[Way]:
    """One of the three GEMMs of y = x W^T of each expert. shape: experts, tokens each, N, K."""
    return _wgrad_ways(setting, shape) if gemm == "wgrad" else _row_ways(setting, gemm, shape)


def _plan(setting: Setting, experts: int, tokens: int) -> tuple[Plan, torch.Tensor]:
    """Equal groups, as the exchange would lay them out, and the ends that torch's product takes."""
    ids = torch.arange(experts * tokens, device=setting.device)[:, None] // tokens
    ends = torch.arange(1, experts + 1, dtype=torch.int32, device=setting.device) * tokens
    return make_plan(ids, experts, None).exact(), ends


def _row_ways(setting: Setting, gemm: str, shape: tuple[int, int, int, int]) -> list[Way]:
    experts, tokens, n, k = shape
    plan, ends = _plan(setting, experts, tokens)
    inner, outer = (k, n) if gemm == "fprop" else (n, k)
    (a, a_codes), (w, w_codes) = rows(setting, experts * tokens, inner), weight(setting, experts, outer, inner)
    spec = setting.recipe.linear(SPEC)
    chosen = backend.choose_grouped(a_codes, w_codes, spec, gemm, torch.bfloat16)
    ways = [
        Way("ours", lambda: [lambda: grouped_rows(a_codes, w_codes, plan, torch.bfloat16, spec, gemm)], note=str(chosen)),
        Way(PEER, lambda: [lambda: F.grouped_mm(a, w.mT, offs=ends)]),
    ]
    if peers.DEEP_GEMM in setting.peers:
        ways.append(Way(peers.DEEP_GEMM, lambda: peers.deep_gemm_grouped(a_codes, w_codes, plan.groups)))
    return ways


def _wgrad_ways(setting: Setting, shape: tuple[int, int, int, int]) -> list[Way]:
    experts, tokens, n, k = shape
    plan, ends = _plan(setting, experts, tokens)
    (dy, dy_codes), (x, x_codes) = columns(setting, experts * tokens, n), columns(setting, experts * tokens, k)
    spec = setting.recipe.linear(SPEC)
    like = torch.empty(1, device=setting.device)  # for its dtype: every group has rows
    chosen = backend.choose_grouped(dy_codes, x_codes, spec, "wgrad", torch.float32)
    return [
        Way("ours", lambda: [lambda: grouped_wgrad(dy_codes, x_codes, plan, like, spec)], note=str(chosen)),
        Way(PEER, lambda: [lambda: F.grouped_mm(dy.mT, x, offs=ends)]),
    ]
