"""y = a @ b^T in torch, for plain and quantized operands: the specification, runs anywhere.

Quantized operands sum in plain fp32 (accumulator: fp32), in whatever order the matmul takes; sums defined to the bit are
precision/accumulator.py's. Scales that are constant along K multiply the finished sum once.
Results are the same under autocast, and never use TF32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from dsv3fp8.precision.formats import decode
from dsv3fp8.precision.tiles import Operand, QuantizedTensor, values_of


@contextmanager
def plain_matmul(device: torch.device) -> Iterator[None]:
    """Inside, matmuls compute in the dtype of their operands: autocast is off, and so is TF32 on a GPU."""
    with torch.autocast(device.type, enabled=False):
        if device.type != "cuda":
            yield
            return
        before = torch.backends.cuda.matmul.fp32_precision
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        try:
            yield
        finally:
            torch.backends.cuda.matmul.fp32_precision = before


def matmul_nt(a: Operand, b: Operand, out_dtype: torch.dtype) -> Tensor:
    """a [M, K] @ b [N, K]^T -> [M, N] in out_dtype, accumulated in fp32 (fp64 for fp64 operands), rounded once."""
    device = a.codes.device if isinstance(a, QuantizedTensor) else a.device
    with plain_matmul(device):
        if not isinstance(a, QuantizedTensor) and not isinstance(b, QuantizedTensor):
            return _plain(a, b, out_dtype)
        if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor) and a.constant_along_k and b.constant_along_k:
            total = decode(a.codes, a.format) @ decode(b.codes, b.format).mT
            return (total * (a.expanded_scale() * b.expanded_scale().mT)).to(out_dtype)
        return (values_of(a).float() @ values_of(b).float().mT).to(out_dtype)


def _plain(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    if a.dtype == b.dtype == out_dtype:
        return a @ b.mT
    if a.device.type == "cuda" and a.dtype == b.dtype == torch.bfloat16 and out_dtype == torch.float32:
        return torch.mm(a, b.mT, out_dtype=torch.float32)
    wide = torch.float64 if torch.float64 in (a.dtype, b.dtype) else torch.float32
    return (a.to(wide) @ b.to(wide).mT).to(out_dtype)
