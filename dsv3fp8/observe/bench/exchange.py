"""Router, plan, dispatch, combine and the residual sum: by their bytes beside a device copy, and small ones by their time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dsv3fp8.kernels import moe
from dsv3fp8.kernels.exchange.reference import capacity
from dsv3fp8.kernels.router.reference import Rule
from dsv3fp8.observe.bench.casts import COPY, copy_way
from dsv3fp8.observe.bench.operands import Setting, random, rows
from dsv3fp8.observe.bench.rates import Case, Table, Way
from dsv3fp8.ops.exchange import Plan, combine, dispatch, make_plan

CODE = 1 + 4 / 128
"""Bytes of an E4M3 code with its share of a tile's fp32 scale."""
MADE = tuple[Callable[[], object], str]


def exchange_tables(setting: Setting) -> list[Table]:
    """Bytes of what moves rows; microseconds of what decides where to, which its launches bound."""
    tokens, dim, top_k, experts = setting.sizes.exchange
    x, copies = float(tokens * dim), float(tokens * top_k * dim)
    written = float(capacity(tokens, top_k, experts) * dim)  # inert rows too
    moved = [
        _moved(setting, "dispatch, E4M3 1×128", (x + written) * CODE, lambda: _dispatch(setting)),
        _moved(setting, "combine, BF16", 2 * (x + copies), lambda: _combine(setting)),
        _moved(setting, "residual of two branches", 8 * x, lambda: _residual(setting)),
    ]
    decided = [
        Case("router, forward", 1.0, lambda: [_ours(*_router(setting, backward=False))]),
        Case("router, backward", 1.0, lambda: [_ours(*_router(setting, backward=True))]),
        Case("plan", 1.0, lambda: [_ours(*_plan_alone(setting))]),
    ]
    about = (
        f"{tokens:,} tokens, {top_k} of {experts} experts; a token's codes are read once, inert rows are written too; "
        "the ratio is the share of a copy's rate"
    )
    size = f"{tokens:,} tokens, {top_k} of {setting.sizes.routed} experts"
    return [
        Table("exchange", "Exchange and residual", "GB/s", COPY, about, moved),
        Table("exchange, decided", "Router behind its logits, and the plan", "µs", "", size, decided),
    ]


def _moved(setting: Setting, name: str, work: float, make: Callable[[], MADE]) -> Case:
    return Case(name, work, lambda: [_ours(*make()), copy_way(setting)])


def _ours(call: Callable[[], object], note: str) -> Way:
    return Way("ours", lambda: [call], note=note)


def _ids(setting: Setting, experts: int) -> Tensor:
    """Experts of each token, different ones."""
    tokens, _, top_k, _ = setting.sizes.exchange
    return torch.rand(tokens, experts, device=setting.device).topk(top_k, -1).indices


def _plan(setting: Setting) -> Plan:
    experts = setting.sizes.exchange[3]
    return make_plan(_ids(setting, experts), experts, None)


def _plan_alone(setting: Setting) -> MADE:
    experts = setting.sizes.routed
    ids = _ids(setting, experts)
    return lambda: make_plan(ids, experts, None), str(moe.choose_exchange(setting.device, ids.shape[1], experts))


def _dispatch(setting: Setting) -> MADE:
    tokens, dim, top_k, _ = setting.sizes.exchange
    plan, (_, codes) = _plan(setting), rows(setting, tokens, dim)
    return lambda: dispatch(codes, plan), str(moe.choose_exchange(setting.device, top_k))


def _combine(setting: Setting) -> MADE:
    _, dim, top_k, _ = setting.sizes.exchange
    plan = _plan(setting)
    out = random(setting, plan.rows, dim)
    return lambda: combine(out, plan), str(moe.choose_exchange(setting.device, top_k))


def _residual(setting: Setting) -> MADE:
    tokens, dim, _, _ = setting.sizes.exchange
    x, *branches = (random(setting, tokens, dim) for _ in range(3))
    return lambda: moe.residual_sum(x, *branches), str(moe.choose_residual(x, *branches))


def _router(setting: Setting, backward: bool) -> MADE:
    (tokens, _, top_k, _), experts = setting.sizes.exchange, setting.sizes.routed
    rule = Rule("sigmoid", top_k, groups=1, kept_groups=1, normalize=True, route_scale=2.5)
    logits, bias = random(setting, tokens, experts, dtype=torch.float32), torch.zeros(experts, device=setting.device)
    note = str(moe.choose_router(setting.device, experts, top_k, logits.dtype))
    if not backward:
        return lambda: moe.route(logits, bias, rule, 1, None), note
    weights, balance, kept = moe.route(logits, bias, rule, 1, None)
    dweights, dbalance = random(setting, *weights.shape, dtype=torch.float32), torch.ones_like(balance)
    return lambda: moe.route_backward(kept, dweights, dbalance, rule), note
