"""The values of a model's published tensors, in the number format that was asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dsv3fp8.hub.fp8 import SUFFIX, encode, grid_of, scale_kind_of
from dsv3fp8.hub.layout import Published
from dsv3fp8.precision.formats import E4M3
from dsv3fp8.precision.recipe import Recipe
from dsv3fp8.training.checkpoint_file import Layout


class Weights:
    """Published tensors of a model's tensors {name: fp32}.

    bf16, fp32: every tensor in that type. fp8: the weights of linears as E4M3 codes and scales, the rest in BF16. The router
    and its bias are FP32 in all of them.
    shapes: as tensors, which may be without values. tensors: read one at a time.
    """

    def __init__(
        self,
        published: Sequence[Published],
        shapes: Mapping[str, Tensor],
        tensors: Mapping[str, Tensor],
        recipe: Recipe,
        number_format: str,
    ) -> None:
        self._shapes, self._tensors, self._recipe, self._format = shapes, tensors, recipe, number_format
        self._published = {each.name: each for each in published}

    def layouts(self) -> list[Layout]:
        """Names with dtype and shape, those of a weight and its scales together."""
        return [self._layout(each) for each in self._published.values()]

    def tensor(self, name: str) -> Tensor:
        """The tensor of a name, contiguous."""
        if name not in self._published:
            return self._encoded(self._published[name.removesuffix(SUFFIX)])[1]
        published = self._published[name]
        if self._coded(published):
            return self._encoded(published)[0]
        return self._values(published).to(self._dtype(published)).contiguous()

    def _layout(self, published: Published) -> Layout:
        shape = tuple(published.part(self._shapes).shape)
        layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {published.name: (self._dtype(published), shape)}
        if self._coded(published):
            layout[published.name + SUFFIX] = torch.float32, grid_of(shape)
        return layout

    def _values(self, published: Published) -> Tensor:
        return published.reordered(published.part(self._tensors).detach())

    def _encoded(self, published: Published) -> tuple[Tensor, Tensor]:
        # Made once for the codes and once for the scales: a file has its wider elements first, and both must not be kept.
        assert published.op is not None
        codes, scale = encode(self._values(published), scale_kind_of(self._recipe, published.op))
        return codes.contiguous(), scale.contiguous()

    def _coded(self, published: Published) -> bool:
        return self._format == "fp8" and published.op is not None

    def _dtype(self, published: Published) -> torch.dtype:
        if self._coded(published):
            return E4M3.dtype
        return torch.float32 if published.fp32 or self._format == "fp32" else torch.bfloat16
