"""The router, the exchange and the residual sum on the backend that `choose` takes: Triton on Hopper, else torch.

Signatures are those of kernels/{router,exchange,residual}/reference.py, which define the results.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv3fp8.kernels.backend import Choice, against_triton, triton_kernels, triton_or_torch
from dsv3fp8.kernels.exchange import reference as exchange_reference
from dsv3fp8.kernels.exchange.reference import Layout
from dsv3fp8.kernels.residual import reference as residual_reference
from dsv3fp8.kernels.router import reference as router_reference
from dsv3fp8.kernels.router.reference import Kept, Rule
from dsv3fp8.precision import cast_meter
from dsv3fp8.precision.formats import Format
from dsv3fp8.precision.tiles import Operand, QuantizedTensor

_SAID = {
    "router": "scores, choice, weights and balance loss in two kernels",
    "exchange": "one kernel each, counts stay on the GPU",
    "residual": "one kernel",
}


def _choice(device: torch.device, kernels: str, *asked: Any) -> Choice:
    return triton_or_torch(against_triton(device), kernels, _SAID[kernels], *asked)


def choose_router(device: torch.device, experts: int, top_k: int, dtype: torch.dtype) -> Choice:
    """The backend of the router behind its logits, whose dtype it has."""
    return _choice(device, "router", experts, top_k, dtype)


def _router(logits: Tensor, top_k: int) -> Any:
    choice = choose_router(logits.device, logits.shape[1], top_k, logits.dtype)
    return triton_kernels("router") if choice.backend == "triton" else router_reference


def route(logits: Tensor, bias: Tensor, rule: Rule, sequences: int, real: Tensor | None) -> tuple[Tensor, Tensor, Kept]:
    return _router(logits, rule.top_k).forward(logits, bias, rule, sequences, real)


def route_backward(kept: Kept, dweights: Tensor, dbalance: Tensor, rule: Rule) -> Tensor:
    return _router(kept.scores, rule.top_k).backward(kept, dweights, dbalance, rule)


def choose_exchange(
    device: torch.device, top_k: int, experts: int = 1, dtype: torch.dtype = torch.bfloat16, fmt: Format | None = None
) -> Choice:
    """The backend of dispatch and combine. dtype: of rows that are summed or weighed; fmt: of the cast that rides on it."""
    return _choice(device, "exchange", top_k, experts, dtype, fmt)


def _exchange(device: torch.device, *asked: Any) -> Any:
    return triton_kernels("exchange") if choose_exchange(device, *asked).backend == "triton" else exchange_reference


def lay_out(ids: Tensor, experts: int, real: Tensor | None, rows: int) -> Layout:
    return _exchange(ids.device, ids.shape[1], experts).lay_out(ids, experts, real, rows)


def dispatch(x: Operand, copy: Tensor, slot: Tensor) -> Operand:
    return _exchange(copy.device, slot.shape[1]).dispatch(x, copy, slot)


def pick(values: Tensor, index: Tensor) -> Tensor:
    return _exchange(index.device, 1).pick(values, index)


def combine(rows: Tensor, slot: Tensor, weights: Tensor | None = None) -> Tensor:
    return _exchange(slot.device, slot.shape[1], 1, rows.dtype).combine(rows, slot, weights)


def weigh(dy: Tensor, copy: Tensor, slot: Tensor, weights: Tensor, out: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _exchange(copy.device, slot.shape[1], 1, dy.dtype).weigh(dy, copy, slot, weights, out, dtype)


def weigh_cast(
    dy: Tensor, copy: Tensor, slot: Tensor, weights: Tensor, out: Tensor, fmt: Format, kind: str
) -> tuple[QuantizedTensor, Tensor]:
    kernels = _exchange(copy.device, slot.shape[1], 1, dy.dtype, fmt)
    if kernels is not exchange_reference and cast_meter.active_meter() is not None:
        # The kernel's cast counts nothing; the reference counts, and nothing else of it is taken.
        exchange_reference.weigh_cast(dy, copy, slot, weights, out, fmt, kind)
    return kernels.weigh_cast(dy, copy, slot, weights, out, fmt, kind)


def choose_residual(*given: Tensor) -> Choice:
    """The backend of the sum of these."""
    return _choice(given[0].device, "residual", *given)


def residual_sum(x: Tensor, *branches: Tensor) -> Tensor:
    kernels = triton_kernels("residual") if choose_residual(x, *branches).backend == "triton" else residual_reference
    return kernels.forward(x, *branches)


def explain(device: torch.device, dtype: torch.dtype) -> list[tuple[str, Choice]]:
    """(op, choice); dtype: the recipe's compute dtype."""
    x = torch.empty(1, dtype=dtype, device=device)
    exchange = choose_exchange(device, 8, 256, dtype)
    return [
        ("router", choose_router(device, 256, 8, torch.float32)), ("dispatch", exchange), ("combine", exchange),
        ("residual", choose_residual(x, x, x)),
    ]  # fmt: skip
