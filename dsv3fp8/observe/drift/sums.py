"""The ways to sum E4M3 products along K that the study compares: emulated everywhere, and a Hopper GPU's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv3fp8.kernels import backend
from dsv3fp8.kernels.gemm import emulated
from dsv3fp8.precision.formats import E4M3
from dsv3fp8.precision.recipe import GemmSpec, OperandSpec
from dsv3fp8.precision.tiles import QuantizedTensor, Tile

Promotion = int | str
"""Products in one chain of the tensor core: a number, or "never" for all of K."""

ONE_SCALE = Tile(None, None)
NOT_ON_CHIP = ("reference", "emulated")  # backends that use no tensor core


@dataclass(frozen=True)
class Way:
    """One way to sum. where: emulated, or gpu. promote: None where the library decides.

    against: the promotion of the emulated sums that its bits are compared with.
    """

    name: str
    where: str
    promote: Promotion | None
    against: Promotion
    products: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Sums:
    """The ways of a device to sum over K. notes: a line on each that is missing, and why."""

    ways: tuple[Way, ...]
    notes: tuple[str, ...]

    @staticmethod
    def of(device: torch.device) -> Sums:
        """Emulated, and on a Hopper GPU also this package's own GEMM, if it is to the bit, and cuBLASLt's tensor-scaled one."""
        ways = [emulation("never"), emulation(128)]
        against = backend.hopper_reason(device)
        if against is not None:
            return Sums(tuple(ways), (f"emulated sums only: {against}",))
        notes = []
        for promote in ("never", 128):
            way, missing = on_chip(promote, device)
            ways += [way] if way else []
            notes += [missing] if missing else []
        return Sums((*ways, cublaslt(fast=True), cublaslt(fast=False)), tuple(notes))


def emulation(promote: Promotion) -> Way:
    """The tensor core's chains in software, promoted as given."""
    return Way(
        f"emulated, {promotion_name(promote)}", "emulated", promote, promote, lambda a, b: emulated_products(a, b, promote)
    )


def emulated_products(a: Tensor, b: Tensor, promote: Promotion) -> Tensor:
    """Σ a · b of E4M3 codes a [M, K] and b [N, K], fp32 [M, N], as the tensor core adds them in chains of `promote`."""
    return emulated.products(a, b, promote)


def emulated_block_scaled(a: QuantizedTensor, b: QuantizedTensor, promote: Promotion) -> Tensor:
    """a @ b^T with its scales, fp32 [M, N]."""
    return emulated.block_scaled(a, b, promote)


def on_chip(promote: Promotion, device: torch.device) -> tuple[Way | None, str]:
    """The backend that a recipe with one scale and this promotion takes on a Hopper GPU; or None, and why the chip does not."""
    sample = unscaled(torch.zeros(128, 128, device=device).to(E4M3.dtype))
    choice = backend.choose_gemm(sample, sample, gemm_spec(promote), torch.float32)
    if choice.backend in NOT_ON_CHIP:
        return None, f"no sums {promotion_name(promote)} on the GPU: {choice.reason}"

    def products(a: Tensor, b: Tensor) -> Tensor:
        return backend.matmul_nt(unscaled(a), unscaled(b), torch.float32, gemm_spec(promote), "fprop")

    return Way(f"GPU ({choice.backend}), {promotion_name(promote)}", "gpu", promote, promote, products), ""


def chip_block_scaled(a: QuantizedTensor, b: QuantizedTensor, promote: Promotion) -> tuple[str, Tensor] | None:
    """a @ b^T with its scales, fp32 [M, N], on the chip the operands lie on, and the backend that a recipe takes for it.

    None where the backend computes on no tensor core: on a CPU, and for what the chip has no sum for.
    """
    choice = backend.choose_gemm(a, b, gemm_spec(promote), torch.float32)
    if choice.backend in NOT_ON_CHIP:
        return None
    return choice.backend, backend.matmul_nt(a, b, torch.float32, gemm_spec(promote), "fprop")


def on_chip_too(a: QuantizedTensor, b: QuantizedTensor, promote: Promotion, emulated_sum: Tensor) -> dict[str, Any] | None:
    """The chip's sum beside the emulated one: the backend, and the share of outputs that are equal in every bit, or None."""
    found = chip_block_scaled(a, b, promote)
    return None if found is None else {"backend": found[0], "equal": equal_share(found[1], emulated_sum)}


def equal_share(got: Tensor, want: Tensor) -> float:
    """The share of outputs that are equal in every bit, but for the sign of zero."""
    return float((got == want).double().mean())


def cublaslt(fast: bool) -> Way:
    """cuBLASLt's tensor-scaled GEMM, with or without fast accumulation. It promotes, and cuts K, as it sees fit.

    With fast accumulation it is one chain, where it does not cut K; without, its errors are those of sums promoted every 128.
    """

    def products(a: Tensor, b: Tensor) -> Tensor:
        one = torch.ones(1, device=a.device)
        tensor = F.ScalingType.TensorWise
        return F.scaled_mm(a, b.mT, one, tensor, one, tensor, output_dtype=torch.float32, use_fast_accum=fast)

    return Way(f"cuBLASLt, {'fast' if fast else 'no fast'} accumulation", "gpu", None, "never" if fast else 128, products)


def promotion_name(promote: Promotion) -> str:
    return "not promoted" if promote == "never" else f"promoted every {promote}"


def gemm_spec(promote: Promotion) -> GemmSpec:
    """A linear whose operands are E4M3 with one scale each, summed by the tensor core in kernels whose bits are defined."""
    one = OperandSpec("e4m3", "tensor")
    return GemmSpec("drift", one, one, one, None, promote, "hopper", "exact", "bf16")


def unscaled(codes: Tensor) -> QuantizedTensor:
    """E4M3 codes [R, C] with one scale, which is 1."""
    return QuantizedTensor(codes, torch.ones(1, 1, device=codes.device), E4M3, ONE_SCALE, tuple(codes.shape))
