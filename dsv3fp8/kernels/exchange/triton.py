"""The exchange in Triton: where copies go in two launches, dispatch and combine in one each, nothing read by the host.

Bit for bit the reference; the gate weights' gradient of `weigh` alone is a sum in another order. Counts are integers and every
row has one writer: no atomics.

Bytes, each once: dispatch reads a token's codes and writes its K copies, and zeros in inert rows; combine reads K rows of a
token and writes one; weigh reads dY of a token and K rows, and writes K. Scales are stored with the rows contiguous, as the
GEMMs read them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv3fp8.kernels.exchange.reference import ROWS, Layout
from dsv3fp8.kernels.quantize.device import limits, row_tiles, scaled_along
from dsv3fp8.precision.formats import E5M6, Format
from dsv3fp8.precision.tiles import Operand, QuantizedTensor, ceil_div

_EXACT = {"enable_fp_fusion": False, "enable_reflect_ftz": False}
_MOST_EXPERTS = 512
_MOST_CHOICES = 16  # their rows are read together
_PROGRAMS = 128  # that count copies: each reads what all others counted
_PLACES = 16384  # (copies, or counts of programs, times experts) that a program looks at together
_WORDS = 1024  # of four bytes, that a program of dispatch sends K times
_VALUES = 1024  # of a token or several, that a program of combine sums
_INERT = 32  # rows that a program of dispatch looks through for inert ones
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def reason_against(top_k: int, experts: int = 1, dtype: torch.dtype = torch.bfloat16, fmt: Format | None = None) -> str | None:
    """Why these kernels cannot exchange as asked, or None when they can. dtype: of the rows that are summed or weighed."""
    if experts > _MOST_EXPERTS:
        return f"the Triton exchange lays out {_MOST_EXPERTS} experts, not {experts}"
    if top_k > _MOST_CHOICES:
        return f"the Triton exchange takes {_MOST_CHOICES} choices of a token, not {top_k}"
    if dtype not in _FLOATS:
        return f"the Triton exchange sums bf16, fp16 or fp32, not {str(dtype).removeprefix('torch.')}"
    if fmt is E5M6:
        return f"no Triton exchange casts to {fmt.name}"
    return None


def lay_out(ids: Tensor, experts: int, real: Tensor | None, rows: int) -> Layout:
    """`reference.lay_out`, for fewer than 2^31 copies."""
    device, (tokens, top_k) = ids.device, ids.shape
    _refuse(reason_against(top_k, experts))
    copies, row_blocks = tokens * top_k, rows // ROWS
    copy, slot = (torch.empty(n, dtype=torch.int32, device=device) for n in (rows, copies))
    groups = torch.empty(row_blocks, dtype=torch.int64, device=device)
    blocks, load = (torch.empty(n, dtype=torch.int32, device=device) for n in (experts + 1, experts))
    width = triton.next_power_of_2(experts)
    together = min(64, _PLACES // width)
    counting = max(1, min(ceil_div(copies, together), _PROGRAMS))
    chunk = ceil_div(ceil_div(copies, counting), together) * together
    counts = torch.empty(counting, width, dtype=torch.int32, device=device)
    ids = ids.contiguous()
    mask = ids if real is None else real.contiguous().view(torch.uint8)
    shape = {"MASKED": real is not None, "EXPERTS": width, "BLOCK": together, "num_warps": 8}
    _count_kernel[(counting,)](ids, mask, counts, copies, chunk, top_k, **shape)
    _place_kernel[(max(counting, min(row_blocks, _PROGRAMS)),)](
        ids, mask, counts, copy, slot, groups, blocks, load, copies, chunk, counting, row_blocks, top_k, experts,
        PARTS=min(_PLACES // width, triton.next_power_of_2(counting)), **shape,
    )  # fmt: skip
    return Layout(copy, slot.view(tokens, top_k), groups, blocks, load)


def dispatch(x: Operand, copy: Tensor, slot: Tensor) -> Operand:
    """`reference.dispatch`, of codes or of values of any type."""
    _refuse(reason_against(slot.shape[1]))
    rows, cols = len(copy), x.shape[1]
    if not isinstance(x, QuantizedTensor):
        out = torch.empty(rows, cols, dtype=x.dtype, device=x.device)
        _launch_dispatch(x, out, None, None, copy, slot)
        return out
    codes = torch.empty(rows, x.codes.shape[1], dtype=torch.uint8, device=copy.device).view(x.codes.dtype)
    if x.tile.rows is None:
        _launch_dispatch(x.codes, codes, None, None, copy, slot)
        return replace(x, codes=codes, shape=(rows, cols))
    scale = torch.empty(x.scale.shape[1], rows, dtype=torch.float32, device=copy.device).mT
    _launch_dispatch(x.codes, codes, x.expanded_rows(), scale, copy, slot)
    return replace(x, codes=codes, scale=scale, shape=(rows, cols), tile=replace(x.tile, rows=1))


def pick(values: Tensor, index: Tensor) -> Tensor:
    """`reference.pick`."""
    out = torch.empty(index.shape, dtype=values.dtype, device=values.device)
    if out.numel():
        _pick_kernel[(ceil_div(out.numel(), 1024),)](
            values.contiguous(), index.contiguous(), out, out.numel(), BLOCK=1024, num_warps=4
        )
    return out


def combine(rows: Tensor, slot: Tensor, weights: Tensor | None = None) -> Tensor:
    """`reference.combine`, of bf16, fp16 or fp32."""
    tokens, top_k = slot.shape
    _refuse(reason_against(top_k, dtype=rows.dtype))
    cols = rows.shape[1]
    out = torch.empty(tokens, cols, dtype=rows.dtype, device=rows.device)
    if out.numel():
        rows = _dense_rows(rows)
        block = _block(cols, _VALUES)
        together = max(1, _VALUES // block)
        _combine_kernel[(ceil_div(tokens, together) * ceil_div(cols, block),)](
            rows, slot.contiguous(), out if weights is None else weights.contiguous(), out, tokens, cols, rows.stride(0),
            TOP_K=top_k, WEIGHTS=weights is not None, TOKENS=together, BLOCK=block, num_warps=4, **_EXACT,
        )  # fmt: skip
    return out


def weigh(dy: Tensor, copy: Tensor, slot: Tensor, weights: Tensor, out: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`reference.weigh`."""
    weighted = torch.empty(len(copy), dy.shape[1], dtype=dtype, device=dy.device)
    no_cast = {"LIMIT": 0.0, "LIMIT_BITS": 0, "POW2": False}
    return weighted, _launch_weigh(dy, copy, slot, weights, out, weighted, None, no_cast)


