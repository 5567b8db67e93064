"""A checkpoint on disk, read by as many ranks as there are now, whoever wrote it.

``index.json`` says what is in it: the tensors with dtype and shape, the files with size and checksum, and the run's state; a
checksum of its own covers them.
``00000.safetensors`` and on hold what each rank wrote; their headers say which part of a tensor that is, in the words that
PyTorch's own reader of such files (``torch.distributed.checkpoint.HuggingFaceStorageReader``) knows. DCP's planner decides
which parts a rank reads. JSON and bytes are all there is: nothing that is read can run.
"""

import json
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from dsv3fp8.errors import UserError
from dsv3fp8.training.checkpoint_directory import list_checkpoints, step_of
from dsv3fp8.training.checkpoint_file import DTYPES, SUFFIX, Entry, bytes_of, read_header, read_tensor
from dsv3fp8.training.run_directory import RunDirectory

INDEX = "index.json"
FORMAT = "dsv3fp8 checkpoint 2"
# Texts in a file's header. The first is PyTorch's, with its key for where in the whole tensor a part begins.
SHARDING, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
CHECKSUMS, RANDOM = "crc32", "random"
CHECKSUM = "crc32"  # of the index, in it
READERS = 4  # threads of a rank


def file_name(rank: int) -> str:
    """The file that a rank writes."""
    return f"{rank:05d}{SUFFIX}"


def index_checksum(index: Mapping[str, Any]) -> int:
    """CRC-32 of an index: of its JSON, as Python writes it, without the checksum itself."""
    return zlib.crc32(json.dumps({key: value for key, value in index.items() if key != CHECKSUM}).encode())


@dataclass(frozen=True)
class _Part:
    """Where a part of a tensor lies, and the CRC-32 of its bytes."""

    file: Path
    entry: Entry
    checksum: int


