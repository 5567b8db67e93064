"""RMSNorm in torch: the definition of every norm kernel.

Reads x's type, computes in fp32 (fp64 of fp64) and rounds once. Backward reads the norm's input again, sums the gradients
of the norm output's readers in fp32 in the order given (one rounding) and adds the residual rail before dx's one rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv3fp8.kernels.quantize.reference import quantize
from dsv3fp8.precision.formats import Format
from dsv3fp8.precision.tiles import COLUMN_128, ROW_128, QuantizedTensor
from dsv3fp8.precision.widen import wide


def forward(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """gamma * x / sqrt(mean(x^2) + eps) over the last dimension, in x's dtype, one rounding. gamma: [D] fp32."""
    return (_normalized(x, eps)[0] * gamma).to(x.dtype)


def forward_cast(
    x: Tensor, gamma: Tensor, eps: float, fmt: Format, kind: str, keep: bool
) -> tuple[Tensor | None, QuantizedTensor]:
    """(the norm's output [T, D] where it is to be kept, the same in 1x128 tiles)."""
    y = forward(x, gamma, eps)
    return y if keep else None, quantize(y, fmt, ROW_128, kind)


def backward(
    x: Tensor, gamma: Tensor, eps: float, grads: Sequence[Tensor | None], rail: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(dx + rail in x's dtype, dgamma [D] in fp32) from the norm's input and its readers' gradients, one at least."""
    x_hat, rstd = _normalized(x, eps)
    dy = junction(grads, x.dtype)
    assert dy is not None
    grad = wide(dy)
    dgamma = (grad * x_hat).flatten(0, -2).sum(0)
    scaled = grad * gamma
    dx = (scaled - x_hat * (scaled * x_hat).mean(-1, keepdim=True)) * rstd
    if rail is not None:
        dx = dx + wide(rail)
    return dx.to(x.dtype), dgamma


def backward_cast(
    x: Tensor, gamma: Tensor, eps: float, dy: Tensor, beside: Tensor | None, fmt: Format, kind: str
) -> tuple[QuantizedTensor, QuantizedTensor, Tensor]:
    """([dx | beside] in 1x128 tiles, the same in 128x1 tiles, dgamma): the gradient of a projection with this norm behind it.

    beside: [T, C], the gradient of the projection's columns that do not pass the norm (kv_a's k_rope).
    """
    dx, dgamma = backward(x, gamma, eps, [dy], None)
    if beside is not None:
        dx = torch.cat((dx, beside), -1)
    return quantize(dx, fmt, ROW_128, kind), quantize(dx, fmt, COLUMN_128, kind), dgamma


def junction(grads: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor | None:
    """Sums gradients in fp32 in the order given and rounds once; a single one passes through."""
    given = [g for g in grads if g is not None]
    if not given:
        return None
    total = wide(given[0])
    for grad in given[1:]:
        total = total + wide(grad)
    return total.to(dtype)


def _normalized(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    values = wide(x)
    rstd = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return values * rstd, rstd
