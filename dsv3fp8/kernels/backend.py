"""Which backend an op takes, and why. The one place that chooses; kernels/explain.py asks it for all ops of a recipe.

There is no silent fallback: whatever is taken comes with its reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from dsv3fp8.kernels.gemm import cublaslt, emulated, reference
from dsv3fp8.kernels.quantize import reference as quantize_reference
from dsv3fp8.precision import ledger
from dsv3fp8.precision.formats import Format
from dsv3fp8.precision.recipe import GemmSpec
from dsv3fp8.precision.tiles import BLOCK_128, COLUMN_128, ROW_128, Operand, QuantizedTensor, Tile


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


@lru_cache
def triton_reason() -> str | None:
    """Why the Triton kernels cannot be imported, or None when they can."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return "Triton is not installed (pip install triton)"
    return None


FASTER_UP_TO_K = 2048
"""The longest K whose BF16 results our own dense GEMM computes: beyond it either may be faster, by some percent, on an H200."""


def choose_gemm(a: Operand, b: Operand, spec: GemmSpec, out_dtype: torch.dtype) -> Choice:
    """The backend for a @ b^T in out_dtype under a recipe's accumulator, promotion interval and `gemm`."""
    quantized_a, quantized_b = isinstance(a, QuantizedTensor), isinstance(b, QuantizedTensor)
    if not quantized_a and not quantized_b:
        return Choice("torch", "not quantized")
    if not (isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor)):
        return Choice("reference", "one operand only is quantized: plain FP32 sums, whatever the accumulator")
    if spec.accumulator == "fp32":
        return Choice("reference", "accumulator: fp32 was asked for")
    against = hopper_reason(a.codes.device)
    if against is None:
        return _choose_on_hopper(a, b, spec, out_dtype)
    if spec.accumulator == "hopper":
        return _emulated(a.codes.device, against, spec)
    return Choice("reference", f"{against}: plain FP32 sums")


def _choose_on_hopper(a: QuantizedTensor, b: QuantizedTensor, spec: GemmSpec, out_dtype: torch.dtype) -> Choice:
    exact = spec.gemm == "exact"
    why = cublaslt.reason_against(a, b)
    if (exact or why or a.shape[-1] <= FASTER_UP_TO_K) and _against_gluon(a, b, spec, out_dtype) is None:
        ours = "gemm: exact was asked for" if exact else why or f"faster than cuBLASLt up to K = {FASTER_UP_TO_K}"
        return Choice("gluon", f"{ours}: FP8 on Hopper tensor cores, promoted every 128", exact=True)
    if why is None and spec.promote_every != 128:
        why = f"cuBLASLt promotes every 128, not {spec.promote_every}"
    if why is None and exact:
        why = "cuBLASLt splits the K of some products and sums in another order then"
    if why is None:
        return Choice("cublaslt", "block-scaled FP8 on Hopper tensor cores, promoted every 128, K split where it likes")
    against = triton_reason()
    if against is None:
        from dsv3fp8.kernels.gemm import triton as triton_gemm

        against = triton_gemm.reason_against(a, b, spec.promote_every)
    if against is None:
        return Choice("triton", f"{why}: FP8 on Hopper tensor cores, {_promoted(spec)}", exact=True)
    why = f"{why}; {against}"
    return _emulated(a.codes.device, why, spec) if exact or spec.accumulator == "hopper" else Choice("reference", why)


def _against_gluon(a: QuantizedTensor, b: QuantizedTensor, spec: GemmSpec, out_dtype: torch.dtype) -> str | None:
    if spec.promote_every != 128:
        return f"Gluon's GEMM promotes every 128, not {spec.promote_every}"
    if (against := triton_reason()) is not None:
        return against
    from dsv3fp8.kernels.gemm.gluon import grouped

    return grouped.reason_against_rows(a, b, out_dtype)


LOOP = "a GEMM per expert: "
"""What the reasons for a loop over experts begin with."""
_TOGETHER = "one launch for all experts"


