"""One file of weights out of a checkpoint of any number of ranks."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from checkpoints import save_tensors
from processes import Ranks, on_ranks
from torch.distributed.tensor import DTensor, Replicate, Shard

from dsv3fp8.errors import UserError
from dsv3fp8.training import consolidate
from dsv3fp8.training.consolidate import main

TENSORS = {
    "model.experts": torch.arange(48.0).view(4, 3, 4),
    "model.norm": torch.ones(5),
    "model.bias": torch.tensor([0.25]).bfloat16(),
    "first.norm": torch.zeros(5),
}


def save_parts(ranks: Ranks, run: Path) -> None:
    """Two experts on each of two ranks."""
    assert ranks.expert_mesh is not None
    mine = TENSORS["model.experts"][2 * ranks.index : 2 * ranks.index + 2]
    parts = DTensor.from_local(mine, ranks.expert_mesh, (Replicate(), Shard(0)))
    save_tensors(run / "checkpoints", 20, {**TENSORS, "model.experts": parts}, ranks=ranks, config={"a": 1})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with the checkpoint of two ranks."""
    directory = tmp_path_factory.mktemp("run")
    on_ranks(2, save_parts, directory, expert=2)
    return directory


def test_all_weights_of_two_ranks_are_in_one_file_for_anyone_to_read(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "weights.safetensors"
    assert main([f"run={run}", f"out={out}"]) == 0
    read = safetensors.torch.load_file(out)
    assert read.keys() == {"experts", "norm", "bias"}
    for name, tensor in read.items():
        assert tensor.dtype == TENSORS[f"model.{name}"].dtype
        assert torch.equal(tensor, TENSORS[f"model.{name}"])
    with safetensors.safe_open(out, "pt") as file:
        assert file.metadata()["step"] == "20"
        assert json.loads(file.metadata()["config"]) == {"a": 1}
    assert capsys.readouterr().out.startswith(f"{out}: 3 tensors, ")
    assert os.listdir(tmp_path) == [out.name]


def test_an_existing_file_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    with pytest.raises(UserError, match="is there already"):
        main([f"run={run}", f"out={tmp_path}/a"])
    assert (tmp_path / "a").read_text() == "mine"


def test_a_failed_write_leaves_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = consolidate.write_file

    def write_file(path: Path, *rest: Any) -> bytes:
        real(path, *rest)
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(consolidate, "write_file", write_file)
    with pytest.raises(UserError, match=r"out=.* cannot be written: No space left on device; free some space"):
        main([f"run={run}", f"out={tmp_path}/a"])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["step=7"], r"step=7: run=.* has checkpoints of steps 20"),
        (["out=/nowhere/at/all"], "out=/nowhere/at/all: there is no directory /nowhere/at; make it or"),
        (["to=b"], "to: no such key; there are run, out, step"),
    ],
)
def test_what_cannot_be_done_is_one_line(run: Path, tmp_path: Path, words: list[str], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint) as error:
        main([f"run={run}", *([] if words[0].startswith("out") else [f"out={tmp_path}/a"]), *words])
    assert "\n" not in str(error.value)


def test_a_damaged_checkpoint_leaves_no_file(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "checkpoints" / "step-00000020"
    copy.mkdir(parents=True)
    for path in (run / "checkpoints" / "step-00000020").iterdir():
        data = bytearray(path.read_bytes())
        if path.name == "00001.safetensors":
            data[-1] ^= 1
        (copy / path.name).write_bytes(bytes(data))
    with pytest.raises(UserError, match=r"00001\.safetensors is damaged"):
        main([f"run={tmp_path}", f"out={tmp_path}/a"])
    assert os.listdir(tmp_path) == ["checkpoints"]


def test_a_checkpoint_without_settings_is_of_another_version(tmp_path: Path) -> None:
    save_tensors(tmp_path / "checkpoints", 20, TENSORS)
    with pytest.raises(UserError, match="lacks config: it is of another version"):
        main([f"run={tmp_path}", f"out={tmp_path}/a"])


def test_help_lists_every_key(capsys: pytest.CaptureFixture) -> None:
    assert main(["--help"]) == 0
    output = capsys.readouterr().out
    assert all(f"  {key} " in output for key in ("run", "out", "step"))