class Checkpoint:
    """Opening one reads its index; the rest is read when it is asked for.

    tensors: {name: (dtype, shape)}, whole. state: plain containers, as they were saved. Whatever is missing, damaged or of
    another kind is a UserError that names the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._reading(INDEX):
            index = json.loads((path / INDEX).read_bytes())
            if index["format"] != FORMAT:
                raise ValueError(f"its format is {index['format']}, not {FORMAT}")
            if index[CHECKSUM] != index_checksum(index):
                raise ValueError("its content is not the one that was written")
            self.state: dict[str, Any] = index["state"]
            self._files = {str(name): (int(size), int(crc)) for name, (size, crc) in index["files"].items()}
            self.tensors = {
                str(name): (DTYPES[dtype], tuple(map(int, shape))) for name, (dtype, shape) in index["tensors"].items()
            }
            step = step_of(path)
            if step is not None and self.state["step"] != step:
                raise ValueError(f"it is of step {self.state['step']}")

    def require(self, *names: str) -> None:
        """Raise UserError unless the state has all these."""
        missing = set(names) - self.state.keys()
        if missing:
            raise UserError(
                f"checkpoint {self.path} lacks {', '.join(sorted(missing))}: it is of another version; train anew in another "
                "run_dir"
            )

    def random_states(self, rank: int) -> dict[str, Any] | None:
        """What this rank saved of its generators; None if there was no such rank."""
        if file_name(rank) not in self._files:
            return None
        with self._reading(file_name(rank)):
            return json.loads(self._header(file_name(rank))[1][RANDOM])

    def read(self, name: str) -> Tensor:
        """A whole tensor, on the CPU."""
        dtype, shape = self.tensors[name]
        tensor = torch.empty(shape, dtype=dtype)
        self.read_into({name: tensor})
        return tensor

    def read_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors by name: plain ones whole, DTensors with what this rank has of them. Shapes agree; dtypes are cast."""
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner({name: tensor.detach() for name, tensor in tensors.items()}, self._metadata)
        wanted: dict[tuple[str, tuple[int, ...]], list[ReadItem]] = {}
        for item in planner.create_local_plan().items:
            assert item.storage_index.offset is not None
            wanted.setdefault((item.storage_index.fqn, tuple(item.storage_index.offset)), []).append(item)

        def read(place: tuple[str, tuple[int, ...]]) -> None:
            part = self._parts[place]
            with self._reading(part.file.name):
                data = read_tensor(part.file, part.entry)
                if zlib.crc32(bytes_of(data)) != part.checksum:
                    raise ValueError(f"the bytes of {place[0]} are not those that were written")
            for item in wanted[place]:
                source = data
                for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    source = source.narrow(dim, offset, length)
                target = planner.resolve_tensor(item)
                target.copy_(source)
                planner.commit_tensor(item, target)

        with ThreadPoolExecutor(READERS) as pool:
            for _ in pool.map(read, wanted):
                pass

    @cached_property
    def _metadata(self) -> Metadata:
        """What DCP's planner plans by."""
        chunks: dict[str, list[ChunkStorageMetadata]] = {name: [] for name in self.tensors}
        for (name, offsets), part in self._parts.items():
            chunks[name].append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(part.entry.shape)))
        described: dict[str, STORAGE_TYPES] = {
            name: TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), chunks[name])
            for name, (dtype, shape) in self.tensors.items()
        }
        return Metadata(described)

    @cached_property
    def _parts(self) -> dict[tuple[str, tuple[int, ...]], _Part]:
        """By name and offsets; together they are checked to be all of every tensor."""
        parts: dict[tuple[str, tuple[int, ...]], _Part] = {}
        missing = {name: prod(shape) for name, (_, shape) in self.tensors.items()}
        for file in self._files:
            with self._reading(file):
                entries, metadata = self._header(file)
                sharding, checksums = json.loads(metadata[SHARDING]), json.loads(metadata[CHECKSUMS])
                for name, entry in entries.items():
                    offsets = tuple(map(int, sharding[name][OFFSETS]))
                    dtype, shape = self.tensors[name]
                    ends = [offset + size for offset, size in zip(offsets, entry.shape, strict=True)]
                    if dtype != entry.dtype or min(offsets, default=0) < 0 or any(map(int.__gt__, ends, shape)):
                        raise ValueError(f"{name} does not fit into what {INDEX} says of it")
                    parts[name, offsets] = _Part(self.path / file, entry, int(checksums[name]))
                    missing[name] -= prod(entry.shape)
        with self._reading(INDEX):
            for name, count in missing.items():
                if count:
                    raise ValueError(f"the files do not hold {name} once and whole")
        return parts

    def _header(self, file: str) -> tuple[dict[str, Entry], dict[str, str]]:
        size, checksum = self._files[file]
        found = (self.path / file).stat().st_size
        if found != size:
            raise ValueError(f"it has {found} bytes, not {size}")
        return read_header(self.path / file, checksum)

    @contextmanager
    def _reading(self, file: str) -> Iterator[None]:
        """Say which file is at fault, in one line."""
        try:
            yield
        except FileNotFoundError:
            raise UserError(
                f"checkpoint {self.path} has no file {file}: it is not whole, or of another version; {self._remedy()}"
            ) from None
        except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
            if "allocate memory" in str(error):
                raise  # nothing is wrong with the file
            reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error).splitlines()[0]
            raise UserError(f"checkpoint file {self.path / file} is damaged ({reason}): {self._remedy()}") from error

    def _remedy(self) -> str:
        """What can be done without this checkpoint."""
        all_there = [path for _, path in list_checkpoints(self.path.parent)]
        if not [path for path in all_there if path != self.path]:
            return "there is no other checkpoint: put a sound copy in its place, or start anew in another run directory"
        if all_there[0] != self.path:
            return f"delete {self.path} to go back to the checkpoint before it"
        return "there is none before it; take a later one with step="


def open_checkpoint(run: str, step: int | None) -> Checkpoint:
    """A run's checkpoint of a step, its newest for None; UserError, with the keys run= and step=, if there is none."""
    found = dict(list_checkpoints(RunDirectory(Path(run)).checkpoints))
    if not found:
        raise UserError(f"run={run} has no checkpoint: give the run directory of `dsv3fp8 train`")
    wanted = max(found) if step is None else step
    if wanted not in found:
        raise UserError(f"step={wanted}: run={run} has checkpoints of steps {', '.join(map(str, found))}")
    return Checkpoint(found[wanted])
