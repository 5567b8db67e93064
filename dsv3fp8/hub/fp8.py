"""DeepSeek's FP8 weights: E4M3 codes with one scale for each 128x128, `weight` and `weight_scale_inv`.

The published rule: a weight is padded with zeros to multiples of 128, each block is scaled, and what was padded is cut off
again. So the scales are a grid of ceil(rows / 128) x ceil(columns / 128), and value = code * weight_scale_inv: in spite of its
name it is the factor that dequantizes, which is what `scale` means here. Codes of training are the same where its recipe
quantizes weights in 128x128 tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv3fp8.kernels.quantize.reference import quantize
from dsv3fp8.precision.formats import E4M3
from dsv3fp8.precision.recipe import Recipe
from dsv3fp8.precision.tiles import BLOCK_128, QuantizedTensor, ceil_div

SUFFIX = "_scale_inv"


def grid_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of a weight."""
    return tuple(ceil_div(size, 128) for size in shape)


def encode(weight: Tensor, scale_kind: str) -> tuple[Tensor, Tensor]:
    """(codes float8_e4m3fn, scales fp32) of a weight fp32 [N, K]."""
    quantized = quantize(weight, E4M3, BLOCK_128, scale_kind)
    return quantized.codes, quantized.scale


def decode(codes: Tensor, scale: Tensor) -> Tensor:
    """fp32(code * scale), [N, K]. scale: float of any width, as `grid_of` has it."""
    return QuantizedTensor(codes, scale.float(), E4M3, BLOCK_128, tuple(codes.shape)).decode()


def scale_problem(scale: Tensor, scale_kind: str) -> str | None:
    """What is wrong with these scales, or None."""
    values = scale.float()
    if not bool((torch.isfinite(values) & (values > 0)).all()):
        return "holds a scale that is not finite and above 0"
    if scale_kind == "pow2" and not bool((torch.frexp(values).mantissa == 0.5).all()):
        return "holds scales that are no powers of two, though quantization_config.scale_fmt=ue8m0"
    return None


def of_training(recipe: Recipe, ops: set[str]) -> bool:
    """Whether the weights of all these linears are E4M3 in 128x128 tiles of their own amax while they are trained."""
    specs = [recipe.linear(op).weight for op in ops]
    return all(spec.format == "e4m3" and spec.tile == "128x128" and spec.scaling == "current" for spec in specs)


def scale_kind_of(recipe: Recipe, op: str) -> str:
    """The kind of scale that the codes of a linear are exported with: the recipe's, FP32 where it has none."""
    spec = recipe.linear(op).weight
    return spec.scale if spec.quantized else "fp32"
