"""Dense GEMMs: what a run takes, beside cuBLASLt, our own kernels and torch's BF16 product."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv3fp8.kernels import backend
from dsv3fp8.kernels.gemm import cublaslt
from dsv3fp8.observe.bench import peers
from dsv3fp8.observe.bench.operands import Setting, columns, rows, weight
from dsv3fp8.observe.bench.rates import Call, Case, Table, Way
from dsv3fp8.ops.linear import transposed
from dsv3fp8.precision.tiles import QuantizedTensor

PEER = "torch BF16"
SPEC = "shared_down"  # any op of the recipe: all share their formats
Pair = tuple[QuantizedTensor, QuantizedTensor]


def dense_tables(setting: Setting) -> list[Table]:
    """fprop, dgrad and wgrad of the dense shapes."""
    tokens = setting.sizes.tokens
    tables = []
    for gemm, what in (
        ("fprop", "x [T, K] · W [N, K]ᵀ, E4M3 1×128 · 128×128 → BF16"),
        ("dgrad", "dY [T, N] · W [N, K], E4M3 1×128 · 128×128 → BF16"),
        ("wgrad", "dYᵀ [N, T] · x [T, K], E4M3 128×1 · 128×1 → FP32 (torch's: BF16 → BF16)"),
    ):
        cases = [
            Case(f"{tokens} × {k} → {n}", 2.0 * tokens * n * k, partial(dense_ways, setting, gemm, tokens, n, k))
            for n, k in setting.sizes.dense
        ]
        about = f"{what}; operands are quantized before the clock starts"
        tables.append(Table(f"dense {gemm}", f"Dense {gemm}", "TFLOP/s", PEER, about, cases))
    return tables


def dense_ways(setting: Setting, gemm: str, tokens: int, n: int, k: int) -> list[Way]:
    """One of the three GEMMs of y [tokens, N] = x [tokens, K] W^T."""
    sets = range(setting.clock.sets(tokens * (n + k) + n * k))
    plain: list[tuple[Tensor, Tensor]] = []
    pairs: list[Pair] = []
    for _ in sets:
        if gemm == "wgrad":
            (dy, dy_codes), (x, x_codes) = columns(setting, tokens, n), columns(setting, tokens, k)
            plain.append((dy.mT, x))
            pairs.append((_seen(dy_codes), _seen(x_codes)))
        else:
            inner, outer = (k, n) if gemm == "fprop" else (n, k)
            (a, a_codes), (w, w_codes) = rows(setting, tokens, inner), weight(setting, outer, inner)
            plain.append((a, w.mT))
            pairs.append((a_codes, w_codes))
    spec = setting.recipe.linear(SPEC)
    out = torch.float32 if gemm == "wgrad" else torch.bfloat16
    chosen = backend.choose_gemm(*pairs[0], spec, out)

    def ours(a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
        return backend.matmul_nt(a, b, out, spec, gemm)

    ways = [
        Way("ours", lambda: _each(pairs, ours), note=str(chosen)),
        Way("cuBLASLt", lambda: _laid_out(pairs, gemm, out)),
        Way("gluon", lambda: _gluon(pairs, gemm)),
        Way("triton", lambda: _triton(pairs, out), note="every bit defined"),
        Way(PEER, lambda: [partial(torch.matmul, a, b) for a, b in plain]),
    ]
    if peers.DEEP_GEMM in setting.peers:
        ways.append(Way(peers.DEEP_GEMM, lambda: peers.deep_gemm_dense(pairs, gemm)))
    return ways if setting.device.type == "cuda" else [ways[0], ways[-1]]


def _seen(codes: QuantizedTensor) -> QuantizedTensor:
    operand = transposed(codes)
    assert isinstance(operand, QuantizedTensor)
    return operand


def _each(pairs: list[Pair], function: Callable[[QuantizedTensor, QuantizedTensor], object]) -> list[Call]:
    return [partial(function, a, b) for a, b in pairs]


def _laid_out(pairs: list[Pair], gemm: str, out: torch.dtype) -> list[Call]:
    """cuBLASLt alone: scales are laid out as it wants them before the clock starts, not in every call."""
    row, block = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    calls: list[Call] = []
    for a, b in pairs:
        if (against := cublaslt.reason_against(a, b)) is not None:
            raise ValueError(against)
        scale_a, scale_b, of_b = a.scale.mT.contiguous().mT, b.scale.mT.contiguous().mT, row
        if gemm != "wgrad":
            scale_b, of_b = F.pad(b.scale, (0, -b.scale.shape[1] % 4), value=1.0).contiguous().mT, block
        calls.append(partial(F.scaled_mm, a.codes, b.codes.mT, scale_a, row, scale_b, of_b, output_dtype=out))
    return calls


def _gluon(pairs: list[Pair], gemm: str) -> list[Call]:
    from dsv3fp8.kernels.gemm.gluon import grouped

    if gemm != "wgrad":
        return _each(pairs, grouped.matmul_nt)
    tokens = pairs[0][0].shape[1]
    starts = torch.tensor([0, tokens // 128], dtype=torch.int32, device=pairs[0][0].codes.device)
    return _each(pairs, lambda a, b: grouped.grouped_wgrad(_seen(a), _seen(b), starts))


def _triton(pairs: list[Pair], out: torch.dtype) -> list[Call]:
    from dsv3fp8.kernels.gemm import triton

    return _each(pairs, lambda a, b: triton.matmul_nt(a, b, out))
