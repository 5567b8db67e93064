"""The GEMM of Hopper's FP8 tensor core without one: `accumulator: hopper` on any device, to the bit.

precision/accumulator.py defines the numbers, in torch. On a CPU with a C compiler a compiled kernel (emulated.c) gives the
same bits many times faster; everywhere else, GPUs included, the torch definition runs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from dsv3fp8.kernels.compiled import compiled
from dsv3fp8.precision import accumulator
from dsv3fp8.precision.accumulator import GROUP
from dsv3fp8.precision.formats import decode
from dsv3fp8.precision.tiles import QuantizedTensor

_SOURCE = Path(__file__).with_suffix(".c")
_UNSCALED, _SCALES_TOGETHER, _SCALES_ONE_BY_ONE = range(3)
_CHAIN_ENDS, _BLOCK_ENDS = 1, 2
_ZERO_EXPONENT = -60  # below any product of codes that are not zero, and its sum with itself fits int8
_PRODUCTS_OF_A_THREAD = 2**21  # below this a thread costs more than it saves


def reason_against_compiled(device: torch.device) -> str | None:
    """Why the torch definition runs on this device and not the compiled kernel, or None when the kernel runs."""
    if device.type != "cpu":
        return f"the compiled kernel is for CPUs, not {device.type}"
    library = compiled(_SOURCE)
    return None if library.functions else library.reason


def matmul_nt(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, promote_every: int | str) -> Tensor:
    """a [M, K] @ b [N, K]^T -> [M, N]: `block_scaled`, rounded once to out_dtype."""
    return block_scaled(a, b, promote_every).to(out_dtype)


def products(a: Tensor, b: Tensor, promote_every: int | str) -> Tensor:
    """`accumulator.products`, the same bits: codes a [M, K] times b [N, K] without scales -> fp32 [M, N]."""
    if reason_against_compiled(a.device):
        return accumulator.products(a, b, promote_every)
    accumulator.check_codes(a, b)
    k = a.shape[1]
    return _compute(a, b, [(0, k)], accumulator.chain_length(promote_every, k), _UNSCALED)


def block_scaled(a: QuantizedTensor, b: QuantizedTensor, promote_every: int | str) -> Tensor:
    """`accumulator.block_scaled`, the same bits: a [M, K] times b [N, K] with their scales -> fp32 [M, N]."""
    if reason_against_compiled(a.codes.device):
        return accumulator.block_scaled(a, b, promote_every)
    accumulator.check_codes(a.codes, b.codes)
    if a.constant_along_k and b.constant_along_k:
        total = products(a.codes, b.codes, promote_every)
        return accumulator.canonical(total * (a.expanded_rows() * b.expanded_rows().mT))
    blocks = accumulator.k_blocks(a, b)
    interval = accumulator.block_chain_length(promote_every)
    scales = tuple(accumulator.scale_per_block(operand, len(blocks)) for operand in (a, b))
    order = _SCALES_ONE_BY_ONE if accumulator.scales_rows_of_b(b) else _SCALES_TOGETHER
    return _compute(a.codes, b.codes, blocks, interval, order, scales)


class _Table(ctypes.Structure):
    _fields_ = (("value", ctypes.c_void_p), ("exponent", ctypes.c_void_p))


class _Job(ctypes.Structure):
    """`job` of emulated.c, field by field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("m", "n", "k", "steps", "blocks")),
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("b_row", ctypes.c_int64),
        ("b_col", ctypes.c_int64),
        ("a_table", _Table),
        ("b_table", _Table),
        *((name, ctypes.c_void_p) for name in ("start", "count", "flags", "block", "a_scale", "b_scale")),
        *((name, ctypes.c_int64) for name in ("a_scale_row", "a_scale_col", "b_scale_row", "b_scale_col")),
        ("scaling", ctypes.c_int32),
        ("special", ctypes.c_int32),
        ("out", ctypes.c_void_p),
        ("next", ctypes.c_int64),
        ("failed", ctypes.c_int32),
    )


def _compute(
    a: Tensor, b: Tensor, blocks: Sequence[tuple[int, int]], interval: int, order: int, scales: tuple[Tensor, ...] = ()
) -> Tensor:
    """Hands a job to the kernel. Tensors that it points to live in local names until it is done."""
    (m, k), n = a.shape, b.shape[0]
    out = torch.zeros(m, n, dtype=torch.float32)
    if m == 0 or n == 0 or k == 0:
        return out
    raw_a, raw_b = a.view(torch.uint8).contiguous(), b.view(torch.uint8)
    tables = [_tables(codes.dtype) for codes in (a, b)]
    steps = _steps(tuple(blocks), interval)
    job = _Job(m=m, n=n, k=k, steps=len(steps[0]), blocks=len(blocks), scaling=order, out=out.data_ptr())
    job.a, job.b, job.b_row, job.b_col = raw_a.data_ptr(), raw_b.data_ptr(), raw_b.stride(0), raw_b.stride(1)
    job.a_table, job.b_table = (_Table(*(part.data_ptr() for part in table)) for table in tables)
    job.start, job.count, job.flags, job.block = (part.data_ptr() for part in steps)
    if scales:
        job.a_scale, job.b_scale = (scale.data_ptr() for scale in scales)
        job.a_scale_row, job.a_scale_col = scales[0].stride()
        job.b_scale_row, job.b_scale_col = scales[1].stride()
    job.special = accumulator.any_special(a) or accumulator.any_special(b)
    threads = max(1, min(torch.get_num_threads(), m * n * k // _PRODUCTS_OF_A_THREAD))
    functions = compiled(_SOURCE).functions
    assert functions is not None
    if functions.dsv3fp8_emulated_gemm(ctypes.byref(job), ctypes.c_int(threads)):
        raise MemoryError(f"the emulated GEMM has no memory for {threads} threads with K = {k}")
    return out


@lru_cache(maxsize=256)
def _steps(blocks: tuple[tuple[int, int], ...], interval: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Start, count, flags and block of every step of the tensor core along K."""
    rows = []
    for block, (start, stop) in enumerate(blocks):
        for chain in range(start, stop, interval):
            end = min(chain + interval, stop)
            for at in range(chain, end, GROUP):
                after = min(at + GROUP, end)
                flags = (_CHAIN_ENDS if after == end else 0) | (_BLOCK_ENDS if after == stop else 0)
                rows.append((at, after - at, flags, block))
    start, *others = torch.tensor(rows, dtype=torch.int64).T.contiguous()
    count, flags, of_block = (part.to(torch.int32) for part in others)
    return start, count, flags, of_block


@lru_cache
def _tables(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Value (fp32) and exponent (int8) of all 256 codes."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    exponents = accumulator.exponents(codes)
    return decode(codes, accumulator.format_of(codes)), exponents.clamp(min=_ZERO_EXPONENT).to(torch.int8)
