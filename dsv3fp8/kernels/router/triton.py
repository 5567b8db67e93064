"""The router's arithmetic in Triton: two launches forward, one backward.

Scores and ids have the bits that torch gives on the same GPU: exp is CUDA's own, softmax sums as torch's kernel for rows of
up to 1024 does. Other sums, over experts, over choices and over the tokens of a sequence, are taken in an order of their own,
the same in every run: no atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from dsv3fp8.kernels.quantize.device import INTERPRETED
from dsv3fp8.kernels.router.reference import Kept, Rule
from dsv3fp8.precision.tiles import ceil_div

_EXACT = {"enable_fp_fusion": False, "enable_reflect_ftz": False}  # no operation but those written, subnormals kept
_MOST_EXPERTS = 1024
_MOST_CHOICES = 32
_ABSENT = tl.constexpr(-(2**31))  # below every score's place in order
_NAN = tl.constexpr(0x7FFFFFFF)
_MINUS_INFINITY = tl.constexpr(-0x7F800001)
_LAST = tl.constexpr(0xFFFF)  # beyond every index
_TAKEN = tl.constexpr(-(2**63))
_TINY = tl.constexpr(1e-20)


def reason_against(experts: int, top_k: int, dtype: torch.dtype = torch.float32) -> str | None:
    """Why these kernels cannot route so, or None when they can."""
    if dtype != torch.float32:
        return f"the Triton router takes fp32, not {str(dtype).removeprefix('torch.')}"
    if experts > _MOST_EXPERTS:
        return f"the Triton router takes {_MOST_EXPERTS} experts, not {experts}"
    if top_k > _MOST_CHOICES:
        return f"the Triton router takes {_MOST_CHOICES} choices of a token, not {top_k}"
    return None


def forward(logits: Tensor, bias: Tensor, rule: Rule, sequences: int, real: Tensor | None) -> tuple[Tensor, Tensor, Kept]:
    """`reference.forward`."""
    (count, experts), device = logits.shape, logits.device
    _refuse(reason_against(experts, rule.top_k, logits.dtype))
    logits, length = logits.contiguous(), count // sequences
    sizes = _sizes(experts, rule)
    blocks = ceil_div(length, sizes["TOKENS"])
    ids = torch.empty(count, rule.top_k, dtype=torch.int64, device=device)
    weights, chosen, total, shares = (
        torch.empty(count, *rest, dtype=torch.float32, device=device) for rest in ((rule.top_k,), (rule.top_k,), (1,), (1,))
    )
    scores = torch.empty_like(logits)
    parts = torch.empty(sequences * blocks, experts, dtype=torch.float32, device=device)
    hits = torch.empty(sequences * blocks, experts, dtype=torch.int32, device=device)
    tokens, balance = (torch.empty(sequences, n, dtype=torch.float32, device=device) for n in (1, ceil_div(experts, 32)))
    frequency = torch.empty(sequences, experts, dtype=torch.float32, device=device)
    mask = _bytes(real, logits)
    if count:
        _router_forward_kernel[(sequences * blocks,)](
            logits, bias, mask, scores, ids, weights, chosen, total, shares, parts, hits, length, experts, rule.route_scale,
            SOFTMAX=rule.score == "softmax", KEPT=rule.kept_groups, NORMALIZE=rule.normalize, MASKED=real is not None, **sizes,
            num_warps=4, **_EXACT,
        )  # fmt: skip
    if sequences:
        _balance_kernel[(balance.numel(),)](
            mask, parts, hits, frequency, tokens, balance, length, blocks, experts, MASKED=real is not None, PARTS=128,
            TOP_K=rule.top_k, EXPERTS=32, num_warps=8, **_EXACT,
        )  # fmt: skip
    kept = Kept(
        ids, scores, chosen if rule.normalize else None, total if rule.normalize else None,
        shares.view(sequences, length, 1), frequency, None if real is None else tokens, real,
    )  # fmt: skip
    return weights, balance.sum(), kept


def backward(kept: Kept, dweights: Tensor, dbalance: Tensor, rule: Rule) -> Tensor:
    """`reference.backward`."""
    scores, (sequences, length, _) = kept.scores, kept.shares.shape
    dlogits = torch.empty_like(scores)
    if dlogits.numel():
        experts = scores.shape[1]
        together = max(1, min(8, 1024 // triton.next_power_of_2(experts)))
        chosen, total, tokens = (scores if t is None else t for t in (kept.chosen, kept.total, kept.tokens))
        _router_backward_kernel[(sequences * ceil_div(length, together),)](
            scores, kept.ids, chosen, total, kept.shares, kept.frequency, tokens, dweights.contiguous(), dbalance,
            _bytes(kept.real, scores), dlogits, length, experts, rule.route_scale, SOFTMAX=rule.score == "softmax",
            NORMALIZE=rule.normalize, MASKED=kept.real is not None, TOP_K=rule.top_k, TOKENS=together,
            EXPERTS=triton.next_power_of_2(experts), num_warps=4, **_EXACT,
        )  # fmt: skip
    return dlogits


def _sizes(experts: int, rule: Rule) -> dict[str, int]:
    """A program's tokens, and its lanes: a power of two for each group, and of groups."""
    groups = rule.groups if rule.kept_groups < rule.groups else 1
    size = experts // groups
    lanes = triton.next_power_of_2(groups) * triton.next_power_of_2(size)
    return {
        "TOKENS": max(1, min(32, 2048 // lanes)), "GROUPS": groups, "SIZE": size, "GROUP_LANES": triton.next_power_of_2(groups),
        "SIZE_LANES": triton.next_power_of_2(size), "TOP_K": rule.top_k, "CHOICES": triton.next_power_of_2(rule.top_k),
    }  # fmt: skip


def _bytes(real: Tensor | None, other: Tensor) -> Tensor:
    return other if real is None else real.contiguous().view(torch.uint8)


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise ValueError(reason)


@triton.jit
def _exp(x):
    if INTERPRETED:
        return tl.exp(x)
    return libdevice.exp(x)


@triton.jit
def _softmax_sums(logits, largest, t, there, experts, TOKENS: tl.constexpr, LANES: tl.constexpr):
    """Sums of exp of rows, as torch's kernel takes them.

    Of its warp of 32 threads each adds up every 32nd exp; then they exchange their sums, as they do here.
    """
    WIDTH: tl.constexpr = LANES if LANES < 32 else 32
    total = tl.zeros([TOKENS, WIDTH], tl.float32)
    for first in tl.static_range(0, LANES, WIDTH):
        e = first + tl.arange(0, WIDTH)
        x = tl.load(logits + (t[:, None] * experts + e[None, :]), there[:, None] & (e < experts)[None, :], -float("inf"))
        total += _exp(x - largest[:, None])
    return tl.sum(total, 1)


@triton.jit
def _score(x, largest, total, SOFTMAX: tl.constexpr):
    if SOFTMAX:
        over, under = _exp(x - largest[:, None]), tl.broadcast_to(total[:, None], x.shape)
    else:
        over, under = tl.full(x.shape, 1.0, tl.float32), 1.0 + _exp(-x)
    return tl.div_rn(over, under)


@triton.jit
def _order(x):
    """Integers in the order of fp32 numbers as torch sorts them: both zeros equal, NaN above all."""
    bits = tl.where(x == 0.0, 0, x.to(tl.int32, bitcast=True))
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), _NAN)


