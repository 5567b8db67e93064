"""A study that takes a second: every experiment at sizes that say something, but little."""

import sys
from pathlib import Path

import pytest
import torch

from dsv3fp8.observe.drift.experiments import gradient_scales
from dsv3fp8.observe.drift.study import Size, Study
from dsv3fp8.observe.drift.sums import Sums

SIZE = Size(products=2**18, side=16, longest=1024, extreme=32, rows=128, columns=512, tokens=64)


def study(seed: int = 0, device: str = "cpu", run: Path | None = None) -> Study:
    """A study at SIZE."""
    chosen = torch.device(device)
    return Study(seed, SIZE, chosen, Sums.of(chosen), run)


def fewer_draws(patch: pytest.MonkeyPatch) -> None:
    """Of what is drawn many times whatever the size."""
    module = sys.modules[gradient_scales.__module__]
    patch.setattr(module, "DRAWS", 2)
    patch.setattr(module, "TOKENS", 512)
