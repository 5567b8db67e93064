"""What a run directory holds of its newest checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from dsv3fp8.config import RunConfig
from dsv3fp8.errors import UserError
from dsv3fp8.training.checkpoint import list_checkpoints, load_file
from dsv3fp8.training.run_directory import RunDirectory
from dsv3fp8.training.state import TrainingState, load_state


@dataclass
class Saved:
    """A checkpoint: the model's tensors by name, all experts in them, on the CPU, and what they were trained under."""

    directory: RunDirectory
    config: RunConfig
    state: TrainingState
    tensors: dict[str, Tensor]


def read_saved(run: str, step: int | None = None) -> Saved:
    """The checkpoint of a step, or the newest. Raises UserError, naming run= or step=, where there is none."""
    directory = RunDirectory(Path(run))
    checkpoints = dict(list_checkpoints(directory.checkpoints))
    if not checkpoints:
        raise UserError(f"run={run} has no checkpoint: give the run directory of `dsv3fp8 train`")
    chosen = max(checkpoints) if step is None else step
    if chosen not in checkpoints:
        raise UserError(f"step={step}: run={run} has checkpoints of steps {', '.join(map(str, checkpoints))}")
    state, config, _ = load_state(checkpoints[chosen])
    return Saved(directory, RunConfig.from_dict(config), state, load_file(checkpoints[chosen], "model"))
