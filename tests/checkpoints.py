"""Checkpoints of a few tensors, as several test files write them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dsv3fp8.parallel.ranks import ALONE, Ranks
from dsv3fp8.training.checkpoint_directory import places
from dsv3fp8.training.checkpoint_saver import Saver
from dsv3fp8.training.optimizer import AdamW
from dsv3fp8.training.state import TrainingState, begin_checkpoint, run_tensors


def save_tensors(
    directory: Path, step: int, tensors: Mapping[str, Tensor], keep: int = 1, ranks: Ranks = ALONE, **state: Any
) -> Path:
    """Writes one checkpoint and waits for it; its directory."""
    saver = Saver(directory, keep, tensors, ranks)
    saver.save(step, tensors, {"step": step, **state}, {})
    saver.wait()
    return places(directory, step)[1]


def save_checkpoint(
    directory: Path, state: TrainingState, model: nn.Module, optimizer: AdamW, config: Mapping[str, Any], ranks: Ranks = ALONE
) -> Path:
    """The same of a run's state."""
    saver = Saver(directory, 1, run_tensors(model, optimizer, ranks), ranks)
    begin_checkpoint(saver, state, model, optimizer, config, ranks)
    saver.wait()
    return places(directory, state.step)[1]
