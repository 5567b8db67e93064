"""Quantize and re-tile, in torch: the specification of every quantizing kernel.

amax -> scale s -> r = 1/s -> code = RNE(clamp(x * r, +-max)); both divisions IEEE, the product in fp32.
A tile with NaN or inf gets scale NaN, so that it is never hidden as a saturated 448.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv3fp8.precision import cast_meter
from dsv3fp8.precision.formats import E5M6, Format, encode
from dsv3fp8.precision.tiles import QuantizedTensor, Tile, ceil_div, grid_size

_SMALLEST_SCALE = 2.0**-126  # the smallest normal fp32; its reciprocal 2^126 is normal too
_LARGEST_SCALE = 2.0**126


def scale_from_amax(amax: Tensor, fmt: Format, kind: str) -> Tensor:
    """The dequantization factor of tiles with these largest magnitudes.

    amax: float32, any shape. kind: "fp32" (amax / max) or "pow2" (the smallest power of two not below it).
    An all-zero tile has scale 1; NaN or inf poisons (NaN). There is no amax floor: gradients of a token-mean loss
    reach 1e-9. The scale is clamped only so that it and its reciprocal are normal fp32 numbers.
    """
    if kind == "pow2":
        scale = _pow2_scale(amax, fmt)
    elif kind == "fp32":
        # A tensor, not a Python number: CUDA multiplies by the reciprocal of a number, which is not IEEE division.
        scale = amax / torch.full((), fmt.max, dtype=torch.float32, device=amax.device)
    else:
        raise ValueError(f"scale kind {kind!r}: fp32 or pow2")
    scale = scale.clamp(_SMALLEST_SCALE, _LARGEST_SCALE)
    scale = torch.where(amax == 0, 1.0, scale)
    return torch.where(torch.isfinite(amax), scale, torch.nan)


def _pow2_scale(amax: Tensor, fmt: Format) -> Tensor:
    # Exact, from the bits: with amax = m * 2^e and max = M * 2^E, the exponent is e - E, one more where m > M.
    # Subnormal amax give an exponent far below -126, which the caller clamps.
    limit = int(torch.tensor(fmt.max, dtype=torch.float32).view(torch.int32))
    bits = amax.contiguous().view(torch.int32)
    exponent = (bits >> 23) - (limit >> 23) + ((bits & 0x7FFFFF) > (limit & 0x7FFFFF))
    return ((exponent + 127).clamp(1, 254) << 23).view(torch.float32)


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
    """Quantizes a matrix or a stack of matrices.

    Args:
        x: [..., R, C], any float dtype and strides; arithmetic is fp32.
        tile: rows and columns that share a scale; tail tiles cover what is there.
        row_parts, col_parts: equal parts tiled each on their own (gate and up halves). A dimension that is one tile
            as a whole (row, tensor) is not cut: its scale stays constant along K.
        groups: with tile.rows None, int64 [R / 128]: the expert each block of 128 rows belongs to, -1 for blocks of
            zeros that belong to none. Every expert then has its own scale, stored once per block of 128 rows.
        scale: a given scale grid (delayed, static scaling) instead of one from amax. A tile that holds NaN or inf is
            poisoned all the same.
    """
    *lead, rows, cols = x.shape
    row_parts, col_parts = (1 if tile.rows is None else row_parts), (1 if tile.cols is None else col_parts)
    grouped = tile.rows is None and groups is not None
    if grouped:
        tile = Tile(128, tile.cols)
    grid = (*lead, grid_size(rows, tile.rows, row_parts), grid_size(cols, tile.cols, col_parts))
    shape = tuple(x.shape)
    if x.numel() == 0:
        return _empty(x, fmt, tile, kind, grid, row_parts, col_parts)
    tiled = _tiled(x.to(torch.float32), tile, row_parts, col_parts)  # [..., parts, n, r, parts, n, c]
    amax = tiled.abs().amax((-4, -1)).reshape(grid)
    if grouped:
        assert groups is not None
        amax = _amax_of_group(amax, groups)
    given = scale is not None
    scale = scale_from_amax(amax, fmt, kind) if scale is None else torch.where(torch.isfinite(amax), scale, torch.nan)
    spread = scale.reshape(*tiled.shape[:-4], 1, *tiled.shape[-3:-1], 1)
    scaled = tiled * (1.0 / spread)
    codes_in = _untiled(scaled, rows, cols)
    if fmt is E5M6 and cols % 2:
        codes_in = F.pad(codes_in, (0, 1))
    codes = encode(codes_in, fmt)
    meter = cast_meter.active_meter()
    if meter is not None:
        beyond = codes_in[..., :cols].abs() > fmt.saturates_above if given else None
        meter.record(x, zero_codes(codes, fmt, cols), beyond)
    return QuantizedTensor(codes, scale, fmt, tile, shape, kind, row_parts, col_parts, grouped)


def retile(
    source: QuantizedTensor,
    tile: Tile,
    kind: str | None = None,
    *,
    fmt: Format | None = None,
    groups: Tensor | None = None,
) -> QuantizedTensor:
    """Code -> value -> code: the same values under another tile (and format). Takes the source's scale kind unless given.

    With power-of-two scales it is exact barring underflow; with fp32 scales about 98 % of the values change.
    """
    return quantize(
        source.decode(),
        fmt or source.format,
        tile,
        kind or source.scale_kind,
        row_parts=source.row_parts,
        col_parts=source.col_parts,
        groups=groups,
    )


def zero_codes(codes: Tensor, fmt: Format, cols: int) -> Tensor:
    """Boolean [..., R, C]: where a code stands for zero."""
    if fmt is E5M6:
        from dsv3fp8.precision.formats import unpack12

        return (unpack12(codes)[..., :cols] & 0x7FF) == 0
    return (codes.view(torch.uint8) & 0x7F) == 0


def _tiled(x: Tensor, tile: Tile, row_parts: int, col_parts: int) -> Tensor:
    *_, rows, cols = x.shape
    x = x.unflatten(-1, (col_parts, cols // col_parts)).unflatten(-3, (row_parts, rows // row_parts))
    r, c = tile.rows or x.shape[-3], tile.cols or x.shape[-1]  # x: [..., row part, row, col part, col]
    pad_rows, pad_cols = -x.shape[-3] % r, -x.shape[-1] % c
    if pad_rows or pad_cols:
        x = F.pad(x, (0, pad_cols, 0, 0, 0, pad_rows))
    return x.unflatten(-1, (x.shape[-1] // c, c)).unflatten(-4, (x.shape[-3] // r, r))


def _untiled(tiled: Tensor, rows: int, cols: int) -> Tensor:
    row_parts, col_parts = tiled.shape[-6], tiled.shape[-3]
    x = tiled.flatten(-2).flatten(-4, -3)  # [..., row part, row, col part, col]
    return x[..., : rows // row_parts, :, : cols // col_parts].flatten(-2).flatten(-3, -2)


def _amax_of_group(amax: Tensor, groups: Tensor) -> Tensor:
    groups = groups.clamp(min=0)  # blocks of no expert are zeros, whoever takes them in
    count = int(groups.max()) + 1
    largest = amax.new_zeros(count, amax.shape[1])
    # index_reduce may order its comparisons as it likes: a maximum does not depend on the order. NaN propagates.
    index = groups[:, None].expand_as(amax)
    return largest.scatter_reduce(0, index, amax, "amax").index_select(0, groups)


def _empty(
    x: Tensor, fmt: Format, tile: Tile, kind: str, grid: tuple[int, ...], row_parts: int, col_parts: int
) -> QuantizedTensor:
    cols = ceil_div(x.shape[-1], 2) * 3 if fmt is E5M6 else x.shape[-1]
    codes = torch.zeros(*x.shape[:-1], cols, dtype=torch.uint8, device=x.device).view(fmt.dtype)
    scale = torch.ones(grid, dtype=torch.float32, device=x.device)
    return QuantizedTensor(codes, scale, fmt, tile, tuple(x.shape), kind, row_parts, col_parts)