def weigh_cast(
    dy: Tensor, copy: Tensor, slot: Tensor, weights: Tensor, out: Tensor, fmt: Format, kind: str
) -> tuple[QuantizedTensor, Tensor]:
    """`reference.weigh_cast`."""
    _refuse(reason_against(slot.shape[1], dtype=dy.dtype, fmt=fmt))
    cast = row_tiles(len(copy), dy.shape[1], fmt, kind, dy.device)
    of_cast = {**limits(fmt), "POW2": kind == "pow2"}
    return cast, _launch_weigh(dy, copy, slot, weights, out, cast.codes, cast.scale, of_cast)


def _launch_dispatch(
    x: Tensor, out: Tensor, scale: Tensor | None, out_scale: Tensor | None, copy: Tensor, slot: Tensor
) -> None:
    rows, (tokens, top_k) = len(copy), slot.shape
    x, out = _words(_dense_rows(x), out)
    width = out.shape[1]
    if rows == 0:
        return
    block = _block(width, 256)
    together = max(1, _WORDS // block)
    programs = ceil_div(rows, _INERT) + ceil_div(tokens, together) * ceil_div(width, block)
    _dispatch_kernel[(programs,)](
        x, copy if scale is None else scale, copy, slot.contiguous(), out, copy if out_scale is None else out_scale,
        tokens, rows, width, x.stride(0), *((0, 0, 0) if scale is None else (*scale.stride(), scale.shape[1])),
        TOP_K=top_k, SCALED=scale is not None, TOKENS=together, BLOCK=block, INERT=_INERT, num_warps=4,
    )  # fmt: skip


def _launch_weigh(
    dy: Tensor, copy: Tensor, slot: Tensor, weights: Tensor, out: Tensor, into: Tensor, scale: Tensor | None,
    cast: dict[str, float | int],
) -> Tensor:  # fmt: skip
    _refuse(reason_against(slot.shape[1], dtype=dy.dtype))
    dy, out = _dense_rows(dy), _dense_rows(out)
    (rows, cols), (tokens, top_k) = into.shape, slot.shape
    tiles = min(8, triton.next_power_of_2(ceil_div(cols, 128)))
    together, chunks = 4, ceil_div(cols, 128 * tiles)
    partial = torch.empty(chunks, tokens, top_k, dtype=torch.float32, device=dy.device)
    if into.numel():
        _weigh_kernel[(ceil_div(rows, _INERT) + ceil_div(tokens, together) * chunks,)](
            dy, copy, slot.contiguous(), weights.contiguous(), out, into, partial if scale is None else scale, partial, tokens,
            rows, cols, dy.stride(0), out.stride(0), TOP_K=top_k, CAST=scale is not None, TOKENS=together, TILES=tiles,
            INERT=_INERT, **cast, num_warps=4, **_EXACT,
        )  # fmt: skip
    return partial.sum(0)


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _words(x: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Both as rows of four-byte words where they can be read so, else of bytes."""
    x, out = x.view(torch.uint8), out.view(torch.uint8)
    if x.shape[1] % 4 or x.stride(0) % 4 or x.data_ptr() % 4:
        return x, out
    return x.view(torch.int32), out.view(torch.int32)


def _block(width: int, most: int) -> int:
    """The power of two, up to `most`, that covers a row with the least left over."""
    sizes = [most >> i for i in range(3)]
    return min(*sizes, triton.next_power_of_2(max(width, 1)), key=lambda size: (ceil_div(width, size) * size, -size))


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise ValueError(reason)


@triton.jit
def _experts_of(ids, real, i, copies, top_k, MASKED: tl.constexpr):
    """The expert of each copy, -1 where it goes nowhere."""
    expert = tl.load(ids + i, mask=i < copies, other=-1).to(tl.int32)
    if MASKED:
        expert = tl.where(tl.load(real + i // top_k, mask=i < copies, other=0) != 0, expert, -1)
    return expert


@triton.jit(do_not_specialize=["copies", "chunk", "top_k"])
def _count_kernel(ids, real, counts, copies, chunk, top_k, MASKED: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Copies of each expert in this program's part of them."""
    e = tl.arange(0, EXPERTS)
    total = tl.zeros([EXPERTS], tl.int32)
    start = tl.program_id(0) * chunk
    for first in range(start, tl.minimum(start + chunk, copies), BLOCK):
        expert = _experts_of(ids, real, first + tl.arange(0, BLOCK), copies, top_k, MASKED)
        total += tl.sum((expert[:, None] == e[None, :]).to(tl.int32), 0)
    tl.store(counts + tl.program_id(0) * EXPERTS + e, total)


@triton.jit(do_not_specialize=["copies", "chunk", "counting", "row_blocks", "top_k", "experts"])
def _place_kernel(
    ids, real, counts, copy, slot, groups, blocks, load, copies, chunk, counting, row_blocks, top_k, experts,
    MASKED: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    e = tl.arange(0, EXPERTS)
    total = tl.zeros([EXPERTS], tl.int32)
    before = tl.zeros([EXPERTS], tl.int32)
    for first in range(0, counting, PARTS):
        part = first + tl.arange(0, PARTS)
        counted = tl.load(counts + (part[:, None] * EXPERTS + e[None, :]), mask=(part < counting)[:, None], other=0)
        total += tl.sum(counted, 0)
        before += tl.sum(tl.where((part < program)[:, None], counted, 0), 0)
    end = tl.cumsum((total + 127) // 128, 0)
    start = end - (total + 127) // 128
    if program == 0:
        tl.store(blocks + e, start, mask=e < experts)
        tl.store(blocks + experts, tl.max(end, 0))
        tl.store(load + e, total, mask=e < experts)

    following = start * 128 + before  # the row of each expert's next copy
    j = tl.arange(0, BLOCK)
    for first in range(program * chunk, tl.minimum((program + 1) * chunk, copies), BLOCK):
        i = first + j
        expert = _experts_of(ids, real, i, copies, top_k, MASKED)
        mine = expert[:, None] == e[None, :]
        earlier = (expert[:, None] == expert[None, :]) & (j[None, :] < j[:, None])
        row = tl.sum(tl.where(mine, following[None, :], 0), 1) + tl.sum(earlier.to(tl.int32), 1)
        row = tl.where(expert >= 0, row, -1)
        tl.store(slot + i, row, mask=i < copies)
        tl.store(copy + row, i, mask=(row >= 0) & (row < row_blocks * 128))
        following += tl.sum(mine.to(tl.int32), 0)

    row_in = tl.arange(0, 128)
    for block in range(program, row_blocks, tl.num_programs(0)):
        owner = tl.sum((end <= block).to(tl.int32), 0)
        tl.store(groups + block, tl.where(owner < experts, owner, -1).to(tl.int64))
        live = tl.sum(tl.where(e == owner, total - (block - start) * 128, 0), 0)
        tl.store(copy + block * 128 + row_in, tl.full([128], -1, tl.int32), mask=row_in >= live)


@triton.jit(do_not_specialize=["tokens", "scale_stride_r", "scale_stride_c", "grid_cols"])
def _dispatch_kernel(
    x, x_scale, copy, slot, out, out_scale, tokens, rows, width, x_stride, scale_stride_r, scale_stride_c, grid_cols,
    TOP_K: tl.constexpr, SCALED: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, INERT: tl.constexpr,
):  # fmt: skip
    """The first programs see to what rows have beside their copies, the others to tokens, or to a part of each."""
    program = tl.program_id(0)
    looking = tl.cdiv(rows, INERT)
    if program < looking:
        row = program * INERT + tl.arange(0, INERT)
        held = tl.load(copy + row, mask=row < rows, other=0)
        if SCALED:
            _scales(x_scale, held, row, out_scale, rows, scale_stride_r, scale_stride_c, grid_cols, TOP_K)
        if tl.min(held, 0) < 0:
            _zeros(held, row.to(tl.int64), out, width, INERT, BLOCK)
    else:
        _send(x, slot, out, program - looking, tokens, width, x_stride, TOP_K, TOKENS, BLOCK)


@triton.jit
def _scales(x_scale, held, row, out_scale, rows, stride_r, stride_c, grid_cols, TOP_K: tl.constexpr):
    """The scales of these rows, 1 where they are inert."""
    token, there = (held // TOP_K).to(tl.int64), row < rows
    row = row.to(tl.int64)
    for first in range(0, grid_cols, 16):
        g = (first + tl.arange(0, 16)).to(tl.int64)
        exists = (g < grid_cols)[None, :]
        at = token[:, None] * stride_r + g[None, :] * stride_c
        s = tl.load(x_scale + at, mask=(held >= 0)[:, None] & exists, other=1.0)
        tl.store(out_scale + (g[None, :] * rows + row[:, None]), s, mask=there[:, None] & exists)


@triton.jit
def _zeros(held, row, out, width, INERT: tl.constexpr, BLOCK: tl.constexpr):
    """Zeros in those of these rows that are inert."""
    nothing = tl.zeros([INERT, BLOCK], tl.float32).to(out.dtype.element_ty)
    for first in range(0, width, BLOCK):
        c = first + tl.arange(0, BLOCK)
        tl.store(out + (row[:, None] * width + c[None, :]), nothing, mask=(held < 0)[:, None] & (c < width)[None, :])


@triton.jit
def _send(x, slot, out, program, tokens, width, x_stride, TOP_K: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    """A block of each of some tokens to all its rows."""
    chunks = tl.cdiv(width, BLOCK)
    t = program // chunks * TOKENS + tl.arange(0, TOKENS)
    c = program % chunks * BLOCK + tl.arange(0, BLOCK)
    exists = (c < width)[None, :]
    values = tl.load(x + (t.to(tl.int64)[:, None] * x_stride + c[None, :]), mask=(t < tokens)[:, None] & exists)
    for choice in tl.static_range(TOP_K):
        row = tl.load(slot + t * TOP_K + choice, mask=t < tokens, other=-1)
        tl.store(out + (row.to(tl.int64)[:, None] * width + c[None, :]), values, mask=(row >= 0)[:, None] & exists)


@triton.jit(do_not_specialize=["count"])
def _pick_kernel(values, index, out, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(index + i, mask=i < count, other=-1)
    tl.store(out + i, tl.load(values + at, mask=at >= 0, other=0), mask=i < count)


@triton.jit(do_not_specialize=["tokens"])
def _combine_kernel(
    rows, slot, weights, out, tokens, cols, stride,
    TOP_K: tl.constexpr, WEIGHTS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunks = tl.cdiv(cols, BLOCK)
    t = tl.program_id(0) // chunks * TOKENS + tl.arange(0, TOKENS)
    c = tl.program_id(0) % chunks * BLOCK + tl.arange(0, BLOCK)
    inside = (t < tokens)[:, None] & (c < cols)[None, :]
    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        row = tl.load(slot + t * TOP_K + choice, mask=t < tokens, other=-1)
        sent = (row >= 0)[:, None] & inside
        part = tl.load(rows + (row.to(tl.int64)[:, None] * stride + c[None, :]), mask=sent, other=0.0).to(tl.float32)
        if WEIGHTS:
            part = part * tl.load(weights + t * TOP_K + choice, mask=row >= 0, other=0.0)[:, None]
        total += part
    tl.store(out + (t.to(tl.int64)[:, None] * cols + c[None, :]), total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _weigh_kernel(
    dy, copy, slot, weights, out, into, scale, partial, tokens, rows, cols, dy_stride, out_stride,
    TOP_K: tl.constexpr, CAST: tl.constexpr, LIMIT: tl.constexpr, LIMIT_BITS: tl.constexpr, POW2: tl.constexpr,
    TOKENS: tl.constexpr, TILES: tl.constexpr, INERT: tl.constexpr,
):  # fmt: skip
    """The first programs see to inert rows, the others to TILES tiles of some tokens."""
    program = tl.program_id(0)
    looking = tl.cdiv(rows, INERT)
    if program < looking:
        row = program * INERT + tl.arange(0, INERT)
        held = tl.load(copy + row, mask=row < rows, other=0)
        if tl.min(held, 0) < 0:
            _zeros(held, row.to(tl.int64), into, cols, INERT, 128)
            if CAST:
                for tile in range(tl.cdiv(cols, 128)):
                    tl.store(scale + (tile * rows + row), tl.full([INERT], 1.0, tl.float32), mask=held < 0)
    else:
        _weigh(
            dy, slot, weights, out, into, scale, partial, program - looking, tokens, rows, cols, dy_stride, out_stride,
            TOP_K, CAST, LIMIT, LIMIT_BITS, POW2, TOKENS, TILES,
        )  # fmt: skip


@triton.jit
def _weigh(
    dy, slot, weights, out, into, scale, partial, program, tokens, rows, cols, dy_stride, out_stride,
    TOP_K: tl.constexpr, CAST: tl.constexpr, LIMIT: tl.constexpr, LIMIT_BITS: tl.constexpr, POW2: tl.constexpr,
    TOKENS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """dY of a token times the weight of each of its choices, in the choice's row; and its product with what the row had."""
    chunks = tl.cdiv(cols, TILES * 128)
    chunk = program % chunks
    t = program // chunks * TOKENS + tl.arange(0, TOKENS)
    there = t < tokens
    tile = chunk * TILES + tl.arange(0, TILES)
    c = (tile[:, None] * 128 + tl.arange(0, 128)[None, :])[None, :, :]
    given = tl.load(dy + (t.to(tl.int64)[:, None, None] * dy_stride + c), mask=there[:, None, None] & (c < cols), other=0.0)
    given = given.to(tl.float32)
    for choice in range(TOP_K):
        row = tl.load(slot + t * TOP_K + choice, mask=there, other=-1)
        sent = (row >= 0)[:, None, None] & (c < cols)
        r = row.to(tl.int64)
        made = tl.load(out + (r[:, None, None] * out_stride + c), mask=sent, other=0.0).to(tl.float32)
        of_choice = t * TOP_K + choice
        dots = tl.where(row >= 0, tl.sum(tl.sum(given * made, 2), 1), 0.0)
        tl.store(partial + chunk.to(tl.int64) * tokens * TOP_K + of_choice, dots, mask=there)
        weighted = given * tl.load(weights + of_choice, mask=there, other=0.0)[:, None, None]
        if CAST:
            weighted, s = scaled_along(weighted, 2, LIMIT, LIMIT_BITS, POW2)
            at = tile.to(tl.int64)[None, :] * rows + r[:, None]
            tl.store(scale + at, s, mask=(row >= 0)[:, None] & (tile * 128 < cols)[None, :])
        tl.store(into + (r[:, None, None] * cols + c), weighted.to(into.dtype.element_ty), mask=sent)
