"""Norms, SwiGLU and RoPE on the backend that `choose` takes: Triton on Hopper, where it covers what is asked, else torch.

Signatures are those of kernels/{norm,swiglu,rope}/reference.py, which define the results. Casts that ride on an op come out
of its kernel; who asks for one says in what format and with which scale kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from dsv3fp8.kernels.backend import Choice, against_triton, triton_kernels, triton_or_torch
from dsv3fp8.kernels.norm import reference as norm_reference
from dsv3fp8.kernels.rope import reference as rope_reference
from dsv3fp8.kernels.rope.reference import Both, Cast
from dsv3fp8.kernels.swiglu import reference as swiglu_reference
from dsv3fp8.precision import cast_meter
from dsv3fp8.precision.formats import Format
from dsv3fp8.precision.tiles import Operand, QuantizedTensor


def _choice(device: torch.device, kernels: str, *asked: Any) -> Choice:
    return triton_or_torch(against_triton(device), kernels, "one kernel, with the casts that ride on it", *asked)


def choose_norm(x: Tensor, grads: Sequence[Tensor | None] = (), fmt: Format | None = None) -> Choice:
    """The backend of a norm's forward, or with grads of its backward; fmt: of the cast that rides on it."""
    return _choice(x.device, "norm", x, grads, fmt)


def norm_forward(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    if choose_norm(x).backend == "triton":
        return triton_kernels("norm").forward(x, gamma, eps)
    return norm_reference.forward(x, gamma, eps)


def norm_forward_cast(
    x: Tensor, gamma: Tensor, eps: float, fmt: Format, kind: str, keep: bool
) -> tuple[Tensor | None, QuantizedTensor]:
    choice = choose_norm(x, fmt=fmt)
    return _with_casts(choice, "norm", norm_reference, "forward_cast", x, gamma, eps, fmt, kind, keep)


def norm_backward(
    x: Tensor, gamma: Tensor, eps: float, grads: Sequence[Tensor | None], rail: Tensor | None
) -> tuple[Tensor, Tensor]:
    if choose_norm(x, grads).backend == "triton":
        return triton_kernels("norm").backward(x, gamma, eps, grads, rail)
    return norm_reference.backward(x, gamma, eps, grads, rail)


def norm_backward_cast(
    x: Tensor, gamma: Tensor, eps: float, dy: Tensor, beside: Tensor | None, fmt: Format, kind: str
) -> tuple[QuantizedTensor, QuantizedTensor, Tensor]:
    choice = choose_norm(x, [dy], fmt)
    return _with_casts(choice, "norm", norm_reference, "backward_cast", x, gamma, eps, dy, beside, fmt, kind)


def choose_swiglu(h: Operand, fmt: Format | None = None, dtype: torch.dtype = torch.bfloat16) -> Choice:
    """The backend of SwiGLU; fmt: of the casts that ride on it, None where nothing is cast; dtype: what it is rounded to."""
    device = h.codes.device if isinstance(h, QuantizedTensor) else h.device
    return _choice(device, "swiglu", h, fmt, dtype)


def swiglu_forward(h: Operand, dtype: torch.dtype, weight: Tensor | None = None) -> Tensor:
    kernels = triton_kernels("swiglu") if choose_swiglu(h, dtype=dtype).backend == "triton" else swiglu_reference
    return kernels.forward(h, dtype, weight)


def swiglu_backward(h: Operand, dout: Tensor, dtype: torch.dtype, weight: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    covered = dout.dtype == dtype and choose_swiglu(h, dtype=dtype).backend == "triton"
    return (triton_kernels("swiglu") if covered else swiglu_reference).backward(h, dout, dtype, weight)


def swiglu_forward_cast(
    h: Tensor, weight: Tensor | None, cache_kind: str, through_cache: bool, fmt: Format, kind: str
) -> tuple[QuantizedTensor, QuantizedTensor]:
    choice = choose_swiglu(h, fmt)
    return _with_casts(choice, "swiglu", swiglu_reference, "forward_cast", h, weight, cache_kind, through_cache, fmt, kind)


def swiglu_forward_again(cache: Operand, dtype: torch.dtype, weight: Tensor | None, fmt: Format, kind: str) -> QuantizedTensor:
    choice = choose_swiglu(cache, fmt)
    return _with_casts(choice, "swiglu", swiglu_reference, "forward_again", cache, dtype, weight, fmt, kind)


def swiglu_backward_cast(
    cache: Operand, dout: Tensor, weight: Tensor | None, fmt: Format, kind: str
) -> tuple[QuantizedTensor, QuantizedTensor, Tensor | None]:
    choice = choose_swiglu(cache, fmt)
    return _with_casts(choice, "swiglu", swiglu_reference, "backward_cast", cache, dout, weight, fmt, kind)


def choose_rope(q: Tensor, fmt: Format | None = None) -> Choice:
    """The backend of RoPE's forward and backward; fmt: of the casts that ride on it."""
    return _choice(q.device, "rope", q, fmt)


def rope_forward(q: Tensor, kv: Tensor, k_rope: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    kernels = triton_kernels("rope") if choose_rope(q).backend == "triton" else rope_reference
    return kernels.forward(q, kv, k_rope, cos, sin)


def rope_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    kernels = triton_kernels("rope") if choose_rope(dq).backend == "triton" else rope_reference
    return kernels.backward(dq, dk, dv, cos, sin)


def rope_backward_cast(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, q_cast: Cast, kv_cast: Cast
) -> tuple[Both, Both, Tensor]:
    choice = choose_rope(dq, q_cast[0])
    return _with_casts(choice, "rope", rope_reference, "backward_cast", dq, dk, dv, cos, sin, q_cast, kv_cast)


def _with_casts(choice: Choice, kernels: str, reference: ModuleType, name: str, *arguments: Any) -> Any:
    """An op whose casts ride on it, on the backend of `choice`."""
    if choice.backend != "triton":
        return getattr(reference, name)(*arguments)
    if cast_meter.active_meter() is not None:
        # The kernel's casts count nothing. The reference counts what they see, and only that is taken from it: its sums may
        # differ in the last bit, and to be counted must not change a result.
        getattr(reference, name)(*arguments)
    with cast_meter.uncounted():
        return getattr(triton_kernels(kernels), name)(*arguments)


def explain(device: torch.device, dtype: torch.dtype, casts: Format | None) -> list[tuple[str, Choice]]:
    """(op, choice) of the element-wise ops; casts: the format that SwiGLU's casts have, None where nothing is cast."""
    x = torch.empty(1, 256, dtype=dtype, device=device)
    return [("norm", choose_norm(x)), ("rope", choose_rope(x)), ("swiglu", choose_swiglu(x, casts))]
