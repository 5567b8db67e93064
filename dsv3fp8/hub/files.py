"""A directory of safetensors files: read tensor by tensor, and written so, in several files above a size."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from dsv3fp8.errors import UserError
from dsv3fp8.training.checkpoint_file import DTYPE_NAMES, Entry, Layout, read_header, read_tensor, write_file

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# What transformers wants to know of a file before it reads one.
METADATA = {"format": "pt"}


class Checkpoint:
    """The tensors of a directory, from `model.safetensors` or from the files that its index names.

    Raises UserError, one line, for a file that is missing, cut short or no safetensors file, and for an index that does not
    agree with its files. Opening reads headers alone. Nothing that is read can run.
    """

    def __init__(self, directory: Path) -> None:
        self.entries: dict[str, Entry] = {}
        self._paths: dict[str, Path] = {}
        for file, promised in _files_of(directory).items():
            self._open(directory / file, promised)

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU. Raises UserError if its bytes cannot be read."""
        path = self._paths[name]
        try:
            return read_tensor(path, self.entries[name])
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: {name} cannot be read ({error}); get the file again") from error

    def dtype(self, name: str) -> str:
        """The type of a tensor as safetensors names it (F32, BF16, F8_E4M3)."""
        return DTYPE_NAMES[self.entries[name].dtype]

    def _open(self, path: Path, promised: set[str] | None) -> None:
        if not path.is_file():
            raise UserError(f"{path} is missing, which {INDEX} names; get the file again")
        try:
            entries, _ = read_header(path)
            _check_spans(entries, path.stat().st_size)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is damaged or no safetensors file ({_reason(error)}); get the file again") from error
        if promised is not None and promised != entries.keys():
            absent, extra = sorted(promised - entries.keys()), sorted(entries.keys() - promised)
            complaint = f"names {absent[0]}, which is not in {path.name}" if absent else f"leaves out {extra[0]} of {path.name}"
            raise UserError(f"{path.parent / INDEX} {complaint}; get both files again")
        self.entries |= entries
        self._paths |= dict.fromkeys(entries, path)


def _check_spans(entries: Mapping[str, Entry], size: int) -> None:
    """The format leaves no gap between tensors, and no byte is of two."""
    end = None
    for entry in sorted(entries.values(), key=lambda entry: entry.begin):
        if end is not None and entry.begin != end:
            raise ValueError("its tensors overlap, or there is a gap between them")
        end = entry.begin + entry.size
    if end is not None and end != size:
        raise ValueError(f"it has {size} bytes and its header speaks of {end}")


def _files_of(directory: Path) -> dict[str, set[str] | None]:
    """{file: the tensors that an index says are in it, None without an index}."""
    index = directory / INDEX
    if not index.exists():
        if (directory / SINGLE).is_file():
            return {SINGLE: None}
        raise UserError(f"{directory} has neither {SINGLE} nor {INDEX}: weights in another format are not read")
    found: dict[str, set[str]] = {}
    try:
        for name, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items():
            if Path(file).name != file:
                raise UserError(f"{index} puts {name} into {file}, which is no file beside it; get the index again")
            found.setdefault(file, set()).add(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is no index of safetensors files ({_reason(error)}); get the file again") from error
    return dict(found)


def bytes_in(layout: Layout) -> int:
    """What tensors take in a file."""
    return sum(prod(shape) * dtype.itemsize for dtype, shape in layout.values())


def shards_of(layouts: Iterable[Layout], limit: int) -> dict[str, Layout]:
    """{file name: its tensors}, in their order, at most `limit` bytes each. What one layout holds is never cut."""
    shards: list[dict[str, tuple[torch.dtype, tuple[int, ...]]]] = [{}]
    for layout in layouts:
        if shards[-1] and bytes_in(shards[-1]) + bytes_in(layout) > limit:
            shards.append({})
        shards[-1] |= layout
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard for number, shard in enumerate(shards, 1)}


def write(directory: Path, shards: Mapping[str, Layout], tensor_of: Callable[[str], Tensor]) -> Iterator[str]:
    """Write the files, each tensor made when its turn comes, and their index; yields a file's name when it is on the disk."""
    for file, layout in shards.items():
        write_file(directory / file, layout, METADATA, tensor_of)
        yield file
    if SINGLE not in shards:
        placed = {name: file for file, layout in shards.items() for name in layout}
        index = {"metadata": {"total_size": sum(map(bytes_in, shards.values()))}, "weight_map": dict(sorted(placed.items()))}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    return str(error).splitlines()[0] if str(error) else type(error).__name__
