"""One file of tensors: the safetensors format, which holds names, shapes and bytes and nothing that could run.

8 bytes: the length of the header. The header: JSON, {name: {"dtype", "shape", "data_offsets"}}, and `__metadata__`, texts by
name. Then the bytes, without gaps, wider elements first, so that all are aligned. Written here rather than by the
safetensors package, which is not everywhere, and which wants all tensors in memory at once.
"""

import json
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

SUFFIX = ".safetensors"
METADATA = "__metadata__"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """A tensor in a file, at bytes begin .. begin + size."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def size(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


def write_file(path: Path, layout: Layout, metadata: Mapping[str, str], tensor_of: Callable[[str], Tensor]) -> bytes:
    """Write a new file and flush it to the disk; its header.

    tensor_of gives the contiguous CPU tensor of a name when its turn comes. OSError where the disk does not take it.
    """
    names = sorted(layout, key=lambda name: (-layout[name][0].itemsize, name))
    header, end = {METADATA: dict(metadata)}, 0
    for name in names:
        dtype, shape = layout[name]
        begin, end = end, end + prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}  # type: ignore[dict-item]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            tensor = tensor_of(name)
            assert (tensor.dtype, tuple(tensor.shape)) == layout[name], name
            file.write(bytes_of(tensor))
        file.flush()
        os.fsync(file.fileno())
    return text


def read_header(path: Path, checksum: int | None = None) -> tuple[dict[str, Entry], dict[str, str]]:
    """(tensors by name, metadata); ValueError, KeyError or the like for what is no such file.

    checksum: CRC-32 that the header must have.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > size - 8:
            raise ValueError("its header is cut off")
        text = file.read(length)
    if checksum is not None and zlib.crc32(text) != checksum:
        raise ValueError("its header is not the one that was written")
    header, entries = json.loads(text), {}
    metadata = header.pop(METADATA, {})
    for name, each in header.items():
        begin, end = each["data_offsets"]
        entries[name] = entry = Entry(DTYPES[each["dtype"]], tuple(map(int, each["shape"])), 8 + length + begin)
        if not 0 <= begin <= begin + entry.size == end <= size - 8 - length:
            raise ValueError(f"{name} is cut off")
    return entries, metadata


def read_tensor(path: Path, entry: Entry) -> Tensor:
    """A tensor of a file, on the CPU; ValueError where the file ends before it."""
    data = torch.empty(entry.size, dtype=torch.uint8)
    with path.open("rb", buffering=0) as file:
        file.seek(entry.begin)
        view, done = data.numpy().data, 0
        while done < entry.size:
            count = file.readinto(view[done:])
            if not count:
                raise ValueError("it ends too early")
            done += count
    return data.view(entry.dtype).view(entry.shape)


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
