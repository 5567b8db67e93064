"""Which backend an op takes, and why. The one place that chooses; `doctor` and every run's manifest ask it.

There is no silent fallback: whatever is taken comes with its reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from dsv3fp8.kernels.gemm import cublaslt, emulated, reference
from dsv3fp8.precision import ledger
from dsv3fp8.precision.recipe import LINEAR_OPS, GemmSpec, OperandSpec, Recipe
from dsv3fp8.precision.tiles import Operand, QuantizedTensor


@dataclass(frozen=True)
class Choice:
    """A backend and the reason it was taken. exact: its results are defined to the bit (precision/accumulator.py)."""

    backend: str
    reason: str
    exact: bool = False

    def __str__(self) -> str:
        return f"{self.backend}: {self.reason}" + ("; to the bit" if self.exact else "")


@lru_cache
def device_capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def hopper_reason(device: torch.device) -> str | None:
    """Why this device has no Hopper tensor cores for block-scaled FP8, or None when it has."""
    if device.type != "cuda":
        return f"{device.type} has no FP8 tensor cores"
    major, minor = device_capability(device.index or 0)
    if (major, minor) != (9, 0):
        return f"block-scaled FP8 GEMM needs an sm_90 GPU, this one is sm_{major}{minor}"
    version = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    if version < (12, 9):
        return f"block-scaled FP8 GEMM needs CUDA 12.9, torch was built for {torch.version.cuda}"
    return None


def choose_gemm(a: Operand, b: Operand, spec: GemmSpec) -> Choice:
    """The backend for a @ b^T under a recipe's accumulator and promotion interval."""
    quantized_a, quantized_b = isinstance(a, QuantizedTensor), isinstance(b, QuantizedTensor)
    if not quantized_a and not quantized_b:
        return Choice("torch", "not quantized")
    if not (isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor)):
        return Choice("reference", "one operand only is quantized: plain FP32 sums, whatever the accumulator")
    if spec.accumulator == "fp32":
        return Choice("reference", "accumulator: fp32 was asked for")
    against = hopper_reason(a.codes.device)
    if against is None:
        return _choose_on_hopper(a, b, spec)
    if spec.accumulator == "hopper":
        return _emulated(a.codes.device, against, spec)
    return Choice("reference", f"{against}: plain FP32 sums")


def _choose_on_hopper(a: QuantizedTensor, b: QuantizedTensor, spec: GemmSpec) -> Choice:
    against = cublaslt.reason_against(a, b)
    if against is None and spec.promote_every != 128:
        against = f"cuBLASLt promotes every 128, not {spec.promote_every}"
    if against is None:
        return Choice("cublaslt", "block-scaled FP8 on Hopper tensor cores, promoted every 128", exact=True)
    if spec.accumulator == "hopper":
        return _emulated(a.codes.device, against, spec)
    return Choice("reference", against)


def _emulated(device: torch.device, why: str, spec: GemmSpec) -> Choice:
    """Hopper's accumulator computed elsewhere, by the compiled kernel or, with the reason, by its torch definition."""
    promoted = "never promoted" if spec.promote_every == "never" else f"promoted every {spec.promote_every}"
    against = emulated.reason_against_compiled(device)
    how = "compiled for this CPU" if against is None else f"in torch, slowly: {against}"
    return Choice("emulated", f"{why}: Hopper's accumulator, {promoted}, {how}", exact=True)


def matmul_nt(a: Operand, b: Operand, out_dtype: torch.dtype, spec: GemmSpec, gemm: str) -> Tensor:
    """a [M, K] @ b [N, K]^T -> [M, N] in out_dtype, on the backend `choose_gemm` takes. gemm: fprop, dgrad or wgrad."""
    choice = choose_gemm(a, b, spec)
    if (log := ledger.active()) is not None:
        log.note_kernel(spec.op, gemm, choice.backend, a, b)
    if choice.backend in ("cublaslt", "emulated"):
        assert isinstance(a, QuantizedTensor)
        assert isinstance(b, QuantizedTensor)
        if choice.backend == "emulated":
            return emulated.matmul_nt(a, b, out_dtype, spec.promote_every)
        return cublaslt.matmul_nt(a, b, out_dtype)
    return reference.matmul_nt(a, b, out_dtype)


def choose_attention(device: torch.device, dtype: torch.dtype, masked: bool) -> Choice:
    """The backend of attention. masked: documents are isolated from one another."""
    if device.type != "cuda":
        return Choice("reference", f"{device.type}: torch, fp32 softmax")
    if dtype != torch.bfloat16:
        return Choice("reference", f"cuDNN attention takes bf16, not {str(dtype).removeprefix('torch.')}")
    if masked:
        return Choice("reference", "isolated documents need a mask that is not plain causal")
    if device_capability(device.index or 0)[0] < 9:
        return Choice("reference", "cuDNN attention with unequal head sizes needs sm_90")
    return Choice("cudnn", "cuDNN through PyTorch")


def explain(
    recipe: Recipe, device: torch.device, halves: Mapping[str, int] | None = None, isolated: bool = False
) -> list[tuple[str, Choice]]:
    """(op, choice) of every op under a recipe on a device, without running anything heavy.

    halves: width of one half (gate or up) of each fused projection, of which only whole tiles fit every backend; what is
    not given is a multiple of 128. isolated: documents are kept apart in attention.
    """
    rows = []
    for op in LINEAR_OPS:
        spec = recipe.gemm(op)
        for gemm, (left, right) in _sample_gemms(spec, device, (halves or {}).get(op)).items():
            rows.append((f"{op}.{gemm}", choose_gemm(left, right, spec)))
    dtype = torch.bfloat16 if recipe.compute == "bf16" else torch.float32
    rows.append(("attention", choose_attention(device, dtype, masked=isolated)))
    rows.append(("quantize", Choice("reference", "torch", exact=True)))
    rows.append(("norm, rope, swiglu, router, dispatch, combine, loss", Choice("reference", "torch, fp32 arithmetic")))
    return rows


def _sample_gemms(spec: GemmSpec, device: torch.device, half: int | None) -> dict[str, tuple[Operand, Operand]]:
    """Small operands tiled as the real ones: a fused projection's outputs in two parts, with the tail that a half has."""
    parts = 1 if half is None else 2
    outputs = parts * (128 + (half or 0) % 128)
    along_outputs = {"cols": outputs, "col_parts": parts}
    per_output = {"rows": outputs, "row_parts": parts}
    x = _sample(spec.input, device)
    return {
        "fprop": (x, _sample(spec.weight, device, **per_output)),
        "dgrad": (_sample(spec.gradient, device, **along_outputs), _sample(spec.weight, device, **along_outputs)),
        "wgrad": (_sample(spec.gradient, device, **per_output), x),
    }


def _sample(
    spec: OperandSpec, device: torch.device, rows: int = 128, cols: int = 128, row_parts: int = 1, col_parts: int = 1
) -> Operand:
    from dsv3fp8.kernels.quantize.reference import quantize

    x = torch.zeros(rows, cols, device=device)
    if not spec.quantized:
        return x
    return quantize(x, spec.storage, spec.tile_along(1), spec.scale, row_parts=row_parts, col_parts=col_parts)
