"""One optimizer step, and one validation: where tokens meet the model.

The loss of a step is the mean over all valid targets of all its micro-batches, so that cutting the same sequences into
other micro-batches changes nothing; likewise for every multi-token-prediction depth and for the balance loss.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsv3fp8.model.targets import Totals, count_targets
from dsv3fp8.training.gradients import LARGEST_NORM, clip, exact_norm, fast_norm, gradients
from dsv3fp8.training.optimizer import AdamW

if TYPE_CHECKING:
    from dsv3fp8.data.batches import Batch
    from dsv3fp8.model.transformer import Transformer


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step found, as plain numbers; means in nats per token."""

    loss: float
    mtp_losses: tuple[float, ...]
    balance_loss: float
    # Before clipping.
    grad_norm: float
    # Whether the weights moved: not where loss or gradient was not finite.
    applied: bool
    # Input tokens, targets or not.
    tokens: int


def train_step(
    model: "Transformer",
    optimizer: AdamW,
    micro_batches: Sequence["Batch"],
    lr: float,
    clip_norm: float,
    inspect: Callable[[], None] = lambda: None,
) -> StepResult:
    """Forward, backward and update over `micro_batches`.

    A step whose loss or gradient norm is not finite moves no weight, moment, bias or amax history: `applied` is False.
    `inspect` is called while the step's expert counts are still there. Reads numbers back from the device once.
    """
    device = next(iter(optimizer.parameters.values())).device
    depth = model.config.mtp_depth
    totals = sum_totals(count_targets(batch.tokens, batch.documents, depth) for batch in micro_batches)
    sums: Tensor | None = None
    for batch in micro_batches:
        losses = model(*_moved(batch, device))
        model.objective(losses, totals).backward()
        parts = torch.stack([part.detach().double() for part in (losses.loss, *losses.mtp, losses.balance)])
        sums = parts if sums is None else sums + parts
        del losses
    assert sums is not None

    found = gradients(optimizer.parameters.values())
    *summed, fast = torch.cat([sums, fast_norm(found).to(device).reshape(1)]).tolist()
    loss, *mtp, balance = (
        total / max(count, 1) for total, count in zip(summed, (totals.targets, *totals.mtp, totals.sequences), strict=True)
    )
    norm = exact_norm(found, fast)
    # Beyond the largest norm the moments would overflow although the gradients do not.
    sound = all(map(math.isfinite, (loss, *mtp, balance, norm))) and min(norm, clip_norm or norm) < LARGEST_NORM
    if sound:
        clip(found, norm, clip_norm)
        optimizer.step(lr)
    optimizer.zero_grad()
    inspect()
    model.end_step(sound)
    tokens = sum(batch.tokens.shape[0] * (batch.tokens.shape[1] - 1) for batch in micro_batches)
    return StepResult(loss, tuple(mtp), balance, norm, sound, tokens)


@torch.no_grad()
def validate(model: "Transformer", batches: Iterable["Batch"], device: torch.device) -> float:
    """Mean next-token loss in nats over all valid targets of `batches`; leaves counts, biases and histories alone."""
    model.eval()
    try:
        total = torch.zeros((), dtype=torch.float64, device=device)
        targets = 0
        for batch in batches:
            targets += count_targets(batch.tokens, batch.documents, 0).targets
            total += model(*_moved(batch, device), ahead=False).loss
    finally:
        model.train()  # which drops weight codes made here: their amax was not looked at
    assert targets, "nothing to validate on"
    return float(total) / targets


def sum_totals(parts: Iterable[Totals]) -> Totals:
    """Targets of all micro-batches of a step."""
    first, *rest = parts
    return sum(rest, start=first)


def _moved(batch: "Batch", device: torch.device) -> tuple[Tensor, Tensor | None]:
    documents = batch.documents
    return (
        batch.tokens.to(device, non_blocking=True),
        None if documents is None else documents.to(device, non_blocking=True),
    )
