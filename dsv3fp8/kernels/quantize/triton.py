"""Quantize and re-tile in Triton: the reference's codes and scales, bit for bit, in one pass over the values.

Kernels by tile: rows.py (1x128), columns.py (128x1), both.py (the two from one read), blocks.py (128x128). Codes in 128x1 tiles
are stored with the rows contiguous, all others row by row; scales of 1x128 tiles with the rows contiguous.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv3fp8.kernels.quantize import blocks, both, columns, rows
from dsv3fp8.kernels.quantize.source import Source
from dsv3fp8.precision import flush
from dsv3fp8.precision.formats import E5M6, Format
from dsv3fp8.precision.tiles import BLOCK_128, COLUMN_128, ROW_128, QuantizedTensor, Tile

_KERNELS = {ROW_128: rows.quantize_rows, COLUMN_128: columns.quantize_columns, BLOCK_128: blocks.quantize_blocks}


def reason_against(
    fmt: Format, tile: Tile, cols: int, col_parts: int = 1, groups: Tensor | None = None, scale: Tensor | None = None
) -> str | None:
    """Why these kernels cannot quantize as asked, or None when they can. cols: width of the whole matrix."""
    if tile not in _KERNELS:
        return f"no Triton kernel for tile {tile}"
    if groups is not None or scale is not None:
        return "no Triton kernel for given scales"
    if fmt is E5M6 and tile != ROW_128:
        return f"no Triton kernel for {fmt.name} with tile {tile}"
    if fmt is E5M6 and col_parts > 1 and (cols // col_parts) % 2:
        return "halves of odd width share the bytes of a packed pair"
    if flush.active_meter() is not None:
        return "flushed values are being counted"
    return None


def reason_against_source(source: QuantizedTensor) -> str | None:
    """Why these kernels cannot read the codes of this tensor, or None when they can."""
    if source.tile != ROW_128:
        return f"no Triton kernel reads codes in tiles {source.tile}"
    if source.codes.stride(-1) != 1:
        return "codes are not contiguous along the rows"
    return None


def quantize(
    x: Tensor, fmt: Format, tile: Tile, kind: str = "fp32", *, row_parts: int = 1, col_parts: int = 1
) -> QuantizedTensor:
    """`reference.quantize` for tiles 1x128, 128x1 and 128x128 (E5M6: 1x128).

    x: [..., R, C], any float dtype and strides. Raises ValueError where `reason_against` gives a reason.
    """
    return _KERNELS[_checked(fmt, tile, kind, x.shape, col_parts)](Source.of(x, row_parts, col_parts), fmt, kind)


def quantize_both(x: Tensor, fmt: Format, kind: str = "fp32", *, col_parts: int = 1) -> tuple[QuantizedTensor, QuantizedTensor]:
    """x in 1x128 and in 128x1 tiles, from one read."""
    _checked(fmt, COLUMN_128, kind, x.shape, col_parts)
    return both.quantize_both(Source.of(x, 1, col_parts), fmt, kind)


def quantize_mirrored(
    x: Tensor, fmt: Format, kind: str = "fp32", *, row_parts: int = 1
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """x in 128x128 tiles, and the same codes and scales stored as the transposed matrix, from one read."""
    _checked(fmt, BLOCK_128, kind, x.shape, 1)
    return blocks.quantize_mirrored(Source.of(x, row_parts), fmt, kind)


def retile(source: QuantizedTensor, tile: Tile, kind: str | None = None, *, fmt: Format | None = None) -> QuantizedTensor:
    """`reference.retile` from 1x128 tiles: code -> fp32(code * scale) -> code, in one pass."""
    _refuse(reason_against_source(source))
    fmt, kind = fmt or source.format, kind or source.scale_kind
    return _KERNELS[_checked(fmt, tile, kind, source.shape, source.col_parts)](Source.of_codes(source), fmt, kind)


def decode(source: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """fp32(code * scale) of codes in 1x128 tiles, rounded to bf16, fp16 or fp32."""
    _refuse(reason_against_source(source))
    return rows.decode_rows(Source.of_codes(source), dtype)


def _checked(fmt: Format, tile: Tile, kind: str, shape: tuple[int, ...], col_parts: int) -> Tile:
    _refuse(reason_against(fmt, tile, shape[-1], col_parts))
    if kind not in ("fp32", "pow2"):
        raise ValueError(f"scale kind {kind!r}: fp32 or pow2")
    return tile


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise ValueError(reason)
