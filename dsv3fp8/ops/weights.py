"""Weight codes: made once per optimizer step from the FP32 master, never older than it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv3fp8.kernels.backend import quantize_mirrored
from dsv3fp8.ops.quantizers import LinearQuantizers
from dsv3fp8.ops.shards import ShardCodes
from dsv3fp8.precision.gathered import GatheredWeight
from dsv3fp8.precision.tiles import BLOCK_128, Operand, QuantizedTensor


@dataclass
class _Cached:
    version: int
    pointer: int
    fprop: Operand
    dgrad: Operand | None = None


class WeightCodes:
    """What fprop and dgrad read of one weight [N, K] (or of E experts' [E, N, K]).

    The codes are kept until the master changes: in-place updates (optimizer, load_state_dict) move its version, and
    `invalidate` is called after every step and load for changes that autograd's counter does not see.
    Of a master that is cut over ranks they are kept in `shard`, a part on each, and read from the gathered weight.
    """

    def __init__(self, quantizers: LinearQuantizers, row_parts: int = 1) -> None:
        self.quantizers = quantizers
        self.row_parts = row_parts
        self.shard: ShardCodes | None = None
        self._cached: _Cached | None = None

    def fprop(self, weight: Tensor) -> Operand:
        """W as fprop's operand: [..., N, K], tiled along K."""
        return weight.fprop if isinstance(weight, GatheredWeight) else self._fresh(weight).fprop

    def dgrad(self, weight: Tensor) -> Operand:
        """W^T as dgrad's operand: [..., K, N], tiled along N; fprop's codes with the transposed scale grid if they serve."""
        if isinstance(weight, GatheredWeight):
            return _transposed(weight.dgrad or weight.fprop)
        cached = self._fresh(weight)
        if cached.dgrad is None:
            spec = self.quantizers.gemm.weight
            operand = cached.fprop
            if isinstance(operand, QuantizedTensor) and not spec.one_orientation:
                operand = self._quantize(weight, k_axis=0)
            cached.dgrad = _transposed(operand)
        return cached.dgrad

    def invalidate(self) -> None:
        """Drops the codes."""
        self._cached = None
        if self.shard is not None:
            self.shard.invalidate()

    def _fresh(self, weight: Tensor) -> _Cached:
        cached = self._cached
        if cached is None or cached.version != weight._version or cached.pointer != weight.data_ptr():
            cached = self._cached = _Cached(weight._version, weight.data_ptr(), *self._made(weight))
        return cached

    def _made(self, weight: Tensor) -> tuple[Operand, Operand | None]:
        """fprop's operand, and dgrad's where one pass over the master gives both."""
        spec = self.quantizers.gemm.weight
        if spec.quantized and spec.tile == "128x128":
            both = quantize_mirrored(weight.detach(), spec.storage, spec.scale, row_parts=self.row_parts)
            if both is not None:
                return both
        return self._quantize(weight, k_axis=1), None

    def _quantize(self, weight: Tensor, k_axis: int) -> Operand:
        with torch.no_grad():
            gemm = self.quantizers.gemm
            if not gemm.weight.quantized:
                return weight.detach().to(compute_dtype(gemm.compute, weight))
            return self.quantizers.quantize("weight", weight.detach(), k_axis, row_parts=self.row_parts)


def table(weight: Tensor) -> Tensor:
    """The values of a weight that is looked up, not multiplied: the master, or what was gathered of it."""
    if not isinstance(weight, GatheredWeight):
        return weight
    assert isinstance(weight.fprop, Tensor), "a table is never quantized"
    return weight.fprop


def compute_dtype(name: str, like: Tensor) -> torch.dtype:
    """The dtype of the recipe's `compute`; float64 masters (tests) compute in float64."""
    if like.dtype == torch.float64:
        return torch.float64
    return torch.bfloat16 if name == "bf16" else torch.float32


def _transposed(operand: Operand) -> Operand:
    """Codes and block scales laid out as the transposed matrix; scales of rows lie as GEMMs read them either way."""
    if not isinstance(operand, QuantizedTensor):
        return operand.mT
    seen = operand.transposed()
    scale = seen.scale.contiguous() if seen.tile == BLOCK_128 else seen.scale
    return replace(seen, codes=seen.codes.contiguous(), scale=scale)
