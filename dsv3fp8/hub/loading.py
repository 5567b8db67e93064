"""Published tensors into a model: all of them or none, each of the shape and type that its place has."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from dsv3fp8.errors import UserError
from dsv3fp8.hub.files import Checkpoint
from dsv3fp8.hub.fp8 import SUFFIX, decode, grid_of, scale_problem
from dsv3fp8.hub.layout import Published as PublishedTensor
from dsv3fp8.hub.layout import layout, shapes
from dsv3fp8.hub.settings import Published
from dsv3fp8.model.config import ModelConfig
from dsv3fp8.precision.recipe import Recipe

WIDE, CODES = ("F32", "BF16", "F16"), "F8_E4M3"
SCALES = (*WIDE, "F8_E8M0")
# Written by old versions of DeepSeek's code; they follow from config.json.
DERIVED = (".rotary_emb.inv_freq",)


def check_names(checkpoint: Checkpoint, config: ModelConfig, published: Published, source: Path) -> list[str]:
    """Raise UserError, naming the first, unless the files hold exactly the model's tensors. Reads headers alone.

    Returns what is left out on purpose: modules of multi-token prediction that the model is asked to do without, tables that
    follow from config.json, and tensors without an element.
    """
    expected = layout(config)
    entries = dict(checkpoint.entries)
    left_out = [name for name, entry in entries.items() if 0 in entry.shape or name.endswith(DERIVED)]
    dropped = [
        f"model.layers.{config.layers + depth}." for depth in range(config.mtp_depth, published.num_nextn_predict_layers)
    ]
    left_out += [name for name in entries if name.startswith(tuple(dropped)) and name not in left_out]
    for name in left_out:
        del entries[name]
    missing = [each for each in expected if each.name not in entries and each.copy_of is None]
    if missing:
        raise UserError(_lacks(missing, config, published, source))
    scales = {each.name + SUFFIX for each in expected} & entries.keys()
    extra = sorted(entries.keys() - {each.name for each in expected} - scales)
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise UserError(
            f"{source} has {extra[0]}{more}, which a model of its config.json has not: get config.json and weights again"
        )
    parts = shapes(config, Recipe("sizes"))
    for each in expected:
        if each.name in entries:
            _check_entry(each, tuple(each.part(parts).shape), checkpoint, published, source)
    return left_out


class Imported:
    """Our tensors of a directory that `check_names` found whole, made one at a time of the published ones they consist of."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, recipe: Recipe, published: Published, source: Path) -> None:
        self._checkpoint, self._published, self._source = checkpoint, published, source
        self._parts: dict[str, list[PublishedTensor]] = {}
        self._copies = []
        for each in layout(config):
            if each.copy_of is None:
                self._parts.setdefault(each.ours, []).append(each)
            elif each.name in checkpoint.entries:
                self._copies.append(each)
        self._shapes = shapes(config, recipe)
        self.layout = {name: (each.dtype, tuple(each.shape)) for name, each in self._shapes.items()}

    def tensor(self, name: str) -> Tensor:
        """A parameter of the model, or a buffer: zeros, but for what files have of it. Raises UserError for NaN or inf."""
        tensor = torch.zeros_like(self._shapes[name], device="cpu")
        for each in self._parts.get(name, ()):
            each.part({name: tensor}).copy_(self._read(each))
        return tensor

    def check_copies(self) -> None:
        """Raise UserError for a shared tensor whose copies differ."""
        for each in self._copies:
            if not torch.equal(self.tensor(each.ours), self._read(each)):
                raise UserError(
                    f"{self._source}: {each.name} differs from {each.copy_of}, which this model shares; get the files again"
                )

    def _read(self, each: PublishedTensor) -> Tensor:
        return each.reordered(read(self._checkpoint, each.name, self._published, self._source))


def read(checkpoint: Checkpoint, name: str, published: Published, source: Path) -> Tensor:
    """A tensor in FP32, decoded where it is FP8."""
    values = checkpoint.read(name)
    if checkpoint.dtype(name) == CODES:
        assert published.quantization_config is not None
        scale = checkpoint.read(name + SUFFIX)
        problem = scale_problem(scale, published.quantization_config.scale_kind)
        if problem:
            raise UserError(f"{source}: {name}{SUFFIX} {problem}; get the files again")
        values = decode(values, scale)
    values = values.float()
    if not bool(torch.isfinite(values).all()):
        raise UserError(f"{source}: {name} holds NaN or inf; get the files again")
    return values


def _check_entry(
    each: PublishedTensor, shape: tuple[int, ...], checkpoint: Checkpoint, published: Published, source: Path
) -> None:
    entry, dtype, scale = checkpoint.entries[each.name], checkpoint.dtype(each.name), each.name + SUFFIX
    scaled = scale in checkpoint.entries
    if entry.shape != shape:
        raise UserError(
            f"{source}: {each.name} is {list(entry.shape)}, and by config.json it has to be {list(shape)}; get both again"
        )
    if dtype != CODES:
        if dtype not in WIDE:
            raise UserError(f"{source}: {each.name} is stored as {dtype}, and what is read is {', '.join(WIDE)} and {CODES}")
        if scaled:
            raise UserError(f"{source}: {each.name} is {dtype}, but there is {scale}; get the files again")
        return
    if published.quantization_config is None:
        raise UserError(f"{source}: {each.name} is FP8, but config.json has no quantization_config; get config.json again")
    if not scaled:
        raise UserError(f"{source}: {each.name} is FP8 and lacks {scale}; get the files again")
    found = checkpoint.entries[scale].shape
    if len(shape) != 2 or found != grid_of(shape) or checkpoint.dtype(scale) not in SCALES:
        raise UserError(
            f"{source}: {scale} is {checkpoint.dtype(scale)} {list(found)}, and {each.name} {list(shape)} needs a scale for "
            f"each 128x128, {list(grid_of(shape))}; get the files again"
        )


def _lacks(missing: list[PublishedTensor], config: ModelConfig, published: Published, source: Path) -> str:
    first = missing[0].name
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    text = f"{source} lacks {first}{more}, which its config.json promises"
    if first == "lm_head.weight":
        return f"{text} (tie_word_embeddings=false): get the files again"
    if all(each.ours.startswith("mtp.") for each in missing):
        return (
            f"{text} (num_nextn_predict_layers={published.num_nextn_predict_layers}): set model.mtp_depth=0 to import the "
            "model without multi-token prediction"
        )
    return f"{text}: get the files again"
