"""The ways to sum E4M3 products along K that the study compares: emulated everywhere, and a Hopper GPU's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv3fp8.kernels import backend
from dsv3fp8.kernels.gemm import emulated
from dsv3fp8.precision import accumulator
from dsv3fp8.precision.formats import E4M3
from dsv3fp8.precision.recipe import GemmSpec, OperandSpec
from dsv3fp8.precision.tiles import QuantizedTensor, Tile

Promotion = int | str
"""Products in one chain of the tensor core: a number, or "never" for all of K."""

ONE_SCALE = Tile(None, None)


@dataclass(frozen=True)
class Way:
    """One way to sum. where: emulated, or gpu. promote: None where the library decides."""

    name: str
    where: str
    promote: Promotion | None
    products: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Sums:
    """The ways of a device. note: one line on what is missing and why, "" on a Hopper GPU."""

    ways: tuple[Way, ...]
    note: str

    @staticmethod
    def of(device: torch.device) -> Sums:
        """Emulated, and on a Hopper GPU also the exact GEMM of this package and cuBLASLt's tensor-scaled one."""
        ways = [emulation("never"), emulation(128)]
        against = backend.hopper_reason(device)
        if against is None:
            ways += [on_chip("never"), on_chip(128), cublaslt(fast=True), cublaslt(fast=False)]
            return Sums(tuple(ways), "")
        return Sums(tuple(ways), f"emulated sums only: {against}")


def emulation(promote: Promotion) -> Way:
    """The tensor core's chains in software, promoted as given."""
    return Way(f"emulated, {promotion_name(promote)}", "emulated", promote, lambda a, b: emulated_products(a, b, promote))


def emulated_products(a: Tensor, b: Tensor, promote: Promotion) -> Tensor:
    """Σ a · b of E4M3 codes a [M, K] and b [N, K], fp32 [M, N], as the tensor core adds them in chains of `promote`."""
    compute = emulated.products if a.device.type == "cpu" else accumulator.products
    return compute(a, b, promote)


def emulated_block_scaled(a: QuantizedTensor, b: QuantizedTensor, promote: Promotion) -> Tensor:
    """a @ b^T with its scales, fp32 [M, N]."""
    compute = emulated.block_scaled if a.codes.device.type == "cpu" else accumulator.block_scaled
    return compute(a, b, promote)


def on_chip(promote: Promotion) -> Way:
    """The backend that a recipe with one scale and this promotion takes on a Hopper GPU."""

    def products(a: Tensor, b: Tensor) -> Tensor:
        return backend.matmul_nt(unscaled(a), unscaled(b), torch.float32, gemm_spec(promote), "fprop")

    return Way(f"GPU, {promotion_name(promote)}", "gpu", promote, products)


def cublaslt(fast: bool) -> Way:
    """cuBLASLt's tensor-scaled GEMM, with or without fast accumulation. It promotes, and cuts K, as it sees fit."""

    def products(a: Tensor, b: Tensor) -> Tensor:
        one = torch.ones(1, device=a.device)
        tensor = F.ScalingType.TensorWise
        return F.scaled_mm(a, b.mT, one, tensor, one, tensor, output_dtype=torch.float32, use_fast_accum=fast)

    return Way(f"cuBLASLt, {'fast' if fast else 'no fast'} accumulation", "gpu", None, products)


def promotion_name(promote: Promotion) -> str:
    return "not promoted" if promote == "never" else f"promoted every {promote}"


def gemm_spec(promote: Promotion) -> GemmSpec:
    """A linear whose operands are E4M3 with one scale each, summed by the tensor core."""
    one = OperandSpec("e4m3", "tensor")
    return GemmSpec("drift", one, one, one, None, promote, "hopper", "bf16")


def unscaled(codes: Tensor) -> QuantizedTensor:
    """E4M3 codes [R, C] with one scale, which is 1."""
    return QuantizedTensor(codes, torch.ones(1, 1, device=codes.device), E4M3, ONE_SCALE, tuple(codes.shape))
