"""What all tests share: the same random numbers in every run, and no GPU tests where there is no GPU."""

import random
import sys

import numpy as np
import pytest
from hypothesis import settings

from dsv3fp8.cli import share_cores

share_cores()  # before a test module loads torch

# The same examples in every run: a new failure has a new cause in the code. Slow machines are no failures.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Every test starts from the same generators, whichever tests ran before it."""
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are left out where there is no CUDA device; the summary counts them as deselected."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        items[:] = [item for item in items if item not in on_gpu]
        config.hook.pytest_deselected(items=on_gpu)