def choose_grouped(a: Operand, b: Operand, spec: GemmSpec, gemm: str, out_dtype: torch.dtype) -> Choice:
    """The backend of the experts' GEMMs: one launch for all of them, or `choose_gemm`'s for one after the other ("loop").

    fprop, dgrad: a [rows, K] and the weights [E, N, K]; wgrad: dy [rows, N] and x [rows, K].
    """
    if not isinstance(a, QuantizedTensor) and not isinstance(b, QuantizedTensor):
        return _choose_plain_groups(a, b, gemm, out_dtype)
    if not (isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor)):
        return Choice("loop", f"{LOOP}one operand only is quantized")
    against = hopper_reason(a.codes.device)
    if against is None and spec.accumulator == "fp32":
        against = "accumulator: fp32 was asked for"
    against = against or triton_reason()
    if against is not None:
        return Choice("loop", f"{LOOP}{against}")
    from dsv3fp8.kernels.gemm import triton_grouped
    from dsv3fp8.kernels.gemm.gluon import grouped

    wgrad = gemm == "wgrad"
    if spec.promote_every != 128:
        against = f"the Gluon GEMM promotes every 128, not {spec.promote_every}"
    else:
        against = grouped.reason_against_wgrad(a, b) if wgrad else grouped.reason_against_rows(a, b, out_dtype)
    if against is None:
        return Choice("gluon", f"{_TOGETHER}, FP8 on Hopper tensor cores, promoted every 128", True)
    reason = triton_grouped.reason_against_wgrad if wgrad else triton_grouped.reason_against_rows
    beside = reason(a, b, spec.promote_every)
    if beside is None:
        return Choice("triton", f"{against}: {_TOGETHER}, FP8 on Hopper tensor cores, {_promoted(spec)}", True)
    return Choice("loop", f"{LOOP}{against}; {beside}")


def _choose_plain_groups(a: Tensor, b: Tensor, gemm: str, out_dtype: torch.dtype) -> Choice:
    against = against_triton(a.device)
    if against is None:
        from dsv3fp8.kernels.gemm.bf16 import triton as grouped_bf16

        against = grouped_bf16.reason_against(a, b, out_dtype, gemm)
    if against is None:
        return Choice("triton" if gemm == "wgrad" else "torch", f"not quantized: {_TOGETHER}, fp32 sums")
    return Choice("loop", f"{LOOP}not quantized; {against}")


def grouped_rows(
    a: Operand, weights: Operand, groups: Tensor, blocks: Tensor, out_dtype: torch.dtype, spec: GemmSpec, gemm: str
) -> Tensor | None:
    """a [rows, K] times the weights [E, N, K]^T of each row's expert -> [rows, N] in one launch; None where it takes a loop.

    groups: int64 [rows / 128], the expert of each block of 128 rows. blocks: int32 [E + 1], as in `grouped_wgrad`.
    """
    backend = choose_grouped(a, weights, spec, gemm, out_dtype).backend
    if backend == "loop":
        return None
    if (log := ledger.active()) is not None:
        log.note_kernel(spec.op, gemm, backend, a, weights)
    if not (isinstance(a, QuantizedTensor) and isinstance(weights, QuantizedTensor)):
        from dsv3fp8.kernels.gemm.bf16 import triton as grouped_bf16

        assert isinstance(a, Tensor)
        assert isinstance(weights, Tensor)
        return grouped_bf16.grouped_rows(a, weights, blocks)
    if backend == "triton":
        from dsv3fp8.kernels.gemm import triton_grouped

        return triton_grouped.grouped_rows(a, weights, groups, out_dtype, spec.promote_every)
    from dsv3fp8.kernels.gemm.gluon import grouped

    return grouped.grouped_rows(a, weights, groups, out_dtype)


def grouped_wgrad(
    dy: Operand, x: Operand, blocks: Tensor, out_dtype: torch.dtype, spec: GemmSpec, into: Tensor | None = None
) -> Tensor | None:
    """Per expert dy [rows, N]^T times x [rows, K] -> [E, N, K] in one launch; None where it takes a loop.

    blocks: int32 [E + 1], each expert's first block of 128 rows, and the end of the last. into: a sum that a kernel may add
    the products to; then the result is that.
    """
    backend = choose_grouped(dy, x, spec, "wgrad", out_dtype).backend
    if backend == "loop":
        return None
    if (log := ledger.active()) is not None:
        log.note_kernel(spec.op, "wgrad", backend, dy, x)
    if not (isinstance(dy, QuantizedTensor) and isinstance(x, QuantizedTensor)):
        from dsv3fp8.kernels.gemm.bf16 import triton as grouped_bf16

        assert isinstance(dy, Tensor)
        assert isinstance(x, Tensor)
        return grouped_bf16.grouped_wgrad(dy, x, blocks)
    if backend == "triton":
        from dsv3fp8.kernels.gemm import triton_grouped

        return triton_grouped.grouped_wgrad(dy, x, blocks, spec.promote_every, into)
    from dsv3fp8.kernels.gemm.gluon import grouped

    return grouped.grouped_wgrad(dy, x, blocks, into)


