"""The published rule for FP8 weights, in numpy and from the words of README_WEIGHTS.md: nothing of the package."""

from collections.abc import Mapping

import ml_dtypes
import numpy as np
import torch
from torch import Tensor


def dequantized(codes: Tensor, scale: Tensor) -> Tensor:
    """Pad to blocks of 128x128, multiply each by its weight_scale_inv, cut off what was padded."""
    rows, cols = codes.shape
    values = codes.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    padded = np.zeros((-(-rows // 128) * 128, -(-cols // 128) * 128), np.float32)
    padded[:rows, :cols] = values
    for i, j in np.ndindex(*scale.shape):
        padded[i * 128 : i * 128 + 128, j * 128 : j * 128 + 128] *= scale[i, j].item()
    return torch.from_numpy(padded[:rows, :cols].copy())


def without_codes(files: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors of a checkpoint in FP32."""
    return {
        name: dequantized(tensor, files[f"{name}_scale_inv"]) if f"{name}_scale_inv" in files else tensor.float()
        for name, tensor in files.items()
        if not name.endswith("_scale_inv")
    }
