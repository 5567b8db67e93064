"""The values of a model's published tensors, in the number format that was asked for."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dsv3fp8.hub.files import Group
from dsv3fp8.hub.fp8 import SUFFIX, encode, grid_of, scale_kind_of
from dsv3fp8.hub.layout import Published
from dsv3fp8.precision.recipe import Recipe

FORMATS = ("bf16", "fp8", "fp32")


class Weights:
    """Published tensors of a model's tensors {name: fp32}.

    bf16, fp32: every tensor in that type. fp8: the weights of linears as E4M3 codes and scales, the rest in BF16. The router
    and its bias are FP32 in all of them.
    """

    def __init__(self, tensors: Mapping[str, Tensor], recipe: Recipe, number_format: str) -> None:
        self.tensors, self.recipe, self.format = tensors, recipe, number_format

    def group(self, published: Published) -> Group:
        """What `make` will give, by name and bytes."""
        shape = tuple(published.part(self.tensors).shape)
        if self._codes(published):
            return Group(published, {published.name: _count(shape), published.name + SUFFIX: 4 * _count(grid_of(shape))})
        return Group(published, {published.name: _count(shape) * self._dtype(published).itemsize})

    def make(self, published: Published) -> dict[str, Tensor]:
        """The tensor, with its scales where it has any."""
        values = published.reordered(published.part(self.tensors).detach())
        if self._codes(published):
            assert published.op is not None
            codes, scale = encode(values, scale_kind_of(self.recipe, published.op))
            return {published.name: codes, published.name + SUFFIX: scale}
        # A copy: files hold every tensor on its own, and a stack's experts share their memory.
        return {published.name: values.to(self._dtype(published), copy=True).contiguous()}

    def _codes(self, published: Published) -> bool:
        return self.format == "fp8" and published.op is not None

    def _dtype(self, published: Published) -> torch.dtype:
        return torch.float32 if published.fp32 or self.format == "fp32" else torch.bfloat16


def _count(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())
