"""The accumulator of Hopper's FP8 tensor core in torch, to the bit: the definition that every kernel is held against.

The tensor core takes products of codes in groups of 32. A product keeps its significand as it is, in [1, 4), with the
exponent e_a + e_b (subnormals keep the format's smallest exponent). The 32 products and the running sum are aligned to the
largest exponent among them, each truncated toward zero to 13 fraction bits, summed exactly, normalized, and truncated to
13 fraction bits again. This was read off an H200, bit for bit. A chain of such groups starts from zero; after
`promote_every` products its sum is added to an fp32 total.

Everything here is exact in fp32: a product of two codes has 8 significant bits at most, and aligned terms are integers below
2^15, so that 33 of them sum below 2^24 in any order. NaN and inf come out as IEEE arithmetic would have them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dsv3fp8.precision.formats import E4M3, E5M2, Format, decode
from dsv3fp8.precision.tiles import QuantizedTensor

GROUP = 32  # products that the tensor core aligns to one exponent
FRACTION = 13  # bits behind the point of what is aligned, and of the running sum
BLOCK = 128  # products that share a pair of scales
NEVER = "never"

# Zeros count as -126. Nothing that is not zero lies below 2^-41 (E5M2: 2^-28 to 13 bits), so any floor below that will do,
# and this one keeps the powers of two that align an empty sum within fp32.
_FLOOR = -100
_DROPPED = 0x7FFFFF >> FRACTION  # the bits of an fp32 significand beyond 13
_CHUNK = 2**16  # outputs at a time, 32 products each: 8 MB a tensor


def products(a: Tensor, b: Tensor, promote_every: int | str) -> Tensor:
    """The tensor core's sum of a [M, K] times b [N, K], codes without scales -> fp32 [M, N].

    a, b: float8_e4m3fn or float8_e5m2, also one of each; any strides; any K, the last group holds what is there.
    promote_every: a multiple of 32, or "never". Each chain starts from zero; chain sums are added in fp32 in order.
    """
    check_codes(a, b)
    (rows, k), cols = a.shape, b.shape[0]
    interval = chain_length(promote_every, k)
    out = torch.zeros(rows, cols, dtype=torch.float32, device=a.device)
    for part in _chunks(a, b):
        out[part.rows, part.cols] = part.partial(0, k, interval)
    return canonical(out)


def block_scaled(a: QuantizedTensor, b: QuantizedTensor, promote_every: int | str) -> Tensor:
    """a [M, K] times b [N, K] with their scales, as cuBLASLt's block-scaled GEMM sums them -> fp32 [M, N].

    With p the tensor core's sum over a K block of 128, blocks in order, each line rounding to fp32 once:
    b with a scale per row (1x128, as in wgrad):  acc = fma(fp32(p * s_a), s_b, acc)
    b tiled over rows (128x128, or one scale):    acc = fma(p, fp32(s_a * s_b), acc)
    Scales that are constant along K in both multiply the finished sum once, by fp32(s_a * s_b).

    promote_every: 32, 64 or 128 (shorter chains of a block are added in fp32, in order, and scaled once); with scales
    constant along K any multiple of 32, or "never". Blocks restart at each part of a K that is tiled in parts.
    Raises ValueError for longer chains across scales, and for operands whose K is cut differently.
    """
    check_codes(a.codes, b.codes)
    if a.constant_along_k and b.constant_along_k:
        return canonical(products(a.codes, b.codes, promote_every) * (a.expanded_rows() * b.expanded_rows().mT))
    blocks = k_blocks(a, b)
    interval = block_chain_length(promote_every)
    scale_a, scale_b = scale_per_block(a, len(blocks)), scale_per_block(b, len(blocks))
    per_row = scales_rows_of_b(b)
    out = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32, device=a.codes.device)
    for part in _chunks(a.codes, b.codes):
        total = out[part.rows, part.cols]
        for block, (start, stop) in enumerate(blocks):
            p = part.partial(start, stop, interval)
            s_a, s_b = scale_a[part.rows, block, None], scale_b[None, part.cols, block]
            total = fma(p * s_a, s_b, total) if per_row else fma(p, s_a * s_b, total)
        out[part.rows, part.cols] = total
    return canonical(out)


def fma(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """fp32(x * y + z) with one rounding, for fp32 tensors of any broadcastable shapes.

    The product of two fp32 is exact in fp64. The sum is rounded to odd there: where it is not exact, its last bit is made
    one. Rounding that to fp32 gives what rounding the exact sum gives, as fp64 has at least two bits more than fp32
    (Boldo and Melquiond 2008, "Emulation of FMA and correctly rounded sums").
    """
    wide = x.double() * y.double()
    wide, addend = torch.broadcast_tensors(wide, z.double())
    total = wide + addend
    back = total - wide
    error = (wide - (total - back)) + (addend - back)  # Knuth's two-sum: total + error is the exact sum
    bits = total.view(torch.int64)
    outward = torch.where((error > 0) == (total > 0), 1, -1)  # toward the exact sum, in steps of the magnitude
    inexact = (error != 0) & torch.isfinite(total) & (bits & 1 == 0)
    return torch.where(inexact, bits + outward, bits).view(torch.float64).float()


def exponents(codes: Tensor) -> Tensor:
    """int32 exponent of each code as the tensor core sees it: subnormals keep the smallest one, zero counts as -126."""
    raw = codes.view(torch.uint8).to(torch.int32)
    field = (raw >> 3) & 0xF if codes.dtype is E4M3.dtype else (raw >> 2) & 0x1F
    exponent = field.clamp(min=1) - (7 if codes.dtype is E4M3.dtype else 15)
    return torch.where(raw & 0x7F == 0, -126, exponent)


def any_special(codes: Tensor) -> bool:
    """Whether a code is NaN (or, E5M2, inf)."""
    mask = 0x7F if codes.dtype is E4M3.dtype else 0x7C
    return bool(((codes.view(torch.uint8) & mask) == mask).any())


def format_of(codes: Tensor) -> Format:
    """E4M3 or E5M2 by the codes' dtype."""
    return E4M3 if codes.dtype is E4M3.dtype else E5M2


