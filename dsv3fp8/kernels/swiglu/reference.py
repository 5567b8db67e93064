"""SwiGLU in torch, with the quantize box before it and the casts behind it: the definition of every SwiGLU kernel.

h is [gate | up]; both halves are tiled each on their own. Arithmetic is fp32 (fp64 of fp64), rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv3fp8.kernels.quantize.reference import quantize
from dsv3fp8.precision.formats import E4M3, Format
from dsv3fp8.precision.tiles import COLUMN_128, ROW_128, Operand, QuantizedTensor, values_of
from dsv3fp8.precision.widen import wide

LOWEST_GATE = -87.0
"""Where sigmoid stops falling: 1 + exp(87) has a normal reciprocal. What this changes is below 2e-38 |gate|."""


def forward(h: Operand, dtype: torch.dtype, weight: Tensor | None = None) -> Tensor:
    """h [T, 2F] = [gate | up] -> silu(gate) * up (* weight [T], fp32), [T, F] in dtype, one rounding."""
    gate, up = wide(values_of(h)).chunk(2, -1)
    out = gate * _sigmoid(gate) * up
    if weight is not None:
        out = out * weight[:, None]
    return out.to(dtype)


def backward(h: Operand, dout: Tensor, dtype: torch.dtype, weight: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """(dh [T, 2F] in dtype, gradient of weight [T] in fp32) from SwiGLU's input as it was read in forward."""
    gate, up = wide(values_of(h)).chunk(2, -1)
    grad = wide(dout)
    sigmoid = _sigmoid(gate)
    silu = gate * sigmoid
    dgate, dup = grad * up * (sigmoid + silu * (1.0 - sigmoid)), grad * silu
    dweight = None
    if weight is not None:
        dweight = (dup * up).sum(-1)
        dgate, dup = dgate * weight[:, None], dup * weight[:, None]
    return torch.cat((dgate, dup), -1).to(dtype), dweight


def cast_input(h: Tensor, kind: str) -> QuantizedTensor:
    """The quantize box: h in E4M3, 1x128 tiles, gate and up tiled each on their own."""
    return quantize(h, E4M3, ROW_128, kind, col_parts=2)


def forward_cast(
    h: Tensor, weight: Tensor | None, cache_kind: str, through_cache: bool, fmt: Format, kind: str
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """(h as `cast_input` keeps it, SwiGLU's BF16 output in 1x128 tiles); through_cache: SwiGLU reads h through its cast."""
    cache = cast_input(h, cache_kind)
    out = forward(cache if through_cache else h, h.dtype, weight)
    return cache, quantize(out, fmt, ROW_128, kind)


def forward_again(cache: Operand, dtype: torch.dtype, weight: Tensor | None, fmt: Format, kind: str) -> QuantizedTensor:
    """SwiGLU's output in 1x128 tiles from its input as kept, rounded to dtype before the cast as in forward."""
    return quantize(forward(cache, dtype, weight), fmt, ROW_128, kind)


def backward_cast(
    cache: Operand, dout: Tensor, weight: Tensor | None, fmt: Format, kind: str
) -> tuple[QuantizedTensor, QuantizedTensor, Tensor | None]:
    """(dh in dout's type cast in 1x128 tiles, the same in 128x1 tiles, both halves on their own; gradient of weight)."""
    dh, dweight = backward(cache, dout, dout.dtype, weight)
    return quantize(dh, fmt, ROW_128, kind, col_parts=2), quantize(dh, fmt, COLUMN_128, kind, col_parts=2), dweight


def _sigmoid(gate: Tensor) -> Tensor:
    return torch.sigmoid(gate.clamp(min=LOWEST_GATE))
