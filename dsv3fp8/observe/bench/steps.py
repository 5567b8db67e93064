"""Whole training steps of a model under several recipes, on made-up ids."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from dsv3fp8.config import RunConfig, load_config
from dsv3fp8.data import Batch, Corpus, TrainBatches, open_corpus
from dsv3fp8.model.transformer import Transformer
from dsv3fp8.observe.bench.breakdown import breakdown
from dsv3fp8.observe.bench.operands import Setting
from dsv3fp8.observe.bench.rates import Case, Table, Way
from dsv3fp8.observe.bench.sizes import StepSize
from dsv3fp8.observe.bench.timing import one_line
from dsv3fp8.parallel.placement import local_part
from dsv3fp8.parallel.ranks import ALONE, Ranks
from dsv3fp8.training.graph import WARM_UP, StepGraph, reasons_to_launch
from dsv3fp8.training.setup import build
from dsv3fp8.training.step import StepResult, train_step

LR = 1e-4
PARTS = ("rates", "breakdown")


class Trainer:
    """A model in training under one recipe: data, forward, backward, clipping and update, as the training loop does them."""

    def __init__(self, config: RunConfig, corpus: Corpus, device: torch.device, ranks: Ranks = ALONE, lr: float = LR) -> None:
        self.config, self.ranks, self.lr = config, ranks, lr
        self.model, self.optimizer = build(config, device, ranks, drawn_there)
        self.model.train()
        training = config.training
        # What cannot be recorded is launched, and nothing else.
        self.against_graph = "; ".join(reasons_to_launch(config, device))
        self.graph = None if self.against_graph else StepGraph(self.model, self.optimizer, training.clip, ranks)
        self.batches = TrainBatches(
            corpus.train, training.batch, training.context, training.seed, config.data.workers, ranks.index, ranks.count
        )

    def step(self) -> StepResult:
        """Replayed where it can be."""
        return self.launched_step() if self.graph is None else self.graph.step(self._micro_batches(), self.lr)

    def launched_step(self) -> StepResult:
        """Kernel by kernel."""
        clip = self.config.training.clip
        return train_step(self.model, self.optimizer, self._micro_batches(), self.lr, clip, self.ranks)

    def _micro_batches(self) -> list[Batch]:
        return [next(self.batches) for _ in range(self.config.training.accumulate)]


@torch.no_grad()
def drawn_there(model: Transformer) -> None:
    """Initial weights drawn on the device: drawing a billion of them on a host takes longer than all steps."""
    for parameter in map(local_part, model.parameters()):  # of a rank, what it holds
        _ = parameter.fill_(1.0) if parameter.dim() == 1 else parameter.normal_(std=model.config.init_std)
    for buffer in model.buffers():
        buffer.zero_()
    model.invalidate_codes()


def step_config(size: StepSize, recipe: str) -> RunConfig:
    """The settings of a run of this size on synthetic ids."""
    return load_config(
        [
            f"model={size.model}", f"recipe={recipe}", f"optimizer={size.optimizer}", "data=synthetic",
            f"data.vocab_size={size.vocabulary}", f"model.vocab_size={size.vocabulary}", f"training.batch={size.batch}",
            f"training.context={size.context}", f"training.accumulate={size.accumulate}",
            f"data.tokens={20 * size.tokens + 20_000}",
        ]
    )  # fmt: skip


@contextmanager
def trainers(setting: Setting, size: StepSize, recipes: list[str], notes: list[str]) -> Iterator[dict[str, Trainer]]:
    """A trainer for each recipe, all in memory at once, so that their steps take turns.

    One that cannot be built costs no other: why goes to `notes`.
    """
    with ExitStack() as stack:
        configs = {recipe: step_config(size, recipe) for recipe in recipes}
        corpus = open_corpus(configs[recipes[0]].data)
        made: dict[str, Trainer] = {}
        for recipe, config in configs.items():
            try:
                trainer = Trainer(config, corpus, setting.device)
            except Exception as error:
                notes.append(f"{recipe} is left out: {one_line(error)}")
                continue
            stack.enter_context(trainer.batches)
            made[recipe] = trainer
        yield made


def step_table(size: StepSize, made: dict[str, Trainer]) -> Table:
    """Tokens a second; the last recipe is the peer."""
    ways = [
        Way(
            name, partial(_calls, trainer), graph=False, replays=trainer.graph is not None,
            note="replayed from a CUDA graph" if trainer.graph is not None else f"launched: {trainer.against_graph}",
        )
        for name, trainer in made.items()
    ]  # fmt: skip
    about = (
        f"{size.accumulate} × {size.batch} sequences of {size.context} tokens a step, synthetic ids, vocabulary "
        f"{size.vocabulary:,}; weight casts, gradient clipping and the AdamW update are counted"
    )
    cases = [Case(f"{size.model}, {size.tokens:,} tokens a step", float(size.tokens), lambda: ways)]
    return Table("step", f"Training steps of {size.model}", "tokens/s", list(made)[-1], about, cases)


def _calls(trainer: Trainer) -> list[Any]:
    for _ in range(WARM_UP if trainer.graph is not None else 0):
        trainer.step()
    return [trainer.step]


def step_breakdown(setting: Setting, trainer: Trainer, ms: float | None) -> dict[str, Any]:
    """Kernels of one step, and the GB that it allocates at most above what lies there between steps."""
    cuda = setting.device.type == "cuda"
    resting = torch.cuda.memory_allocated(setting.device) if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats(setting.device)
    found = breakdown(trainer.step, setting.device, ms)
    peak = (torch.cuda.max_memory_allocated(setting.device) - resting) / 1e9 if cuda else None
    return {**found, "peak_gb": peak}