def canonical(out: Tensor) -> Tensor:
    """NaN with one bit pattern: adders differ in the sign of the NaN that inf - inf gives."""
    return torch.where(torch.isnan(out), torch.nan, out)


def check_codes(a: Tensor, b: Tensor) -> None:
    """Raise ValueError unless a and b are matrices of float8 codes with one K."""
    for codes in (a, b):
        if codes.dtype not in (E4M3.dtype, E5M2.dtype):
            raise ValueError(f"the tensor core multiplies float8 codes, not {codes.dtype}")
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"a [M, K] times b [N, K]: got {tuple(a.shape)} and {tuple(b.shape)}")


def chain_length(promote_every: int | str, k: int) -> int:
    """Products of one chain when nothing but `promote_every` ends it."""
    if promote_every == NEVER:
        return max(k, 1)
    if not isinstance(promote_every, int) or promote_every < GROUP or promote_every % GROUP:
        raise ValueError(f"promote_every={promote_every!r}: a multiple of {GROUP}, or never")
    return promote_every


def block_chain_length(promote_every: int | str) -> int:
    """The same inside a K block of 128 with its own scales."""
    if promote_every not in (32, 64, 128):
        raise ValueError(f"promote_every={promote_every!r}: chains longer than 128 need scales that are constant along K")
    return int(promote_every)


def scales_rows_of_b(b: QuantizedTensor) -> bool:
    """Whether b has a scale per row: then s_a and s_b multiply one after the other."""
    return b.tile.rows == 1


def k_blocks(a: QuantizedTensor, b: QuantizedTensor) -> list[tuple[int, int]]:
    """(start, stop) of the K blocks, in order; each lies within one tile of a and one of b."""
    tiled = [operand for operand in (a, b) if not operand.constant_along_k]
    for operand in tiled:
        if operand.tile.cols != BLOCK:
            raise ValueError(f"no block-scaled sum for tile {operand.tile}: tiles are {BLOCK} along K, or all of it")
    if len({operand.col_parts for operand in tiled}) > 1:
        raise ValueError(f"K is tiled in {a.col_parts} parts in a and {b.col_parts} in b")
    part = a.shape[1] // tiled[0].col_parts
    starts = ((p * part + at, (p + 1) * part) for p in range(tiled[0].col_parts) for at in range(0, part, BLOCK))
    return [(start, min(start + BLOCK, end)) for start, end in starts]


def scale_per_block(operand: QuantizedTensor, blocks: int) -> Tensor:
    """fp32 [rows, blocks]: each row's scale in each K block (a view where scales are shared)."""
    return operand.expanded_rows().expand(operand.shape[0], blocks)


class _Chunk:
    """Some rows of a and of b, decoded. rows, cols: where their products stand in the output."""

    def __init__(self, a: Tensor, b: Tensor, rows: slice, cols: slice, special: bool) -> None:
        self.rows, self.cols, self.special = rows, cols, special
        a, b = a[rows], b[cols]
        self.a, self.b = decode(a, format_of(a))[:, None], decode(b, format_of(b))[None]
        self.exponent_a, self.exponent_b = exponents(a)[:, None], exponents(b)[None]

    def partial(self, start: int, stop: int, interval: int) -> Tensor:
        """The sum over K in start:stop, promoted to fp32 after each chain of `interval`."""
        total = self.a.new_zeros(self.a.shape[0], self.b.shape[1])
        for chain in range(start, stop, interval):
            end = min(chain + interval, stop)
            acc = torch.zeros_like(total)
            for at in range(chain, end, GROUP):
                acc = self.group(acc, slice(at, min(at + GROUP, end)))
            total = total + acc
        return total

    def group(self, acc: Tensor, k: slice) -> Tensor:
        """The running sum [m, n] after 32 more products: one step of the tensor core."""
        terms = self.a[..., k] * self.b[..., k]
        plain = acc + terms.sum(-1) if self.special else None
        largest = (self.exponent_a[..., k] + self.exponent_b[..., k]).amax(-1)
        running = ((acc.view(torch.int32) >> 23) & 0xFF) - 127
        exponent = torch.maximum(largest, running).clamp_(min=_FLOOR)
        up, down = _power_of_two(FRACTION - exponent), _power_of_two(exponent - FRACTION)
        total = terms.mul_(up[..., None]).trunc_().sum(-1)
        total += (acc * up).trunc_()
        total += 0.0  # a sum of nothing but -0 is 0
        acc = (total.view(torch.int32) & ~_DROPPED).view(torch.float32) * down
        return acc if plain is None else torch.where(torch.isfinite(plain), acc, plain)


def _power_of_two(exponent: Tensor) -> Tensor:
    return ((exponent + 127) << 23).view(torch.float32)


def _chunks(a: Tensor, b: Tensor) -> Iterator[_Chunk]:
    """Covers the output with chunks whose products fit in memory, whatever M and N are."""
    width = min(b.shape[0], 256)
    height = max(_CHUNK // max(width, 1), 1)
    special = any_special(a) or any_special(b)
    for row in range(0, a.shape[0], height):
        for col in range(0, b.shape[0], max(width, 1)):
            yield _Chunk(a, b, slice(row, row + height), slice(col, col + width), special)
