"""RMSNorm in Triton, forward and backward, with the casts that ride on it. BF16 in and out, fp32 arithmetic.

Every operation is the reference's, rounding by rounding, but for two: sums over a row (in the order of the hardware's
reduction, the same in every run), and the mean of dy * gamma * x_hat, which is the row's sum of dy * gamma * x times rstd.
So a BF16 result may fall on the other side of a rounding; codes and scales are those of the BF16 result, to the bit. What is
kept and what is cast are no part of what is compiled, so that neither changes the result.

Passes (bytes per element): forward reads 2, writes 1 of codes or 2 of BF16 or both; backward reads x, the rail and each
gradient and writes 2; backward_cast reads 4 and writes dx in BF16, reads it again and writes a code in each orientation, 10 in
all (128 columns of 128 tokens are more than a processor holds beside whole rows).
gamma's gradient adds one fp32 row for each program, of which there are at most 1056.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv3fp8.kernels.quantize import triton as quantizers
from dsv3fp8.kernels.quantize.device import INTERPRETED, PAIRS_FROM, limits, reciprocal, row_tiles, scaled_along
from dsv3fp8.precision.formats import E4M3, E5M6, Format
from dsv3fp8.precision.tiles import QuantizedTensor, ceil_div

_WIDEST = 16384
_PROCESSORS = 132  # of an H100 or H200. A constant: the order of gamma's sums must not depend on the device at hand.
_SHARED = 200 * 1024  # bytes of a processor's shared memory for blocks that are on their way
_GRADS = (torch.bfloat16, torch.float32)


def reason_against(x: Tensor, grads: Sequence[Tensor | None] = (), fmt: Format | None = None) -> str | None:
    """Why these kernels cannot take this norm, or None when they can."""
    if x.dtype != torch.bfloat16:
        return f"the Triton norm takes bf16, not {str(x.dtype).removeprefix('torch.')}"
    if x.shape[-1] > _WIDEST:
        return f"the Triton norm keeps a row in registers: at most {_WIDEST} columns, not {x.shape[-1]}"
    if sum(g is not None for g in grads) > 3 or any(g.dtype not in _GRADS for g in grads if g is not None):
        return "the Triton norm sums at most three gradients in bf16 or fp32"
    if fmt is E5M6:
        return f"no Triton norm casts to {fmt.name}"
    return None


def forward(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """`reference.forward`; x any leading dimensions, any strides."""
    y = _forward(x, gamma, eps, None, "fp32", True)[0]
    assert y is not None
    return y.view(x.shape)


def forward_cast(
    x: Tensor, gamma: Tensor, eps: float, fmt: Format, kind: str, keep: bool
) -> tuple[Tensor | None, QuantizedTensor]:
    """`reference.forward_cast`."""
    y, cast = _forward(x, gamma, eps, fmt, kind, keep)
    assert cast is not None
    return y, cast


def backward(
    x: Tensor, gamma: Tensor, eps: float, grads: Sequence[Tensor | None], rail: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`reference.backward`."""
    dx, dgamma = _backward(x, gamma, eps, grads, rail, None)
    return dx.view(x.shape), dgamma


def backward_cast(
    x: Tensor, gamma: Tensor, eps: float, dy: Tensor, beside: Tensor | None, fmt: Format, kind: str
) -> tuple[QuantizedTensor, QuantizedTensor, Tensor]:
    """`reference.backward_cast`. Codes in 128x1 tiles are stored with the tokens contiguous."""
    _refuse(reason_against(x, [dy], fmt))
    dx, dgamma = _backward(x, gamma, eps, [dy], None, beside)
    return *quantizers.quantize_both(dx, fmt, kind), dgamma


