"""The file format against the package that defines it."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from dsv3fp8.training.checkpoint_file import DTYPES, Layout, bytes_of, read_header, read_tensor, write_file


def one_of_each() -> dict[str, torch.Tensor]:
    """Every dtype, odd sizes, no dimension, no element."""
    torch.manual_seed(0)
    tensors = {name: (torch.randn(3, 5) * 50).to(dtype) for name, dtype in DTYPES.items()}
    return {**tensors, "scalar": torch.tensor(7.5), "none": torch.zeros(0, 4), "ä b.c": torch.arange(3, dtype=torch.int8)}


def layout_of(tensors: dict[str, torch.Tensor]) -> Layout:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and bytes(bytes_of(one)) == bytes(bytes_of(other))


def test_the_package_reads_what_is_written_here(tmp_path: Path) -> None:
    tensors = one_of_each()
    write_file(tmp_path / "a.safetensors", layout_of(tensors), {"step": "7"}, tensors.__getitem__)
    read = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert read.keys() == tensors.keys()
    assert all(equal(read[name], tensor) for name, tensor in tensors.items())
    with safetensors.safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"step": "7"}


def test_what_the_package_writes_is_read_here(tmp_path: Path) -> None:
    tensors = one_of_each()
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors", {"step": "7"})
    entries, metadata = read_header(tmp_path / "a.safetensors")
    assert metadata == {"step": "7"}
    assert entries.keys() == tensors.keys()
    assert all(equal(read_tensor(tmp_path / "a.safetensors", entries[name]), tensor) for name, tensor in tensors.items())


def test_elements_are_aligned_so_that_files_can_be_mapped(tmp_path: Path) -> None:
    tensors = one_of_each()
    write_file(tmp_path / "a.safetensors", layout_of(tensors), {}, tensors.__getitem__)
    for entry in read_header(tmp_path / "a.safetensors")[0].values():
        assert entry.begin % entry.dtype.itemsize == 0


def test_an_existing_file_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "a", {}, {}, {}.__getitem__)
    assert (tmp_path / "a").read_text() == "mine"


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]}}, "w is cut off"),
        ({"w": {"dtype": "F32", "shape": [-2, -2], "data_offsets": [4, 0]}}, "w is cut off"),
        ({"w": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}}, "w is cut off"),
        ({"w": {"dtype": "F32", "shape": [4], "data_offsets": [-8, 8]}}, "w is cut off"),
        ({"w": {"dtype": "PICKLE", "shape": [4], "data_offsets": [0, 16]}}, "PICKLE"),
        ({"w": [4]}, "list indices"),
    ],
)
def test_a_header_that_lies_is_refused_before_anything_is_read(tmp_path: Path, header: dict, reason: str) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "a").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    with pytest.raises((ValueError, KeyError, TypeError), match=reason):
        read_header(tmp_path / "a")


def test_a_file_that_shrank_since_its_header_was_read_is_refused(tmp_path: Path) -> None:
    tensors = {"w": torch.arange(1000)}
    path = tmp_path / "a"
    write_file(path, layout_of(tensors), {}, tensors.__getitem__)
    entries = read_header(path)[0]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="ends too early"):
        read_tensor(path, entries["w"])