@triton.jit
def _number(key):
    """The number in this place of the order."""
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _ranked(key, index):
    """Place in the order and index in one number, whose largest is the first of the largest."""
    return (key.to(tl.int64) << 32) | (_LAST - index)


@triton.jit
def _take(ranked, index, AXIS: tl.constexpr):
    """(index of the best along an axis, the rest of them)."""
    best = _LAST - (tl.max(ranked, AXIS) & _LAST).to(tl.int32)
    return best, tl.where(index == tl.expand_dims(best, AXIS), _TAKEN, ranked)


@triton.jit
def _without_dropped_groups(
    key, TOKENS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, GROUP_LANES: tl.constexpr, SIZE_LANES: tl.constexpr,
    KEPT: tl.constexpr,
):  # fmt: skip
    """Keys [TOKENS, GROUP_LANES * SIZE_LANES] with -inf in all but the groups whose two best sum highest."""
    by_group = tl.reshape(key, [TOKENS, GROUP_LANES, SIZE_LANES])
    value = _number(tl.max(by_group, 2))
    if SIZE > 1:
        lane = tl.arange(0, SIZE_LANES)[None, None, :]
        _best, others = _take(_ranked(by_group, lane), lane, 2)
        value += _number((tl.max(others, 2) >> 32).to(tl.int32))
    group = tl.arange(0, GROUP_LANES)[None, :]
    ranked = _ranked(tl.where(group < GROUPS, _order(value), _ABSENT), group)
    kept = tl.zeros([TOKENS, GROUP_LANES], tl.int32)
    for _group in range(KEPT):
        best, ranked = _take(ranked, group, 1)
        kept = tl.where(group == best[:, None], 1, kept)
    masked = tl.where((by_group == _ABSENT) | (kept[:, :, None] != 0), by_group, _MINUS_INFINITY)
    return tl.reshape(masked, [TOKENS, GROUP_LANES * SIZE_LANES])


