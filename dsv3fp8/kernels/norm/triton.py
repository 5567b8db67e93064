"""RMSNorm in Triton, forward and backward, with the casts that ride on it. BF16 in and out, fp32 arithmetic.

Every operation is the reference's, rounding by rounding, but for two: sums over a row (in the order of the hardware's
reduction, the same in every run), and the mean of dy * gamma * x_hat, which is the row's sum of dy * gamma * x times rstd.
So a BF16 result may fall on the other side of a rounding; codes and scales are those of the BF16 result, to the bit.

Passes (bytes per element): forward reads 2, writes 1 of codes or 2 of BF16 or both; backward reads x, the rail and each
gradient and writes 2; backward_cast reads 4, writes dx in BF16 and in codes along the rows, reads it again and writes codes
along the columns, 10 in all (128 columns of 128 tokens are more than a processor holds beside whole rows).
gamma's gradient adds one fp32 row for each program, of which there are at most 264.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv3fp8.kernels.quantize.columns import quantize_columns
from dsv3fp8.kernels.quantize.device import limits, row_tiles, scaled_along
from dsv3fp8.precision.formats import E5M6, Format
from dsv3fp8.precision.tiles import QuantizedTensor, ceil_div

_WIDEST = 16384
_PROCESSORS = 132  # of an H100 or H200. A constant: the order of gamma's sums must not depend on the device at hand.
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
    _refuse(reason_against(x, grads))
    dx, _, dgamma = _backward(x, gamma, eps, grads, rail, None, None, "fp32")
    return dx.view(x.shape), dgamma


def backward_cast(
    x: Tensor, gamma: Tensor, eps: float, dy: Tensor, beside: Tensor | None, fmt: Format, kind: str
) -> tuple[QuantizedTensor, QuantizedTensor, Tensor]:
    """`reference.backward_cast`. Codes in 128x1 tiles are stored with the tokens contiguous."""
    _refuse(reason_against(x, [dy], fmt))
    dx, by_row, dgamma = _backward(x, gamma, eps, [dy], None, beside, fmt, kind)
    assert by_row is not None
    return by_row, quantize_columns(dx, fmt, kind), dgamma


def _backward(
    x: Tensor, gamma: Tensor, eps: float, grads: Sequence[Tensor | None], rail: Tensor | None, beside: Tensor | None,
    fmt: Format | None, kind: str,
) -> tuple[Tensor, QuantizedTensor | None, Tensor]:  # fmt: skip
    x = _rows(x)
    given = [_rows(g) for g in grads if g is not None]
    rows, cols = x.shape
    width = cols + (beside.shape[-1] if beside is not None else 0)
    dx = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    cast = row_tiles(rows, width, fmt, kind, x.device) if fmt else None
    if dx.numel() == 0:
        return dx, cast, torch.zeros_like(gamma)
    block_rows, tiles = _block(width)
    elements = block_rows * tiles * 128
    programs, steps = _share(ceil_div(rows, block_rows), _PROCESSORS * (1 if elements > 4096 else 2))
    partial = torch.empty(programs, cols, dtype=torch.float32, device=x.device)
    sources = [*given, *[x] * (3 - len(given)), x if rail is None else _rows(rail), x if beside is None else _rows(beside)]
    codes, scale = (cast.codes, cast.scale) if cast else (dx, partial)
    _norm_backward_kernel[(programs,)](
        x, gamma, *sources, dx, codes, scale, partial, rows, steps, x.stride(0), *(s.stride(0) for s in sources), eps,
        GRADS=len(given), RAIL=rail is not None, CAST=cast is not None, POW2=kind == "pow2", **limits(fmt or E5M6),
        COLS=cols, WIDTH=width, ROWS=block_rows, TILES=tiles, STAGES=2,
        num_warps=min(max(elements // 512, 4), 32), enable_fp_fusion=False,
    )  # fmt: skip
    return dx, cast, partial.sum(0)


def _forward(
    x: Tensor, gamma: Tensor, eps: float, fmt: Format | None, kind: str, keep: bool
) -> tuple[Tensor | None, QuantizedTensor | None]:
    _refuse(reason_against(x, fmt=fmt))
    x = _rows(x)
    rows, cols = x.shape
    y = torch.empty_like(x) if keep else None
    cast = row_tiles(rows, cols, fmt, kind, x.device) if fmt else None
    if x.numel():
        block_rows, tiles = _block(cols)
        programs, steps = _share(ceil_div(rows, block_rows), 4 * _PROCESSORS)
        codes, scale = (cast.codes, cast.scale) if cast else (x, gamma)
        _norm_forward_kernel[(programs,)](
            x, gamma, x if y is None else y, codes, scale, rows, steps, x.stride(0), eps,
            KEEP=keep, CAST=cast is not None, POW2=kind == "pow2", **limits(fmt or E5M6),
            COLS=cols, ROWS=block_rows, TILES=tiles, STAGES=2,
            num_warps=max(block_rows * tiles // 8, 4), enable_fp_fusion=False,
        )  # fmt: skip
    return y, cast


def _rows(x: Tensor) -> Tensor:
    """x as a matrix whose rows are contiguous."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 and x.stride(0) >= 0 else x.contiguous()


