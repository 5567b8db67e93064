"""Quantize and re-tile in Triton: the reference's codes and scales, bit for bit.

Kernels by tile: rows.py (1x128), columns.py (128x1), both.py (the two from one read) and blocks.py (128x128), all in one pass
over the values; wide.py (a whole row, column or matrix) in two. Codes in 128x1 and allx1 tiles, and those re-tiled expert by
expert, are stored with the rows contiguous, all others row by row; scales of 1x128 tiles with the rows contiguous.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv3fp8.kernels.quantize import blocks, both, columns, rows, wide
from dsv3fp8.kernels.quantize.source import Source
from dsv3fp8.precision import cast_meter
from dsv3fp8.precision.formats import E5M6, Format
from dsv3fp8.precision.tiles import BLOCK_128, COLUMN_128, ROW_128, QuantizedTensor, Tile

_KERNELS = {ROW_128: rows.quantize_rows, COLUMN_128: columns.quantize_columns, BLOCK_128: blocks.quantize_blocks}


def reason_against(fmt: Format, tile: Tile, cols: int, col_parts: int = 1, scale: Tensor | None = None) -> str | None:
    """Why these kernels cannot quantize as asked, or None when they can. cols: width of the whole matrix."""
    if tile not in _KERNELS and tile not in wide.OF:
        return f"no Triton kernel for tile {tile}"
    if scale is not None and tile != Tile(None, None):
        return f"no Triton kernel for given scales of tile {tile}"
    if fmt is E5M6 and tile != ROW_128:
        return f"no Triton kernel for {fmt.name} with tile {tile}"
    if fmt is E5M6 and col_parts > 1 and (cols // col_parts) % 2:
        return "halves of odd width share the bytes of a packed pair"
    if cast_meter.active_meter() is not None:
        return "what casts lose is being counted"
    return None


def passes(tile: Tile, given: bool) -> str:
    """How often a cast to these tiles reads the values, in words. given: under a scale that is known before."""
    if tile in _KERNELS:
        return "one pass over the values"
    # For a kept scale torch finds the largest magnitude (ops/quantizers.py); the kernel has to look for what is not finite.
    return f"two passes over the values, the first for the largest{', behind one by torch for the same' if given else ''}"


def reason_against_source(source: QuantizedTensor) -> str | None:
    """Why these kernels cannot read the codes of this tensor, or None when they can."""
    if source.tile.rows not in (1, None) or source.tile.cols not in (128, None):
        return f"no Triton kernel reads codes in tiles {source.tile}"
    if source.codes.stride(-1) != 1:
        return "codes are not contiguous along the rows"
    return None


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
    """`reference.quantize` for all tiles (E5M6: 1x128), scale: where a matrix has one.

    x: [..., R, C], any float dtype and strides. Raises ValueError where `reason_against` gives a reason.
    """
    _check(fmt, tile, kind, x.shape, col_parts, scale)
    return _quantize(Source.of(x, row_parts, col_parts), fmt, tile, kind, groups, scale)


def quantize_both(x: Tensor, fmt: Format, kind: str = "fp32", *, col_parts: int = 1) -> tuple[QuantizedTensor, QuantizedTensor]:
    """x in 1x128 and in 128x1 tiles, from one read."""
    _check(fmt, COLUMN_128, kind, x.shape, col_parts)
    return both.quantize_both(Source.of(x, 1, col_parts), fmt, kind)


def quantize_mirrored(
    x: Tensor, fmt: Format, kind: str = "fp32", *, row_parts: int = 1
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """x in 128x128 tiles, and the same codes and scales stored as the transposed matrix, from one read."""
    _check(fmt, BLOCK_128, kind, x.shape, 1)
    return blocks.quantize_mirrored(Source.of(x, row_parts), fmt, kind)


def retile(
    source: QuantizedTensor,
    tile: Tile,
    kind: str | None = None,
    *,
    fmt: Format | None = None,
    groups: Tensor | None = None,
) -> QuantizedTensor:
    """`reference.retile`: code -> fp32(code * scale) -> code, in one pass (two where a scale covers a row or column)."""
    _refuse(reason_against_source(source))
    fmt, kind = fmt or source.format, kind or source.scale_kind
    _check(fmt, tile, kind, source.shape, source.col_parts)
    return _quantize(Source.of_codes(source), fmt, tile, kind, groups)


def decode(source: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """fp32(code * scale) of codes in 1x128 tiles, rounded to bf16, fp16 or fp32."""
    _refuse(reason_against_source(source))
    return rows.decode_rows(Source.of_codes(source), dtype)


def _quantize(
    source: Source, fmt: Format, tile: Tile, kind: str, groups: Tensor | None = None, scale: Tensor | None = None
) -> QuantizedTensor:
    if tile in _KERNELS:
        return _KERNELS[tile](source, fmt, kind)
    return wide.quantize_wide(source, fmt, tile, kind, groups, scale)


def _check(fmt: Format, tile: Tile, kind: str, shape: tuple[int, ...], col_parts: int, scale: Tensor | None = None) -> None:
    _refuse(reason_against(fmt, tile, shape[-1], col_parts, scale))
    if kind not in ("fp32", "pow2"):
        raise ValueError(f"scale kind {kind!r}: fp32 or pow2")


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise ValueError(reason)
