"""Reading a checkpoint: with PyTorch's own reader beside ours, and when files are missing, damaged or of another kind."""

import json
import pickle
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import save_tensors

from dsv3fp8.errors import UserError
from dsv3fp8.training.checkpoint import Checkpoint, open_checkpoint

TENSORS = {"model.w": torch.arange(1000.0).view(50, 20), "model.steps": torch.tensor(7), "first.w": torch.ones(3).bfloat16()}


def read_all(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint(path)
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return save_tensors(tmp_path, 1, TENSORS, tokens=5)


def test_everything_comes_back(written: Path) -> None:
    read = read_all(written)
    assert list(read) == list(TENSORS)
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in TENSORS.items())
    assert Checkpoint(written).state == {"step": 1, "tokens": 5}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_pytorch_reads_it_too(written: Path) -> None:
    """Its reader of sharded safetensors files, which knows nothing of the index."""
    read = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    dcp.load(read, storage_reader=dcp.HuggingFaceStorageReader(str(written)))
    assert all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())


def test_a_tensor_is_read_into_another_dtype_where_it_lies(written: Path) -> None:
    target = torch.zeros(3)
    Checkpoint(written).read_into({"first.w": target})
    assert torch.equal(target, torch.ones(3))


PAYLOAD, INDEX = "00000.safetensors", "index.json"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(place: int) -> Callable[[Path], None]:
    """One bit, so many bytes from the start or the end."""

    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.write_bytes(bytes(data))

    return change


class Dangerous:
    """What a hostile file would hold."""

    def __reduce__(self) -> Any:
        return subprocess.Popen, (["touch", "/tmp/pwned"],)


def in_index(change: Callable[[dict], Any], seal: bool = True) -> Callable[[Path], None]:
    """seal: with the checksum that the changed index has to have."""

    def apply(path: Path) -> None:
        index = json.loads(path.read_text())
        change(index)
        if seal:
            del index["crc32"]
            index["crc32"] = zlib.crc32(json.dumps(index).encode())
        path.write_text(json.dumps(index))

    return apply


@pytest.mark.parametrize(
    ("file", "damage", "complaint"),
    [
        (PAYLOAD, Path.unlink, "has no file 00000.safetensors"),
        (INDEX, Path.unlink, "has no file index.json"),
        (PAYLOAD, cut, r"it has \d+ bytes, not \d+"),
        (INDEX, cut, "damaged"),
        (PAYLOAD, lambda path: path.write_bytes(b""), "it has 0 bytes"),
        (INDEX, lambda path: path.write_bytes(b""), "damaged"),
        (PAYLOAD, flip(-1), "the bytes of first.w are not those that were written"),
        (PAYLOAD, flip(20), "its header is not the one that was written"),
        (PAYLOAD, flip(0), "its header is not the one that was written"),
        (PAYLOAD, flip(6), "its header is cut off"),
        (PAYLOAD, lambda path: torch.save({"w": Dangerous()}, path), r"it has \d+ bytes"),
        (INDEX, lambda path: path.write_bytes(pickle.dumps(Dangerous())), "damaged"),
        (INDEX, lambda path: path.write_text("[1, 2]"), "damaged"),
        (INDEX, lambda path: path.write_text('{"weights": {}}'), "it lacks 'format'"),
        (INDEX, in_index(lambda index: index.update(format="dsv3fp8 checkpoint 99")), "its format is dsv3fp8 checkpoint 99"),
        (INDEX, in_index(lambda index: index["files"].update({"00001.safetensors": [9, 9]})), "has no file 00001.safetensors"),
        (INDEX, in_index(lambda index: index["tensors"].update({"model.v": ["F32", [4]]})), "do not hold model.v once"),
        (INDEX, in_index(lambda index: index["tensors"].update({"model.w": ["F32", [60, 20]]})), "do not hold model.w once"),
        (INDEX, in_index(lambda index: index["tensors"].update({"model.w": ["F32", [5, 20]]})), "model.w does not fit into"),
        (INDEX, in_index(lambda index: index["tensors"].pop("model.w")), "it lacks 'model.w'"),
        (INDEX, in_index(lambda index: index.update(state={})), "it lacks 'step'"),
        (INDEX, in_index(lambda index: index["state"].update(step=2)), "it is of step 2"),
        (INDEX, in_index(lambda index: index.pop("state")), "it lacks 'state'"),
        (INDEX, in_index(lambda index: index.pop("crc32"), seal=False), "it lacks 'crc32'"),
        (INDEX, in_index(lambda index: index.update(state={}), seal=False), "its content is not the one that was written"),
        (INDEX, in_index(lambda index: index["state"].update(tokens=6), seal=False), "its content is not the one that"),
        (INDEX, in_index(lambda index: index["tensors"].pop("model.w"), seal=False), "its content is not the one that"),
        (INDEX, in_index(lambda index: index["files"].clear(), seal=False), "its content is not the one that"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_one_line_with_its_name(
    written: Path, monkeypatch: pytest.MonkeyPatch, file: str, damage: Callable[[Path], Any], complaint: str
) -> None:
    """K07: and nothing of it runs."""
    damage(written / file)

    def unpickled(*_: Any, **__: Any) -> None:
        raise AssertionError("a file was unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, unpickled)
    monkeypatch.setattr(torch, "load", unpickled)
    with pytest.raises(UserError, match=complaint) as error:
        read_all(written)
    assert "\n" not in str(error.value)
    assert str(written) in str(error.value)
    assert "there is no other checkpoint: put a sound copy in its place" in str(error.value)


def test_what_can_be_done_without_a_checkpoint_hangs_on_which_others_there_are(tmp_path: Path) -> None:
    first, last = (save_tensors(tmp_path, step, TENSORS, keep=2) for step in (1, 2))
    flip(-1)(first / PAYLOAD)
    with pytest.raises(UserError, match="there is none before it; take a later one with step="):
        read_all(first)
    flip(-1)(last / PAYLOAD)
    with pytest.raises(UserError, match=f"delete {last} to go back to the checkpoint before it"):
        read_all(last)


def test_a_checkpoint_of_a_run_is_chosen_by_step(tmp_path: Path) -> None:
    for step in (9, 10):
        save_tensors(tmp_path / "checkpoints", step, TENSORS, keep=2)
    assert open_checkpoint(str(tmp_path), None).state["step"] == 10
    assert open_checkpoint(str(tmp_path), 9).state["step"] == 9
    with pytest.raises(UserError, match=f"step=8: run={tmp_path} has checkpoints of steps 9, 10"):
        open_checkpoint(str(tmp_path), 8)
    with pytest.raises(UserError, match="run=nowhere has no checkpoint: give the run directory"):
        open_checkpoint("nowhere", None)