def _block(cols: int) -> tuple[int, int]:
    """(rows, tiles of 128 columns) that a program holds at a time: whole rows, 4096 elements at least."""
    tiles = triton.next_power_of_2(ceil_div(cols, 128))
    return max(32 // tiles, 1), tiles


def _share(blocks: int, most: int) -> tuple[int, int]:
    """(programs, blocks of each) that share the work: at most `most` programs, each with consecutive blocks."""
    steps = ceil_div(blocks, most)
    return ceil_div(blocks, steps), steps


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise ValueError(reason)


@triton.jit
def _rstd(square_sum, eps, COLS: tl.constexpr):
    mean = tl.div_rn(square_sum, tl.full(square_sum.shape, COLS, tl.float32))
    return tl.div_rn(tl.full(square_sum.shape, 1.0, tl.float32), tl.sqrt_rn(mean + eps))


@triton.jit
def _row_sum(values):
    return tl.sum(tl.sum(values, 2), 1)


# In all kernels the number of rows is no part of what is compiled; widths are.
@triton.jit(do_not_specialize=["rows", "steps"])
def _norm_forward_kernel(
    x, gamma, y, codes, scale, rows, steps, x_stride, eps,
    KEEP: tl.constexpr, CAST: tl.constexpr, LIMIT: tl.constexpr, LIMIT_BITS: tl.constexpr, POW2: tl.constexpr,
    COLS: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile = tl.arange(0, TILES)
    c = tile[:, None] * 128 + tl.arange(0, 128)[None, :]
    weight = tl.load(gamma + c, mask=c < COLS, other=0.0)[None]
    first = tl.program_id(0) * steps * ROWS
    for step in tl.range(0, steps, num_stages=STAGES):
        r_in = first + step * ROWS + tl.arange(0, ROWS)
        r = r_in.to(tl.int64)
        inside = (r_in < rows)[:, None, None] & (c < COLS)[None]
        v = tl.load(x + (r[:, None, None] * x_stride + c[None]), mask=inside, other=0.0).to(tl.float32)
        rstd = _rstd(_row_sum(v * v), eps, COLS)
        out = (v * rstd[:, None, None] * weight).to(tl.bfloat16)
        at = r[:, None, None] * COLS + c[None]
        if KEEP:
            tl.store(y + at, out, mask=inside)
        if CAST:
            scaled, s = scaled_along(out.to(tl.float32), 2, LIMIT, LIMIT_BITS, POW2)
            tl.store(codes + at, scaled.to(codes.dtype.element_ty), mask=inside)
            there = (r_in < rows)[:, None] & (tile < (COLS + 127) // 128)[None, :]
            tl.store(scale + (tile.to(tl.int64)[None, :] * rows + r[:, None]), s, mask=there)


@triton.jit
def _summed(g0, g1, g2, GRADS: tl.constexpr):
    """The junction: the readers' gradients in order, rounded once to BF16."""
    total = g0.to(tl.float32)
    if GRADS > 1:
        total += g1.to(tl.float32)
    if GRADS > 2:
        total += g2.to(tl.float32)
    return total.to(tl.bfloat16).to(tl.float32)


@triton.jit(do_not_specialize=["rows", "steps"])
def _norm_backward_kernel(
    x, gamma, grad0, grad1, grad2, rail, beside, dx, codes, scale, partial, rows, steps,
    x_stride, stride0, stride1, stride2, rail_stride, beside_stride, eps,
    GRADS: tl.constexpr, RAIL: tl.constexpr, CAST: tl.constexpr,
    LIMIT: tl.constexpr, LIMIT_BITS: tl.constexpr, POW2: tl.constexpr,
    COLS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx of whole rows, [dx | beside] where WIDTH is more than COLS; gamma's gradient summed over the program's rows."""
    tile = tl.arange(0, TILES)
    c = tile[:, None] * 128 + tl.arange(0, 128)[None, :]
    weight = tl.load(gamma + c, mask=c < COLS, other=0.0)[None]
    dgamma = tl.zeros((ROWS, TILES, 128), tl.float32)
    first = tl.program_id(0) * steps * ROWS
    for step in tl.range(0, steps, num_stages=STAGES):
        r_in = first + step * ROWS + tl.arange(0, ROWS)
        r = r_in.to(tl.int64)[:, None, None]
        inside = (r_in < rows)[:, None, None] & (c < COLS)[None]
        v = tl.load(x + (r * x_stride + c[None]), mask=inside, other=0.0).to(tl.float32)
        g0 = tl.load(grad0 + (r * stride0 + c[None]), mask=inside, other=0.0)
        g1 = g0
        g2 = g0
        if GRADS > 1:
            g1 = tl.load(grad1 + (r * stride1 + c[None]), mask=inside, other=0.0)
        if GRADS > 2:
            g2 = tl.load(grad2 + (r * stride2 + c[None]), mask=inside, other=0.0)
        grad = _summed(g0, g1, g2, GRADS)
        scaled = grad * weight
        rstd = _rstd(_row_sum(v * v), eps, COLS)
        mean = tl.div_rn(_row_sum(scaled * v) * rstd, tl.full(rstd.shape, COLS, tl.float32))
        x_hat = v * rstd[:, None, None]
        dgamma += grad * x_hat
        out = (scaled - x_hat * mean[:, None, None]) * rstd[:, None, None]
        if RAIL:
            out += tl.load(rail + (r * rail_stride + c[None]), mask=inside, other=0.0).to(tl.float32)
        there = inside
        if WIDTH > COLS:
            there = (r_in < rows)[:, None, None] & (c < WIDTH)[None]
            other = tl.load(beside + (r * beside_stride + (c - COLS)[None]), mask=there & (c >= COLS)[None], other=0.0)
            out = tl.where((c < COLS)[None], out, other.to(tl.float32))
        rounded = out.to(tl.bfloat16)
        tl.store(dx + (r * WIDTH + c[None]), rounded, mask=there)
        if CAST:
            # Where a row holds NaN, so do the columns that are not there: they may only meet tiles of the same row.
            along, s = scaled_along(rounded.to(tl.float32), 2, LIMIT, LIMIT_BITS, POW2)
            tl.store(codes + (r * WIDTH + c[None]), along.to(codes.dtype.element_ty), mask=there)
            exists = (r_in < rows)[:, None] & (tile < (WIDTH + 127) // 128)[None, :]
            tl.store(scale + (tile.to(tl.int64)[None, :] * rows + r_in.to(tl.int64)[:, None]), s, mask=exists)
    tl.store(partial + (tl.program_id(0).to(tl.int64) * COLS + c), tl.sum(dgamma, 0), mask=c < COLS)
