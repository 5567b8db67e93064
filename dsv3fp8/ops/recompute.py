"""What `recipe.recompute` keeps instead of tensors that backward can make again: norm outputs, and attention's q, k, v.

A recomputed tensor has the bits of the one that forward read: the same kernels on the same inputs, the same weight codes,
and, where a linear keeps its scales over steps, the scale that forward used. Nothing is observed a second time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv3fp8.kernels.backend import matmul_nt
from dsv3fp8.kernels.elementwise import rope_forward
from dsv3fp8.ops.norm import normalize
from dsv3fp8.ops.quantizers import LinearQuantizers
from dsv3fp8.ops.stash import Stash
from dsv3fp8.ops.weights import WeightCodes, compute_dtype
from dsv3fp8.precision.cast_meter import uncounted
from dsv3fp8.precision.tiles import Operand


def norm_again(x: Tensor, gamma: Tensor, eps: float, operand: Operand, reader: LinearQuantizers | None) -> Stash:
    """The operand of one reader of norm(x, gamma) as a stash of the norm's input, which the norm keeps anyway.

    operand: what the reader's fprop reads. reader: the quantizers that minted it; None where the output is read as it is.
    """
    scale = reader.known_scale("input", operand) if reader is not None else ()

    def restore(saved: tuple[Tensor, ...]) -> Operand:
        x, gamma, *known = saved
        with uncounted():
            y, codes = normalize(x, gamma, eps, reader.rides("input") if reader is not None else None, keep=False)
            if codes is not None:
                return codes
            assert y is not None
            return y if reader is None else reader.quantize("input", y, 1, scale=known[0] if known else None)

    return Stash((x.detach(), gamma.detach(), *scale), restore)


@dataclass(frozen=True)
class Projection:
    """A linear as attention's backward runs it again: its operand as kept, its FP32 master [N, K] and what reads it."""

    operand: Stash
    weight: Tensor
    quantizers: LinearQuantizers
    codes: WeightCodes

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.weight.detach(), *self.operand.tensors)

    def again(self) -> Callable[[tuple[Tensor, ...]], Tensor]:
        """From `tensors` to the linear's output. Holds no tensor itself."""
        restore, quantizers, codes = self.operand.restore, self.quantizers, self.codes

        def run(saved: tuple[Tensor, ...]) -> Tensor:
            weight, *kept = saved
            dtype = compute_dtype(quantizers.gemm.compute, weight)
            return matmul_nt(restore(tuple(kept)), codes.fprop(weight), dtype, quantizers.gemm, "fprop")

        return run


@dataclass(frozen=True)
class KeptInputs:
    """What attention keeps of q, k, v for its backward, and how they come back from it."""

    tensors: tuple[Tensor, ...]
    restore: Callable[[tuple[Tensor, ...]], tuple[Tensor, Tensor, Tensor]]


def keep_inputs(q: Tensor, k: Tensor, v: Tensor) -> KeptInputs:
    return KeptInputs((q, k, v), lambda saved: (saved[0], saved[1], saved[2]))


def project_again(q: Projection, kv: Projection, k_rope: Tensor, cos: Tensor, sin: Tensor, heads: int) -> KeptInputs:
    """q, k, v from the up-projections' kept operands and the unrotated k_rope [B, S, rope]; see `mla_rope`."""
    batch, length, _ = k_rope.shape
    k_rope = k_rope.detach().contiguous()  # keeping it must not keep the latent that it stands beside
    q_again, kv_again, of_q = q.again(), kv.again(), len(q.tensors)

    def restore(saved: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        k_rope, cos, sin, *rest = saved
        projected = (q_again(tuple(rest[:of_q])), kv_again(tuple(rest[of_q:])))
        per_head = [x.view(batch, length, heads, x.shape[-1] // heads) for x in projected]
        with torch.no_grad():
            return rope_forward(per_head[0], per_head[1], k_rope, cos, sin)

    return KeptInputs((k_rope, cos, sin, *q.tensors, *kv.tensors), restore)
