"""What ranks are forked with: torch and its compiler, which FSDP2 asks for, pytest, Hydra's plugins, and three recipes.

Nothing is computed here: a thread of torch's would not survive the fork.
"""

import pytest
import torch._dynamo
from support import recipe

import dsv3fp8.parallel.shard
import dsv3fp8.training.loop

__all__ = ["dsv3fp8", "pytest", "torch"]

for name in ("fp32", "bf16", "dsv3"):
    recipe(name)