def _backward(
    x: Tensor, gamma: Tensor, eps: float, grads: Sequence[Tensor | None], rail: Tensor | None, beside: Tensor | None
) -> tuple[Tensor, Tensor]:
    """([dx | beside], dgamma)."""
    _refuse(reason_against(x, grads))
    x = _rows(x)
    given = [_rows(g) for g in grads if g is not None]
    rows, cols = x.shape
    more = beside.shape[-1] if beside is not None else 0
    dx = torch.empty(rows, cols + more, dtype=x.dtype, device=x.device)
    if dx.numel() == 0:
        return dx, torch.zeros_like(gamma)
    tiles, inputs = _tiles(cols), 1 + len(given) + (rail is not None)
    block_rows = max(8 // tiles, 2) if tiles < 16 else 1
    elements = block_rows * tiles * 128
    each = _power_below(20480 // (elements * inputs))  # programs of a processor: what three blocks of all inputs leave room for
    programs, steps = _share(ceil_div(rows, block_rows), _PROCESSORS * min(each, 8))
    block_bytes = elements * sum(t.element_size() for t in (x, *given, *([] if rail is None else [rail])))
    partial = torch.empty(programs, cols, dtype=torch.float32, device=x.device)
    sources = [*given, *[x] * (3 - len(given)), x if rail is None else _rows(rail), x if beside is None else _rows(beside)]
    _norm_backward_kernel[(programs,)](
        x, gamma, *sources, dx, partial, rows, steps, x.stride(0), *(s.stride(0) for s in sources), eps,
        GRADS=len(given), RAIL=rail is not None, COLS=cols, BESIDE=more, BESIDE_2=triton.next_power_of_2(max(more, 1)),
        ROWS=block_rows, TILES=tiles, STAGES=1 + min(_SHARED // block_bytes, 2), num_warps=min(max(elements // 512, 1), 32),
        enable_fp_fusion=False,
    )  # fmt: skip
    return dx, partial.sum(0)


def _forward(
    x: Tensor, gamma: Tensor, eps: float, fmt: Format | None, kind: str, keep: bool
) -> tuple[Tensor | None, QuantizedTensor | None]:
    _refuse(reason_against(x, fmt=fmt))
    x = _rows(x)
    rows, cols = x.shape
    y = torch.empty_like(x) if keep else None
    cast = row_tiles(rows, cols, fmt, kind, x.device) if fmt else None
    if x.numel():
        tiles = _tiles(cols)
        block_rows = max(32 // tiles, 1)
        elements = block_rows * tiles * 128
        programs, steps = _share(ceil_div(rows, block_rows), _PROCESSORS * (2 if elements > 4096 else 4))
        codes, scale = (cast.codes, cast.scale) if cast else (torch.empty(0, dtype=E4M3.dtype, device=x.device), gamma)
        _norm_forward_kernel[(programs,)](
            x, gamma, x if y is None else y, codes, scale, rows, steps, x.stride(0), eps, int(keep), int(cast is not None),
            POW2=kind == "pow2", **limits(fmt or E4M3), COLS=cols, ROWS=block_rows, TILES=tiles,
            num_warps=max(elements // 1024, 4), enable_fp_fusion=False,
        )  # fmt: skip
    return y, cast


def _rows(x: Tensor) -> Tensor:
    """x as a matrix whose rows are contiguous."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 and x.stride(0) >= 0 else x.contiguous()


def _tiles(cols: int) -> int:
    """Tiles of 128 columns that hold a row."""
    return triton.next_power_of_2(ceil_div(cols, 128))


def _power_below(n: int) -> int:
    return 1 << max(n.bit_length() - 1, 0)


def _share(blocks: int, most: int) -> tuple[int, int]:
    """(programs, blocks of each) that share the work: at most `most` programs, each with consecutive blocks."""
    steps = ceil_div(blocks, most)
    return ceil_div(blocks, steps), steps


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise ValueError(reason)


@triton.jit
def _rstd(values, eps, COLS: tl.constexpr):
    """[ROWS] of fp32 [ROWS, TILES, 128]."""
    root = tl.sqrt_rn(_divided(_row_sum(values * values), COLS) + eps)
    return tl.where(root < float("inf"), reciprocal(root), tl.where(root == root, 0.0, root))


@triton.jit
def _divided(total, COLS: tl.constexpr):
    """total / COLS as IEEE rounds it wherever that is a normal number: the remainder of a product is exact, and corrects it."""
    cols = tl.full(total.shape, COLS, tl.float32)
    if INTERPRETED:
        return tl.div_rn(total, cols)
    inverse = tl.full(total.shape, 1.0 / COLS, tl.float32)
    quotient = total * inverse
    corrected = tl.fma(tl.fma(-quotient, cols, total), inverse, quotient)
    return tl.where(tl.abs(quotient) < float("inf"), corrected, quotient)


@triton.jit
def _row_sum(values):
    """[ROWS] of [ROWS, TILES, 128]: dimension by dimension, because Triton 3.6 adds the wrong lanes of some reshaped blocks."""
    return tl.sum(tl.sum(values, 2), 1)


@triton.jit
def _to_bf16(values):
    """As `.to(tl.bfloat16)`, two at a time where every thread has two."""
    if INTERPRETED or values.numel < PAIRS_FROM:
        rounded = values.to(tl.bfloat16)
    else:  # not behind a return: what follows one is compiled all the same
        cast: tl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
        rounded = tl.inline_asm_elementwise(cast, "=r,f,f", [values], dtype=tl.bfloat16, is_pure=True, pack=2)
    return rounded


@triton.jit
def _load_rows(x, first, rows, stride, c, COLS: tl.constexpr, ROWS: tl.constexpr):
    """[ROWS, TILES, 128] from row `first`; zero outside."""
    r = first + tl.arange(0, ROWS)
    inside = (r < rows)[:, None, None] & (c < COLS)[None]
    return tl.load(x + (r.to(tl.int64)[:, None, None] * stride + c[None]), mask=inside, other=0.0)


# In all kernels the number of rows is no part of what is compiled; widths are.
@triton.jit(do_not_specialize=["rows", "steps", "keep", "cast"])
def _norm_forward_kernel(
    x, gamma, y, codes, scale, rows, steps, x_stride, eps, keep, cast,
    LIMIT: tl.constexpr, LIMIT_BITS: tl.constexpr, POW2: tl.constexpr,
    COLS: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Consecutive blocks of whole rows, each loaded while the one before is computed."""
    tile = tl.arange(0, TILES)
    c = tile[:, None] * 128 + tl.arange(0, 128)[None, :]
    weight = tl.load(gamma + c, mask=c < COLS, other=0.0)[None]
    first = tl.program_id(0) * steps * ROWS
    ahead = _load_rows(x, first, rows, x_stride, c, COLS, ROWS)
    for step in tl.range(0, steps):
        v = ahead.to(tl.float32)
        ahead = _load_rows(x, first + tl.minimum(step + 1, steps - 1) * ROWS, rows, x_stride, c, COLS, ROWS)
        rstd = _rstd(v, eps, COLS)
        out = _to_bf16(v * rstd[:, None, None] * weight)
        r_in = first + step * ROWS + tl.arange(0, ROWS)
        r = r_in.to(tl.int64)
        inside = (r_in < rows)[:, None, None] & (c < COLS)[None]
        at = r[:, None, None] * COLS + c[None]
        if keep != 0:
            tl.store(y + at, out, mask=inside)
        if cast != 0:
            scaled, s = scaled_along(out.to(tl.float32), 2, LIMIT, LIMIT_BITS, POW2)
            tl.store(codes + at, scaled.to(codes.dtype.element_ty), mask=inside)
            there = (r_in < rows)[:, None] & (tile < (COLS + 127) // 128)[None, :]
            tl.store(scale + (tile.to(tl.int64)[None, :] * rows + r[:, None]), s, mask=there)


@triton.jit(do_not_specialize=["rows", "steps"])
def _norm_backward_kernel(
    x, gamma, grad0, grad1, grad2, rail, beside, dx, partial, rows, steps,
    x_stride, stride0, stride1, stride2, rail_stride, beside_stride, eps,
    GRADS: tl.constexpr, RAIL: tl.constexpr, COLS: tl.constexpr, BESIDE: tl.constexpr, BESIDE_2: tl.constexpr,
    ROWS: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """[dx | beside] of whole rows; gamma's gradient summed over the program's rows."""
    c = tl.arange(0, TILES)[:, None] * 128 + tl.arange(0, 128)[None, :]
    weight = tl.load(gamma + c, mask=c < COLS, other=0.0)[None]
    dgamma = tl.zeros((ROWS, TILES, 128), tl.float32)
    first = tl.program_id(0) * steps * ROWS
    for step in tl.range(0, steps, num_stages=STAGES):
        at_row = first + step * ROWS
        v = _load_rows(x, at_row, rows, x_stride, c, COLS, ROWS).to(tl.float32)
        grad = _load_rows(grad0, at_row, rows, stride0, c, COLS, ROWS).to(tl.float32)
        if GRADS > 1:
            grad += _load_rows(grad1, at_row, rows, stride1, c, COLS, ROWS).to(tl.float32)
        if GRADS > 2:
            grad += _load_rows(grad2, at_row, rows, stride2, c, COLS, ROWS).to(tl.float32)
        if GRADS > 1 or grad0.dtype.element_ty != tl.bfloat16:
            grad = _to_bf16(grad).to(tl.float32)  # the junction: the readers' gradients in order, rounded once
        scaled = grad * weight
        rstd = _rstd(v, eps, COLS)
        mean = _divided(_row_sum(scaled * v) * rstd, COLS)
        x_hat = v * rstd[:, None, None]
        dgamma += grad * x_hat
        out = (scaled - x_hat * mean[:, None, None]) * rstd[:, None, None]
        if RAIL:
            out += _load_rows(rail, at_row, rows, rail_stride, c, COLS, ROWS).to(tl.float32)
        r_in = at_row + tl.arange(0, ROWS)
        r = r_in.to(tl.int64)
        inside = (r_in < rows)[:, None, None] & (c < COLS)[None]
        tl.store(dx + (r[:, None, None] * (COLS + BESIDE) + c[None]), _to_bf16(out), mask=inside)
        if BESIDE:
            b = tl.arange(0, BESIDE_2)[None, :]
            inside = (r_in < rows)[:, None] & (b < BESIDE)
            other = tl.load(beside + (r[:, None] * beside_stride + b), mask=inside)
            tl.store(dx + (r[:, None] * (COLS + BESIDE) + (COLS + b)), other, mask=inside)
    tl.store(partial + (tl.program_id(0).to(tl.int64) * COLS + c), tl.sum(dgamma, 0), mask=c < COLS)
