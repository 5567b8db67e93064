"""The keys of `dsv3fp8 bench scale`, beside those of a run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import torch

from dsv3fp8.config import GROUPS, load_config
from dsv3fp8.errors import UserError
from dsv3fp8.observe.bench.scale.exchange import FULL, TINY, ExchangeSize
from dsv3fp8.observe.bench.scale.layouts import KINDS, Row
from dsv3fp8.schema import build_words, split_words
from dsv3fp8.training.checks import device_problems, select_device
from dsv3fp8.training.config import raise_problems

MODES = ("launched", "graph")
SETTINGS = {
    "full": [
        "model=medium", "model.vocab_size=32000", "optimizer=adamw_bf16", "training.batch=8", "training.context=2048",
    ],
    "tiny": [
        "model=nano", "model.vocab_size=512", "model.experts=8", "model.mtp_depth=0", "optimizer=adamw_bf16",
        "training.batch=1", "training.context=32",
    ],
}  # fmt: skip
"""Keys of a run as they are unless given, by `sizes`."""
EXCHANGES = {"full": FULL, "tiny": TINY}


@dataclass
class ScaleConfig:
    """What is measured, and for how long."""

    # Directory to write scale.json and scale.md to.
    out: str = "runs/bench"
    # GPUs to use at most, processes on a CPU; null: all there are, 2 on a CPU.
    gpus: int | None = None
    # With commas; each is compared with one GPU under the same one.
    recipes: str = "dsv3,bf16"
    # Layouts, with commas: data, expert, sharded, exchange. Empty: all of them.
    only: str = ""
    # How steps are taken, with commas: kernel by kernel, replayed from a CUDA graph.
    modes: str = "launched,graph"
    # Samples of each layout and mode, of three steps; the median counts.
    rounds: int = 3
    # Seconds that a layout may take, compiling its kernels included.
    limit: float = 120.0
    # Seconds after which all is over; what has not begun by then is left out.
    budget: float = 480.0
    # tiny tries the path, on a CPU too: its figures mean nothing.
    sizes: Literal["full", "tiny"] = "full"
    # auto, cpu or cuda.
    device: str = "auto"
    # The source's, for the page, where the source lies without its history.
    commit: str = ""

    def validate(self) -> None:
        """Raise UserError with every value that makes no sense."""
        problems = device_problems("device", self.device)
        if self.device == "cpu" and self.sizes != "tiny":
            problems.append("device=cpu measures nothing of use at full size: add sizes=tiny to try the command out")
        for name in ("rounds", "limit", "budget"):
            problems += [f"{name}={getattr(self, name)} must be above 0"] if getattr(self, name) <= 0 else []
        for name, known in (("only", KINDS), ("modes", MODES)):
            unknown = [word for word in _words(getattr(self, name)) if word not in known]
            problems += [f"{name}={word}: there are {', '.join(known)}" for word in unknown]
        for name in ("recipes", "modes"):
            words = _words(getattr(self, name))
            if not words:
                problems.append(f"{name} is empty; give names with commas")
            if len(set(words)) < len(words):
                problems.append(f"{name}={getattr(self, name)} names one twice")
        if not problems and self.gpus is not None:
            problems += self._too_many(self.gpus)
        raise_problems(problems)

    @property
    def kinds(self) -> list[str]:
        return [kind for kind in KINDS if kind in _words(self.only)] or list(KINDS)

    @property
    def recipe_names(self) -> list[str]:
        return _words(self.recipes)

    @property
    def mode_names(self) -> list[str]:
        return [mode for mode in MODES if mode in _words(self.modes)]

    @property
    def count(self) -> int:
        """GPUs, or processes."""
        if self.gpus is not None:
            return self.gpus
        return torch.cuda.device_count() if select_device(self.device).type == "cuda" else 2

    @property
    def exchanges(self) -> tuple[ExchangeSize, ...]:
        return EXCHANGES[self.sizes]

    def _too_many(self, gpus: int) -> list[str]:
        if gpus < 1:
            return [f"gpus={gpus} must be at least 1"]
        there = torch.cuda.device_count()
        if select_device(self.device).type == "cuda" and gpus > there:
            return [f"gpus={gpus}, but this machine has {there}: lower it, or leave it out"]
        return []


def parse(arguments: list[str]) -> tuple[ScaleConfig, list[str]]:
    """The command's own keys, and the words for the settings of a run. Raises UserError for what cannot be."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("bench scale starts its own processes: start it without torchrun")
    values, rest = split_words(ScaleConfig, arguments, "gpus=2 model=medium", GROUPS)
    instead = {"recipe": "recipes=", "parallel": "only=", "experiment": "model= and keys of training"}
    for word in rest:
        key = word.partition("=")[0]
        group = "parallel" if key.startswith("parallel.") else key
        if group in instead:
            raise UserError(f"{word}: bench scale takes {instead[group]} instead")
    return build_words(ScaleConfig, values), rest


def words_of(config: ScaleConfig, given: list[str], row: Row) -> list[str]:
    """What a run of a row would be told. Raises UserError for settings that cannot be."""
    device = select_device(config.device).type
    recipe = row.recipe or config.recipe_names[0]
    fixed = [f"recipe={recipe}", *row.layout.words, f"training.device={device}", "data=synthetic"]
    words = [*SETTINGS[config.sizes], *given, *fixed]
    settings = load_config(words)
    training, vocabulary = settings.training, settings.model.vocab_size
    tokens = 4 * training.batch * training.accumulate * (training.context + 1) * row.layout.gpus + 20_000
    return [*words, f"data.vocab_size={vocabulary}", f"data.tokens={tokens}"]


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]
