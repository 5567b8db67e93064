"""What a run directory holds of its newest checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from torch import Tensor

from dsv3fp8.config import RunConfig
from dsv3fp8.training.checkpoint import Checkpoint, open_checkpoint
from dsv3fp8.training.run_directory import RunDirectory
from dsv3fp8.training.state import TrainingState, load_state, weight_names

# Tensors kept in memory: the two stacks of a layer's experts, of which the published ones are parts, and two more.
KEPT = 4


class ModelTensors(Mapping[str, Tensor]):
    """A checkpoint's parameters and buffers by their names in the model, whole, on the CPU, read when they are asked for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._names = weight_names(checkpoint)
        self._read = lru_cache(maxsize=KEPT)(checkpoint.read)

    def __getitem__(self, name: str) -> Tensor:
        return self._read(self._names[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass
class Saved:
    """A checkpoint and what it was trained under."""

    directory: RunDirectory
    config: RunConfig
    state: TrainingState
    tensors: Mapping[str, Tensor]


def read_saved(run: str, step: int | None = None) -> Saved:
    """The checkpoint of a step, or the newest. Raises UserError, naming run= or step=, where there is none."""
    checkpoint = open_checkpoint(run, step)
    state, config = load_state(checkpoint)
    return Saved(RunDirectory(Path(run)), RunConfig.from_dict(config), state, ModelTensors(checkpoint))
