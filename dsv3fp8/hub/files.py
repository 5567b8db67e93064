"""Safetensors files: a directory of them, read tensor by tensor, and written shard by shard.

The format holds numbers and names and nothing that could run. What a header promises is checked before a tensor is read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from dsv3fp8.errors import UserError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def library() -> Any:
    """The package `safetensors`. Raises UserError where it is not installed."""
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise UserError(
            "safetensors is not installed, which Hugging Face checkpoints are made of: pip install safetensors"
        ) from error
    return safetensors


class Entry(NamedTuple):
    """A tensor of a file, by its header. dtype: as safetensors names it (F32, BF16, F8_E4M3)."""

    shape: tuple[int, ...]
    dtype: str


class Checkpoint:
    """The tensors of a directory, from `model.safetensors` or from the files that its index names.

    Raises UserError, one line, for a file that is missing, cut short or no safetensors file, and for an index that does not
    agree with its files. Files stay mapped until `close`; a tensor is read when it is asked for.
    """

    def __init__(self, directory: Path) -> None:
        self._library = library()
        self._stack = ExitStack()
        self._holders: dict[str, tuple[Any, str]] = {}
        self.entries: dict[str, Entry] = {}
        try:
            for file, promised in _files_of(directory).items():
                self._open(directory / file, promised)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the files."""
        self._stack.close()

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU. Raises UserError if its bytes cannot be read."""
        holder, path = self._holders[name]
        try:
            tensor: Tensor = holder.get_tensor(name)
        except Exception as error:
            raise UserError(f"{path}: {name} cannot be read ({_first_line(error)}); get the file again") from error
        return tensor

    def _open(self, path: Path, promised: set[str] | None) -> None:
        if not path.is_file():
            raise UserError(f"{path} is missing, which {INDEX} names; get the file again")
        try:
            holder = self._stack.enter_context(self._library.safe_open(str(path), framework="pt", device="cpu"))
            names = list(holder.keys())
            slices = {name: holder.get_slice(name) for name in names}
            entries = {name: Entry(tuple(each.get_shape()), each.get_dtype()) for name, each in slices.items()}
        except Exception as error:  # the package raises errors of its own, and those of the system
            raise UserError(f"{path} is damaged or no safetensors file ({_first_line(error)}); get the file again") from error
        if promised is not None and promised != set(names):
            absent, extra = sorted(promised - set(names)), sorted(set(names) - promised)
            complaint = f"names {absent[0]}, which is not in {path.name}" if absent else f"leaves out {extra[0]} of {path.name}"
            raise UserError(f"{path.parent / INDEX} {complaint}; get both files again")
        self.entries |= entries
        self._holders |= {name: (holder, str(path)) for name in names}


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
        raise UserError(f"{index} is no index of safetensors files ({_first_line(error)}); get the file again") from error
    return dict(found)


class Group(NamedTuple):
    """Tensors that are made together and stay in one file: a weight and its scales. sizes: {name: bytes}."""

    key: Any
    sizes: dict[str, int]


def shards_of(groups: Iterable[Group], limit: int) -> dict[str, list[Group]]:
    """{file name: its groups}, in their order, no file above `limit` bytes unless one group is."""
    shards: list[list[Group]] = [[]]
    filled = 0
    for group in groups:
        size = sum(group.sizes.values())
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(group)
        filled += size
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard for number, shard in enumerate(shards, 1)}


def write(directory: Path, shards: Mapping[str, list[Group]], make: Callable[[Any], dict[str, Tensor]]) -> Iterator[str]:
    """Write the files one after the other, each made when its turn comes, and their index; yields a name when it is on disk."""
    save = library().torch.save_file
    for file, groups in shards.items():
        tensors: dict[str, Tensor] = {}
        for group in groups:
            tensors |= make(group.key)
        assert tensors.keys() == {name for group in groups for name in group.sizes}
        save(tensors, str(directory / file), metadata={"format": "pt"})
        sync(directory / file)
        yield file
    if SINGLE not in shards:
        placed = {name: file for file, groups in shards.items() for group in groups for name in group.sizes}
        total = sum(sum(group.sizes.values()) for groups in shards.values() for group in groups)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        sync(directory / INDEX)


def sync(path: Path) -> None:
    """Make a file or a directory survive a lost machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