def _promoted(spec: GemmSpec) -> str:
    return "never promoted" if spec.promote_every == "never" else f"promoted every {spec.promote_every}"


def _emulated(device: torch.device, why: str, spec: GemmSpec) -> Choice:
    """Hopper's accumulator computed elsewhere, by the compiled kernel or, with the reason, by its torch definition."""
    against = emulated.reason_against_compiled(device)
    how = "compiled for this CPU" if against is None else f"in torch, slowly: {against}"
    return Choice("emulated", f"{why}: Hopper's accumulator, {_promoted(spec)}, {how}", exact=True)


def matmul_nt(a: Operand, b: Operand, out_dtype: torch.dtype, spec: GemmSpec, gemm: str) -> Tensor:
    """a [M, K] @ b [N, K]^T -> [M, N] in out_dtype, on the backend `choose_gemm` takes. gemm: fprop, dgrad or wgrad."""
    choice = choose_gemm(a, b, spec, out_dtype)
    product = _matmul_on(choice.backend, a, b, out_dtype, spec)
    if (log := ledger.active()) is not None:
        log.note_kernel(spec.op, gemm, choice.backend, a, b)
        log.look_at_gemm(spec, gemm, (a, b), product)
    return product


def _matmul_on(backend: str, a: Operand, b: Operand, out_dtype: torch.dtype, spec: GemmSpec) -> Tensor:
    if backend in ("cublaslt", "gluon", "triton", "emulated"):
        assert isinstance(a, QuantizedTensor)
        assert isinstance(b, QuantizedTensor)
        if backend == "emulated":
            return emulated.matmul_nt(a, b, out_dtype, spec.promote_every)
        if backend == "gluon":
            from dsv3fp8.kernels.gemm.gluon import grouped

            return grouped.matmul_nt(a, b, out_dtype)
        if backend == "triton":
            from dsv3fp8.kernels.gemm import triton as triton_gemm

            return triton_gemm.matmul_nt(a, b, out_dtype, spec.promote_every)
        return cublaslt.matmul_nt(a, b, out_dtype)
    return reference.matmul_nt(a, b, out_dtype)


def choose_quantize(
    device: torch.device,
    fmt: Format,
    tile: Tile,
    cols: int = 128,
    *,
    col_parts: int = 1,
    scale: Tensor | None = None,
    source: QuantizedTensor | None = None,
) -> Choice:
    """The backend of a cast to codes; arguments as in `quantize`, `source` for a re-tile. All give the same bits."""
    against = against_triton(device)
    if against is None:
        from dsv3fp8.kernels.quantize import triton as kernels

        against = kernels.reason_against(fmt, tile, cols, col_parts, scale)
        if against is None and source is not None:
            against = kernels.reason_against_source(source)
    if against is None:
        return Choice("triton", kernels.passes(tile, scale is not None), exact=True)
    return Choice("reference", f"torch: {against}", exact=True)


def against_triton(device: torch.device) -> str | None:
    """Why no Triton kernel runs on this device, or None when they do."""
    if device.type != "cuda":
        return f"the Triton kernels are for Hopper, not for a {device.type}"
    if (capability := device_capability(device.index or 0)) != (9, 0):
        return f"the Triton kernels are for Hopper, not for sm_{capability[0]}{capability[1]}"
    return triton_reason()


@lru_cache
def triton_kernels(name: str) -> Any:
    """The module of an op's Triton kernels, which only a machine with Triton can import."""
    return import_module(f"dsv3fp8.kernels.{name}.triton")


