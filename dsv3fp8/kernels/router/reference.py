"""The router's arithmetic behind its logits, in torch: the definition of every router kernel, forward and backward.

FP32 throughout (FP64 of FP64). Ties go to the lowest index, on every device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rule:
    """How experts are chosen and weighed: ModelConfig's keys of these names."""

    score: str
    top_k: int
    groups: int
    kept_groups: int
    normalize: bool
    route_scale: float


class Kept(NamedTuple):
    """What backward reads of forward, T = B * S tokens.

    ids int64 [T, K]. scores [T, E], before the bias. chosen [T, K]: the scores of ids, and total [T, 1] their sum, None
    without normalization. shares [B, S, 1]: sums of all scores of a token. frequency [B, E]: f_i of the balance loss.
    tokens [B, 1]: how many are real, and real bool [T], None where all are.
    """

    ids: Tensor
    scores: Tensor
    chosen: Tensor | None
    total: Tensor | None
    shares: Tensor
    frequency: Tensor
    tokens: Tensor | None
    real: Tensor | None


def forward(logits: Tensor, bias: Tensor, rule: Rule, sequences: int, real: Tensor | None) -> tuple[Tensor, Tensor, Kept]:
    """(weights [T, K] of the experts Kept.ids, ascending by rank; the balance loss; what is kept) from fp32 logits [T, E].

    bias [E] selects, never weighs. real: bool [T], False for padding, which weighs nothing.
    Balance loss (report Eq. 17-20), summed over sequences, without its factor alpha. Per sequence: sum_i f_i P_i, with
    f_i = E / (K T) * tokens whose top K affinities (without bias) hold expert i, and P_i the mean normalized affinity.
    """
    scores = affinity(logits, rule.score)
    ids = select_experts(scores, bias, rule)
    weights, chosen, total = gate_weights(scores, ids, rule)
    balance, shares, frequency, tokens = balance_loss(scores, rule.top_k, sequences, real)
    return weights, balance, Kept(ids, scores, chosen, total, shares, frequency, tokens, real)


def backward(kept: Kept, dweights: Tensor, dbalance: Tensor, rule: Rule) -> Tensor:
    """Gradient of the logits [T, E] from those of the weights [T, K] and of the balance loss."""
    sequences, length, _ = kept.shares.shape
    per_sequence = kept.scores.unflatten(0, (sequences, -1))
    dmean = dbalance * kept.frequency / (max(length, 1) if kept.tokens is None else kept.tokens)
    dshare = dmean[:, None].expand_as(per_sequence)
    if kept.real is not None:
        dshare = dshare * _mask(kept.real, dshare)
    dscores = (dshare / kept.shares + _of_divisor(dshare, per_sequence, kept.shares)).flatten(0, 1)
    dchosen = dweights * rule.route_scale
    if kept.chosen is not None:
        assert kept.total is not None
        dchosen = dchosen / kept.total + _of_divisor(dchosen, kept.chosen, kept.total)
    dscores = dscores + torch.zeros_like(dscores).scatter_(-1, kept.ids, dchosen)
    if rule.score == "sigmoid":
        return torch.ops.aten.sigmoid_backward(dscores, kept.scores)
    return torch.ops.aten._softmax_backward_data(dscores, kept.scores, -1, dscores.dtype)


def affinity(logits: Tensor, score: str) -> Tensor:
    """Scores [T, E] from logits: sigmoid (V3) or softmax (V2)."""
    return torch.sigmoid(logits) if score == "sigmoid" else torch.softmax(logits, -1)


def top_indices(values: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest along the last dimension, largest first; equal values by lowest index."""
    # topk breaks ties differently on every device; a stable sort does not.
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[..., :count]


def select_experts(scores: Tensor, bias: Tensor, rule: Rule) -> Tensor:
    """Expert ids [T, K] by scores + bias, from the groups whose two best biased scores sum highest.

    Experts of dropped groups are masked with -inf: with 0, they would win wherever biased scores are negative.
    """
    biased = scores + bias
    if rule.kept_groups < rule.groups:
        by_group = biased.unflatten(-1, (rule.groups, -1))
        best = torch.sort(by_group, dim=-1, descending=True).values[..., : min(2, by_group.shape[-1])].sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, top_indices(best, rule.kept_groups), True)
        biased = by_group.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
    return top_indices(biased, rule.top_k).contiguous()  # a view would keep the order of all experts for backward


def gate_weights(scores: Tensor, ids: Tensor, rule: Rule) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(weights [T, K] from the unbiased scores, `Kept.chosen`, `Kept.total`).

    Normalized to sum to one if asked, then always scaled.
    """
    chosen = scores.gather(-1, ids)
    if not rule.normalize:
        return chosen * rule.route_scale, None, None
    total = chosen.sum(-1, keepdim=True) + 1e-20
    return chosen / total * rule.route_scale, chosen, total


def balance_loss(
    scores: Tensor, top_k: int, sequences: int, real: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(the loss, `Kept.shares`, `Kept.frequency`, `Kept.tokens`); see `forward`."""
    per_sequence = scores.unflatten(0, (sequences, -1))
    shares = per_sequence.sum(-1, keepdim=True) + 1e-20
    share = per_sequence / shares
    hits = torch.zeros_like(share).scatter_(-1, top_indices(per_sequence, top_k), 1.0)
    counted = None
    if real is not None:
        mask = _mask(real, share)
        share, hits = share * mask, hits * mask
        counted = mask.sum(1).clamp(min=1)
    tokens = max(share.shape[1], 1) if counted is None else counted
    frequency = hits.sum(1) * scores.shape[-1] / top_k / tokens
    return (frequency * (share.sum(1) / tokens)).sum(), shares, frequency, counted


def _mask(real: Tensor, like: Tensor) -> Tensor:
    return real.view(like.shape[0], -1, 1).to(like.dtype)


def _of_divisor(grad: Tensor, dividend: Tensor, divisor: Tensor) -> Tensor:
    """Gradient of the divisor [..., 1] of dividend / divisor."""
    return (-grad * (dividend / divisor / divisor)).sum(-1, keepdim=True)
