"""Checkpoints of a few tensors, as several test files write them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dsv3fp8.parallel.ranks import ALONE, Ranks
from dsv3fp8.training.checkpoint_directory import places
from dsv3fp8.training.checkpoint_saver import Saver


def save_tensors(
    directory: Path, step: int, tensors: Mapping[str, Tensor], keep: int = 1, ranks: Ranks = ALONE, **state: Any
) -> Path:
    """Writes one checkpoint and waits for it; its directory."""
    saver = Saver(directory, keep, tensors, ranks)
    saver.save(step, tensors, {"step": step, **state}, {})
    saver.wait()
    return places(directory, step)[1]
