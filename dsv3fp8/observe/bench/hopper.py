"""What `bench` measures is there on Hopper alone."""

import sys

import torch

from dsv3fp8.kernels.backend import hopper_reason
from dsv3fp8.last_words import error_line


def lacks_hopper(device: torch.device, needs: str) -> bool:
    """Whether the device has no Hopper tensor cores. Then one line says so, beginning with what `needs` them."""
    against = hopper_reason(device)
    if against is None:
        return False
    said = f"{needs} (H100, H200) and torch for CUDA 12.9 or later: {against}; device=cpu sizes=tiny tries the command out"
    print(error_line(said), end="", file=sys.stderr)
    return True