def triton_or_torch(against: str | None, kernels: str, said: str, *asked: Any) -> Choice:
    """Triton, of which `said` is told, or torch. against: why not on this device; else the kernels are asked."""
    if against is None:
        against = triton_kernels(kernels).reason_against(*asked)
    if against is None:
        return Choice("triton", said)
    return Choice("reference", f"torch, fp32 arithmetic: {against}")


def quantize(
    x: Tensor,
    fmt: Format,
    tile: Tile,
    kind: str = "fp32",
    *,
    row_parts: int = 1,
    col_parts: int = 1,
    groups: Tensor | None = None,
    scale: Tensor | None = None,
) -> QuantizedTensor:
    """Codes and scales of x, as kernels/quantize/reference.py defines them, on the backend `choose_quantize` takes."""
    choice = choose_quantize(x.device, fmt, tile, x.shape[-1], col_parts=col_parts, scale=scale)
    if choice.backend == "triton":
        from dsv3fp8.kernels.quantize import triton as kernels

        cast = kernels.quantize(x, fmt, tile, kind, row_parts=row_parts, col_parts=col_parts, groups=groups, scale=scale)
    else:
        cast = quantize_reference.quantize(
            x, fmt, tile, kind, row_parts=row_parts, col_parts=col_parts, groups=groups, scale=scale
        )
    if (log := ledger.active()) is not None:
        log.look_at_cast(x, cast, groups, scale)
    return cast


def quantize_both(x: Tensor, fmt: Format, kind: str = "fp32", *, col_parts: int = 1) -> tuple[QuantizedTensor, QuantizedTensor]:
    """x [R, C] in 1x128 and in 128x1 tiles, as two calls of `quantize` give them; in one pass where kernels do it."""
    if choose_quantize(x.device, fmt, COLUMN_128, x.shape[-1], col_parts=col_parts).backend != "triton":
        along_rows = quantize(x, fmt, ROW_128, kind, col_parts=col_parts)
        return along_rows, quantize(x, fmt, COLUMN_128, kind, col_parts=col_parts)
    from dsv3fp8.kernels.quantize import triton as kernels

    casts = kernels.quantize_both(x, fmt, kind, col_parts=col_parts)
    if (log := ledger.active()) is not None:
        for cast in casts:
            log.look_at_cast(x, cast, None)
    return casts


def quantize_mirrored(
    x: Tensor, fmt: Format, kind: str = "fp32", *, row_parts: int = 1
) -> tuple[QuantizedTensor, QuantizedTensor] | None:
    """x [..., R, C] in 128x128 tiles, and the same codes and scales stored as [..., C, R], in one pass.

    None where no kernel does it: whoever needs the transpose copies it then.
    """
    if choose_quantize(x.device, fmt, BLOCK_128, x.shape[-1]).backend != "triton":
        return None
    from dsv3fp8.kernels.quantize import triton as kernels

    cast, turned = kernels.quantize_mirrored(x, fmt, kind, row_parts=row_parts)
    if (log := ledger.active()) is not None:
        log.look_at_cast(x, cast, None)
    return cast, turned


def retile(
    source: QuantizedTensor,
    tile: Tile,
    kind: str | None = None,
    *,
    fmt: Format | None = None,
    groups: Tensor | None = None,
) -> QuantizedTensor:
    """`source` under another tile, as kernels/quantize/reference.py defines it, on the backend `choose_quantize` takes."""
    device, cols = source.codes.device, source.shape[-1]
    to = fmt or source.format
    choice = choose_quantize(device, to, tile, cols, col_parts=source.col_parts, source=source)
    if choice.backend == "triton":
        from dsv3fp8.kernels.quantize import triton as kernels

        cast = kernels.retile(source, tile, kind, fmt=fmt, groups=groups)
    else:
        cast = quantize_reference.retile(source, tile, kind, fmt=fmt, groups=groups)
    if (log := ledger.active()) is not None:
        log.look_at_cast(source, cast, groups)
    return cast


def decode(source: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """The values of codes, fp32(code * scale) rounded to dtype, [..., R, C]."""
    if dtype.itemsize <= 4 and against_triton(source.codes.device) is None:
        from dsv3fp8.kernels.quantize import triton as kernels

        if kernels.reason_against_source(source) is None:
            return kernels.decode(source, dtype)
    return source.decode().to(dtype)
