"""What a run directory holds of its newest checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from dsv3fp8.config import RunConfig
from dsv3fp8.training.checkpoint import open_checkpoint
from dsv3fp8.training.run_directory import RunDirectory
from dsv3fp8.training.state import TrainingState, load_state, weight_names


@dataclass
class Saved:
    """A checkpoint: the model's tensors by name, all experts in them, on the CPU, and what they were trained under."""

    directory: RunDirectory
    config: RunConfig
    state: TrainingState
    tensors: dict[str, Tensor]


def read_saved(run: str, step: int | None = None) -> Saved:
    """The checkpoint of a step, or the newest. Raises UserError, naming run= or step=, where there is none."""
    checkpoint = open_checkpoint(run, step)
    state, config = load_state(checkpoint)
    tensors = {name: checkpoint.read(full) for name, full in weight_names(checkpoint).items()}
    return Saved(RunDirectory(Path(run)), RunConfig.from_dict(config), state, tensors)
