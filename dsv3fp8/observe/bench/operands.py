"""Operands of the GEMMs that are measured: random values, quantized as the recipe's ops would have them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv3fp8.config import load_config
from dsv3fp8.kernels import backend
from dsv3fp8.observe.bench.sizes import Sizes
from dsv3fp8.observe.bench.timing import Clock
from dsv3fp8.precision.formats import E4M3
from dsv3fp8.precision.recipe import Recipe
from dsv3fp8.precision.tiles import BLOCK_128, COLUMN_128, ROW_128, QuantizedTensor, Tile


@dataclass(frozen=True)
class Setting:
    """What every table needs to know. peers: other libraries that race too."""

    sizes: Sizes
    clock: Clock
    recipe: Recipe
    peers: frozenset[str] = frozenset()

    @property
    def device(self) -> torch.device:
        return self.clock.device


def recipe_named(name: str) -> Recipe:
    """A shipped recipe; UserError for no such one."""
    return load_config([f"recipe={name}"]).recipe


def random(setting: Setting, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """N(0, 1). Never zeros: a chip runs faster on them than on data."""
    out = torch.empty(*shape, dtype=dtype, device=setting.device)
    return out.normal_()


def cast(x: Tensor, tile: Tile) -> QuantizedTensor:
    """E4M3 codes of x on whatever backend casts here; with 128x1 tiles the codes lie with the tokens contiguous."""
    codes = backend.quantize(x, E4M3, tile)
    return replace(codes, codes=codes.codes.mT.contiguous().mT) if tile == COLUMN_128 else codes


def weight(setting: Setting, *shape: int) -> tuple[Tensor, QuantizedTensor]:
    """A weight [..., N, K] in BF16, and its 128x128 codes."""
    values = random(setting, *shape)
    return values, cast(values, BLOCK_128)


def rows(setting: Setting, tokens: int, width: int) -> tuple[Tensor, QuantizedTensor]:
    """Activations or gradients [T, C] in BF16, and their 1x128 codes."""
    values = random(setting, tokens, width)
    return values, cast(values, ROW_128)


def columns(setting: Setting, tokens: int, width: int) -> tuple[Tensor, QuantizedTensor]:
    """Activations or gradients [T, C] in BF16, and their 128x1 codes."""
    values = random(setting, tokens, width)
    return values, cast(values, COLUMN_128)
