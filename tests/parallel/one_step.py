"""One optimizer step of a small model on a share of its sequences, as a rank takes it, and what it found."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from support import build, nano, recipe
from torch import Tensor
from torch.distributed.tensor import DTensor

from dsv3fp8.data import Batch
from dsv3fp8.model.transformer import Transformer
from dsv3fp8.parallel.experts import deal_out
from dsv3fp8.parallel.placement import place
from dsv3fp8.parallel.ranks import ALONE, Ranks
from dsv3fp8.parallel.shard import shard
from dsv3fp8.training.config import OptimizerConfig
from dsv3fp8.training.optimizer import AdamW
from dsv3fp8.training.step import train_step

SEQUENCES, LENGTH, VOCABULARY = 8, 20, 96


class Seen(AdamW):
    """Remembers the gradients that each step is given."""

    def step(self, *given: Any) -> None:
        self.gradients = {name: p.grad.clone() for name, p in self.parameters.items() if p.grad is not None}
        super().step(*given)


def made(recipe_name: str, *words: str, ranks: Ranks = ALONE, device: str = "cpu", **sizes: Any) -> tuple[Transformer, Seen]:
    """The model with this rank's experts and its parts of the weights, and its optimizer."""
    model = build(nano(**{"layers": 3, "experts": 8, "balance_loss": 1e-2, **sizes}), recipe(recipe_name, *words))
    model = model.to(torch.device(device, ranks.local) if device == "cuda" else device)
    deal_out(model, ranks)
    shard(model, ranks)
    config = OptimizerConfig(lr=1e-3, weight_decay=0.1)
    return model, Seen(model.parameter_groups(), config)


def sequences(seed: int = 0) -> Batch:
    """All sequences of a step. The documents leave another number of targets on every rank."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (SEQUENCES, LENGTH + 1), generator=generator)
    documents = torch.zeros(SEQUENCES, LENGTH + 1, dtype=torch.int32)
    for row in range(SEQUENCES):
        documents[row, LENGTH // (row % 3 + 2) :] = 1
        documents[row, LENGTH + 1 - row :] = -1
    return Batch(tokens, documents)


def share(batch: Batch, index: int, count: int, parts: int = 1) -> list[Batch]:
    """The micro-batches of one rank of so many: rank by rank within each, as TrainBatches deals them out."""
    rows = torch.arange(SEQUENCES).view(parts, count, -1)[:, index]
    assert batch.documents is not None
    return [Batch(batch.tokens[part], batch.documents[part]) for part in rows]


def whole(model: Transformer, tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Tensors by parameter name, put together from the parts of all ranks."""
    placed = place(model, tensors, ranks)
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in placed.items()}


def result_of(model: Transformer, optimizer: Seen, micro_batches: list[Batch], ranks: Ranks = ALONE) -> dict[str, Any]:
    """Takes the step; plain values and copies of tensors."""
    found = train_step(model, optimizer, micro_batches, lr=1e-3, clip_norm=0.5, ranks=ranks)
    return {
        "loss": found.loss, "mtp": list(found.mtp_losses), "balance": found.balance_loss, "norm": found.grad_norm,
        "applied": found.applied, "tokens": found.tokens, "load": found.expert_load.clone(),
        "gradients": {name: each.clone() for name, each in whole(model, optimizer.gradients, ranks).items()},
        "weights": {name: each.detach().clone() for name, each in whole(model, model.state_dict(), ranks).items()},
    }  # fmt: skip


def step_of_rank(ranks: Ranks, recipe_name: str, parts: int, *words: str) -> dict[str, Any]:
    """For `on_ranks`; gradients and weights with the experts of all ranks."""
    return result_of(*made(recipe_name, *words, ranks=ranks), share(sequences(), ranks.index, ranks.count, parts), ranks)


def step_alone(recipe_name: str, parts: int = 1, *words: str) -> dict[str, Any]:
    """The same step on one rank."""
    return result_of(*made(recipe_name, *words), share(sequences(), 0, 1, parts))


def whole_step(micro_batches: list[Batch], depth: int) -> Ranks:
    """A single rank whose counts are those of all: to take each rank's share on its own."""
    from dsv3fp8.training.step import count_step

    totals, tokens = count_step(micro_batches, depth)

    @dataclasses.dataclass(frozen=True)
    class Given(Ranks):
        def sum_counts(self, counts: Any) -> list[int]:
            return [totals.targets, *totals.mtp, totals.sequences, tokens]

    return Given()
