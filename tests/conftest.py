"""What all tests share: the same random numbers in every run; GPU and browser tests only where there is one."""

import random
import shutil
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


BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `gpu` or `browser` are left out where there is none, or fewer than asked for; the summary counts them."""
    there = {"gpu": 0, "browser": sum(bool(shutil.which(name)) for name in BROWSERS)}
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        there["gpu"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
    left_out = [item for item in items if any(_asked_for(item, name) > count for name, count in there.items())]
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


def _asked_for(item: pytest.Item, name: str) -> int:
    """How many of them a test needs: `gpu` is one, `gpu(2)` two."""
    marker = item.get_closest_marker(name)
    return 0 if marker is None else max([1, *marker.args])


@pytest.fixture
def browser() -> str:
    """The Chromium to run headless."""
    return next(path for path in map(shutil.which, BROWSERS) if path)