@triton.jit(do_not_specialize=["length", "experts"])
def _router_forward_kernel(
    logits, bias, real, scores, ids, weights, chosen, total, shares, parts, hits, length, experts, route_scale,
    SOFTMAX: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, GROUP_LANES: tl.constexpr, SIZE_LANES: tl.constexpr,
    KEPT: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr, NORMALIZE: tl.constexpr, MASKED: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens of one sequence: all that is theirs, and their part of the sequence's sums."""
    LANES: tl.constexpr = GROUP_LANES * SIZE_LANES
    lane = tl.arange(0, LANES)
    expert = lane if SIZE == SIZE_LANES else lane // SIZE_LANES * SIZE + lane % SIZE_LANES
    exists = (lane < GROUPS * SIZE_LANES) & (lane % SIZE_LANES < SIZE)
    blocks = tl.cdiv(length, TOKENS)
    in_sequence = tl.program_id(0) % blocks * TOKENS + tl.arange(0, TOKENS)
    there = in_sequence < length
    t = (tl.program_id(0) // blocks).to(tl.int64) * length + in_sequence
    at = t[:, None] * experts + expert[None, :]
    inside = there[:, None] & exists[None, :]

    x = tl.load(logits + at, mask=inside, other=-float("inf"))
    largest = tl.zeros([TOKENS], tl.float32)
    under = largest
    if SOFTMAX:
        largest = tl.max(x, 1)
        under = _softmax_sums(logits, largest, t, there, experts, TOKENS, LANES)
    y = _score(x, largest, under, SOFTMAX)
    tl.store(scores + at, y, mask=inside)

    key = _order(y + tl.load(bias + expert, mask=exists, other=0.0)[None, :])
    key = tl.where(exists[None, :], key, _ABSENT)
    if GROUPS > 1:
        key = _without_dropped_groups(key, TOKENS, GROUPS, SIZE, GROUP_LANES, SIZE_LANES, KEPT)
    ranked = _ranked(key, lane[None, :])
    choice = tl.arange(0, CHOICES)[None, :]
    taken = tl.zeros([TOKENS, CHOICES], tl.int32)
    for k in range(TOP_K):
        best, ranked = _take(ranked, lane[None, :], 1)
        taken = tl.where(choice == k, best[:, None], taken)
    if SIZE != SIZE_LANES:
        taken = taken // SIZE_LANES * SIZE + taken % SIZE_LANES
    into = t[:, None] * TOP_K + choice
    chosen_there = there[:, None] & (choice < TOP_K)
    tl.store(ids + into, taken.to(tl.int64), mask=chosen_there)
    picked = _score(tl.load(logits + (t[:, None] * experts + taken), chosen_there, 0.0), largest, under, SOFTMAX)
    weight = picked
    if NORMALIZE:
        divisor = tl.sum(tl.where(choice < TOP_K, picked, 0.0), 1) + _TINY
        tl.store(chosen + into, picked, mask=chosen_there)
        tl.store(total + t, divisor, mask=there)
        weight = tl.div_rn(picked, tl.broadcast_to(divisor[:, None], picked.shape))
    tl.store(weights + into, weight * route_scale, mask=chosen_there)

    divisor = tl.sum(tl.where(exists[None, :], y, 0.0), 1) + _TINY
    tl.store(shares + t, divisor, mask=there)
    counted = there
    if MASKED:
        counted = tl.load(real + t, mask=there, other=0) != 0
    share = tl.div_rn(y, tl.broadcast_to(divisor[:, None], y.shape))
    ranked = _ranked(tl.where(exists[None, :], _order(y), _ABSENT), lane[None, :])
    for _k in range(TOP_K):
        _best, ranked = _take(ranked, lane[None, :], 1)
    part = tl.program_id(0).to(tl.int64) * experts + expert
    tl.store(parts + part, tl.sum(tl.where(counted[:, None], share, 0.0), 0), mask=exists)
    tl.store(hits + part, tl.sum((counted[:, None] & (ranked == _TAKEN)).to(tl.int32), 0), mask=exists)


@triton.jit(do_not_specialize=["length", "blocks", "experts"])
def _balance_kernel(
    real, parts, hits, frequency, tokens, balance, length, blocks, experts,
    MASKED: tl.constexpr, TOP_K: tl.constexpr, PARTS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """What EXPERTS experts have of the balance loss of one sequence, from the sums of its blocks, in order."""
    groups = tl.cdiv(experts, EXPERTS)
    sequence = (tl.program_id(0) // groups).to(tl.int64)
    e = tl.program_id(0) % groups * EXPERTS + tl.arange(0, EXPERTS)
    share = tl.zeros([EXPERTS], tl.float32)
    count = tl.zeros([EXPERTS], tl.int32)
    for first in range(0, blocks, PARTS):
        block = first + tl.arange(0, PARTS)
        at = (sequence * blocks + block)[:, None] * experts + e[None, :]
        inside = (block < blocks)[:, None] & (e < experts)[None, :]
        share += tl.sum(tl.load(parts + at, mask=inside, other=0.0), 0)
        count += tl.sum(tl.load(hits + at, mask=inside, other=0), 0)
    seen = length
    if MASKED:
        seen = 0
        for first in range(0, length, 1024):
            i = first + tl.arange(0, 1024)
            seen += tl.sum(tl.load(real + sequence * length + i, mask=i < length, other=0).to(tl.int32), 0)
    divisor = tl.full([EXPERTS], 1.0, tl.float32) * tl.maximum(seen, 1).to(tl.float32)
    mean_count = tl.div_rn(count.to(tl.float32) * experts.to(tl.float32), tl.full([EXPERTS], TOP_K, tl.float32))
    often = tl.div_rn(mean_count, divisor)
    tl.store(frequency + sequence * experts + e, often, mask=e < experts)
    tl.store(tokens + sequence, tl.maximum(seen, 1).to(tl.float32))  # the same from all its programs
    tl.store(balance + tl.program_id(0), tl.sum(often * tl.div_rn(share, divisor), 0))


@triton.jit(do_not_specialize=["length", "experts"])
def _router_backward_kernel(
    scores, ids, chosen, total, shares, frequency, tokens, dweights, dbalance, real, dlogits, length, experts, route_scale,
    SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, MASKED: tl.constexpr, TOP_K: tl.constexpr, TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
):  # fmt: skip
    e = tl.arange(0, EXPERTS)
    blocks = tl.cdiv(length, TOKENS)
    sequence = (tl.program_id(0) // blocks).to(tl.int64)
    in_sequence = tl.program_id(0) % blocks * TOKENS + tl.arange(0, TOKENS)
    there = in_sequence < length
    t = sequence * length + in_sequence
    at = t[:, None] * experts + e[None, :]
    inside = there[:, None] & (e < experts)[None, :]
    y = tl.load(scores + at, mask=inside, other=0.0)

    seen = tl.maximum(length, 1).to(tl.float32)
    if MASKED:
        seen = tl.load(tokens + sequence)
    often = tl.load(frequency + sequence * experts + e, mask=e < experts, other=0.0)
    dmean = tl.div_rn(tl.load(dbalance) * often, tl.full([EXPERTS], 1.0, tl.float32) * seen)
    dshare = tl.broadcast_to(dmean[None, :], y.shape)
    if MASKED:
        dshare = tl.where((tl.load(real + t, mask=there, other=0) != 0)[:, None], dshare, 0.0)
    divisor = tl.broadcast_to(tl.load(shares + t, mask=there, other=1.0)[:, None], y.shape)
    ddivisor = tl.sum(-dshare * tl.div_rn(tl.div_rn(y, divisor), divisor), 1)
    dscores = tl.div_rn(dshare, divisor) + ddivisor[:, None]

    summed = tl.full([TOKENS], 1.0, tl.float32)
    dsummed = tl.zeros([TOKENS], tl.float32)
    if NORMALIZE:
        summed = tl.load(total + t, mask=there, other=1.0)
        for k in tl.static_range(TOP_K):
            picked = tl.load(chosen + t * TOP_K + k, mask=there, other=0.0)
            dweight = tl.load(dweights + t * TOP_K + k, mask=there, other=0.0) * route_scale
            dsummed += -dweight * tl.div_rn(tl.div_rn(picked, summed), summed)
    for k in tl.static_range(TOP_K):
        expert = tl.load(ids + t * TOP_K + k, mask=there, other=-1).to(tl.int32)
        dchosen = tl.load(dweights + t * TOP_K + k, mask=there, other=0.0) * route_scale
        if NORMALIZE:
            dchosen = tl.div_rn(dchosen, summed) + dsummed
        dscores += tl.where(e[None, :] == expert[:, None], dchosen[:, None], 0.0)
    if SOFTMAX:
        product = dscores * y
        dx = product - y * tl.sum(product, 1)[:, None]
    else:
        dx = dscores * (1.0 - y) * y
    tl.store(dlogits + at, dx, mask=inside)
