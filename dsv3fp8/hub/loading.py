"""Published tensors into a model: all of them or none, each of the shape and type that its place has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from dsv3fp8.errors import UserError
from dsv3fp8.hub.files import Checkpoint, Entry
from dsv3fp8.hub.fp8 import SUFFIX, decode, grid_of, scale_problem
from dsv3fp8.hub.layout import Published as PublishedTensor
from dsv3fp8.hub.layout import layout, shapes
from dsv3fp8.hub.settings import Published
from dsv3fp8.model.config import ModelConfig
from dsv3fp8.model.transformer import Transformer
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
            _check_entry(each, tuple(each.part(parts).shape), entries, published, source)
    return left_out


def load_weights(
    checkpoint: Checkpoint, config: ModelConfig, recipe: Recipe, published: Published, source: Path
) -> Transformer:
    """The model with the files' weights as its FP32 masters, read tensor by tensor; everything else in it is as at its start.

    Raises UserError for a tensor that holds NaN or inf, and for a shared one whose copies differ.
    """
    model = Transformer(config, recipe)
    for buffer in model.buffers():
        buffer.zero_()
    tensors = model.state_dict()
    # Copies last, when what they are copies of is there.
    present = sorted(
        (each for each in layout(config) if each.name in checkpoint.entries), key=lambda each: each.copy_of is not None
    )
    with torch.no_grad():
        for each in present:
            values = each.reordered(read(checkpoint, each.name, published, source))
            part = each.part(tensors)
            if each.copy_of is None:
                part.copy_(values)
            elif not torch.equal(part, values):
                raise UserError(
                    f"{source}: {each.name} differs from {each.copy_of}, which this model shares; get the files again"
                )
    model.invalidate_codes()
    return model


def read(checkpoint: Checkpoint, name: str, published: Published, source: Path) -> Tensor:
    """A tensor in FP32, decoded where it is FP8."""
    values = checkpoint.read(name)
    if checkpoint.entries[name].dtype == CODES:
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
    each: PublishedTensor, shape: tuple[int, ...], entries: Mapping[str, Entry], published: Published, source: Path
) -> None:
    entry, scale = entries[each.name], entries.get(each.name + SUFFIX)
    if entry.shape != shape:
        raise UserError(
            f"{source}: {each.name} is {list(entry.shape)}, and by config.json it has to be {list(shape)}; get both again"
        )
    if entry.dtype != CODES:
        if entry.dtype not in WIDE:
            raise UserError(
                f"{source}: {each.name} is stored as {entry.dtype}, and what is read is {', '.join(WIDE)} and {CODES}"
            )
        if scale is not None:
            raise UserError(f"{source}: {each.name} is {entry.dtype}, but there is {each.name}{SUFFIX}; get the files again")
        return
    if published.quantization_config is None:
        raise UserError(f"{source}: {each.name} is FP8, but config.json has no quantization_config; get config.json again")
    if scale is None:
        raise UserError(f"{source}: {each.name} is FP8 and lacks {each.name}{SUFFIX}; get the files again")
    if len(shape) != 2 or scale.shape != grid_of(shape) or scale.dtype not in SCALES:
        wanted = list(grid_of(shape)) if len(shape) == 2 else "none"
        raise UserError(
            f"{source}: {each.name}{SUFFIX} is {scale.dtype} {list(scale.shape)}, and {each.name} {list(shape)} needs a scale "
            f"for each 128x128, {wanted}; get the files again"
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
