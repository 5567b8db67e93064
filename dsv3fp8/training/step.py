"""One optimizer step, and one validation: where tokens meet the model.

The loss of a step is the mean over all valid targets of all its micro-batches, so that cutting the same sequences into
other micro-batches changes nothing; likewise for every multi-token-prediction depth and for the balance loss.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsv3fp8.model.targets import Totals, count_targets
from dsv3fp8.parallel.ranks import ALONE, Ranks
from dsv3fp8.parallel.reduction import GradientSums, add_up_figures, joint_norm, split_gradients
from dsv3fp8.parallel.shard import before_backward
from dsv3fp8.training.gradients import LARGEST_NORM, clip_factor, gradient_norm
from dsv3fp8.training.optimizer import AdamW

if TYPE_CHECKING:
    from dsv3fp8.data.batches import Batch
    from dsv3fp8.model.transformer import Transformer


Window = tuple[Tensor, Tensor | None]
"""Tokens of a micro-batch and its documents, where the model lies."""


class StepResult:
    """What one optimizer step found. Its numbers are read from the device, all at once, when one is first asked for."""

    def __init__(self, figures: Tensor, totals: Totals, tokens: int, expert_load: Tensor) -> None:
        """figures: FP64 [sums of the loss, of each depth's and of the balance loss, gradient norm, applied].

        totals: what the sums range over. tokens: input tokens, targets or not. expert_load: as Transformer.expert_load.
        """
        self._totals, self.tokens, self.expert_load = totals, tokens, expert_load
        self._copied = figures
        self._event: torch.cuda.Event | None = None
        if figures.is_cuda:  # on its way from now on, and waited for without what is launched after it
            self._copied = torch.empty(figures.shape, dtype=figures.dtype, pin_memory=True)
            self._copied.copy_(figures, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @cached_property
    def _figures(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
        return self._copied.tolist()

    @cached_property
    def _means(self) -> list[float]:
        counts = (self._totals.targets, *self._totals.mtp, self._totals.sequences)
        return [total / max(count, 1) for total, count in zip(self._figures[:-2], counts, strict=True)]

    @property
    def loss(self) -> float:
        """Mean over the next-token targets, nats."""
        return self._means[0]

    @property
    def mtp_losses(self) -> tuple[float, ...]:
        """Likewise of each multi-token-prediction depth."""
        return tuple(self._means[1:-1])

    @property
    def balance_loss(self) -> float:
        """Mean over the sequences, without its factor."""
        return self._means[-1]

    @property
    def grad_norm(self) -> float:
        """Before clipping."""
        return self._figures[-2]

    @property
    def applied(self) -> bool:
        """Whether the weights moved: not where loss or gradient was not finite."""
        return bool(self._figures[-1])


def train_step(
    model: "Transformer",
    optimizer: AdamW,
    micro_batches: Sequence["Batch"],
    lr: float,
    clip_norm: float,
    ranks: Ranks = ALONE,
) -> StepResult:
    """Forward, backward and update over `micro_batches`, which are this rank's share of the step: all ranks move alike.

    A step whose loss or gradient norm is not finite moves no weight, moment, bias or amax history: `applied` is False.
    That is decided on the device: nothing is read back from it, and nothing waits for it, until the result is looked at.
    """
    device = next(iter(optimizer.parameters.values())).device
    totals, tokens = count_step(micro_batches, model.config.mtp_depth, ranks)
    windows = [moved(batch, device) for batch in micro_batches]
    figures, load = take_step(model, optimizer, windows, totals, lr, clip_norm, ranks)
    return StepResult(figures, totals, tokens, load)


def count_step(micro_batches: Sequence["Batch"], depth: int, ranks: Ranks = ALONE) -> tuple[Totals, int]:
    """(what the sums of a step range over, its input tokens) on all ranks, counted where the batches lie."""
    own = sum_totals(count_targets(batch.tokens, batch.documents, depth) for batch in micro_batches)
    own_tokens = sum(batch.tokens.shape[0] * (batch.tokens.shape[1] - 1) for batch in micro_batches)
    targets, *mtp, sequences, tokens = ranks.sum_counts([own.targets, *own.mtp, own.sequences, own_tokens])
    return Totals(targets, tuple(mtp), sequences), tokens


def take_step(
    model: "Transformer",
    optimizer: AdamW,
    windows: Sequence[Window],
    totals: Totals,
    lr: float | Tensor,
    clip_norm: float,
    ranks: Ranks = ALONE,
) -> tuple[Tensor, Tensor]:
    """The step itself, on the device alone: (figures, expert load) as StepResult takes them.

    windows: of this rank. totals: of all ranks.
    """
    sums: Tensor | None = None
    parameters = list(optimizer.parameters.values())
    with GradientSums(model, parameters, ranks) as gradient_sums:
        for number, window in enumerate(windows, start=1):
            losses, last = model(*window), number == len(windows)
            before_backward(model, last)
            with gradient_sums.backward(last):
                model.objective(losses, totals).backward()
            parts = torch.stack([part.detach().double() for part in (losses.loss, *losses.mtp, losses.balance)])
            sums = parts if sums is None else sums + parts
            del losses
        gradient_sums.finish()
    assert sums is not None

    add_up_figures(model, sums, ranks)
    shared, experts = split_gradients(model, parameters, ranks)
    norm = joint_norm(gradient_norm(shared, sums.device), gradient_norm(experts, sums.device), ranks)
    applied = _is_sound(sums, norm, clip_norm)
    optimizer.step(lr, applied, clip_factor(norm, clip_norm))
    optimizer.zero_grad()
    load = model.expert_load()
    model.end_step(applied)
    return torch.cat((sums, torch.stack((norm, applied.double())))), load


def _is_sound(sums: Tensor, norm: Tensor, clip_norm: float) -> Tensor:
    """Whether the step may move anything, a bool scalar on the device."""
    # Beyond the largest norm the moments would overflow although the gradients do not.
    clipped = norm.clamp(max=clip_norm) if clip_norm else norm
    return torch.isfinite(sums).all() & torch.isfinite(norm) & (clipped < LARGEST_NORM)


@torch.no_grad()
def validate(model: "Transformer", batches: Iterable["Batch"], device: torch.device, ranks: Ranks = ALONE) -> float:
    """Mean next-token loss in nats over all valid targets of all ranks' `batches`.

    Leaves counts, biases and histories alone.
    """
    model.eval()
    try:
        total = torch.zeros((), dtype=torch.float64, device=device)
        targets = 0
        for batch in batches:
            targets += count_targets(batch.tokens, batch.documents, 0).targets
            total += model(*moved(batch, device), ahead=False).loss
    finally:
        model.train()  # which drops weight codes made here: their amax was not looked at
    ranks.add_up([total])
    (targets,) = ranks.sum_counts([targets])
    assert targets, "nothing to validate on"
    return float(total) / targets


def sum_totals(parts: Iterable[Totals]) -> Totals:
    """Targets of all micro-batches of a step."""
    first, *rest = parts
    return sum(rest, start=first)


def moved(batch: "Batch", device: torch.device) -> Window:
    """The batch where the model lies. To a GPU by way of pinned memory: any other copy would wait for what runs there."""

    def sent(tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

    return sent(batch.tokens), None if batch.documents is None else sent(batch.documents)
