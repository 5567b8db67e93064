"""Checkpoints written while training goes on: what is in them, what is left when they fail, and what waits for what."""

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save_tensors

from dsv3fp8.errors import UserError
from dsv3fp8.training import checkpoint_directory, checkpoint_saver
from dsv3fp8.training.checkpoint import Checkpoint
from dsv3fp8.training.checkpoint_directory import list_checkpoints
from dsv3fp8.training.checkpoint_saver import Saver, write_checkpoint


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def steps(directory: Path) -> list[int]:
    return [step for step, _ in list_checkpoints(directory)]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While it is not set, files are not written."""
    event, real = threading.Event(), checkpoint_saver.write_file

    def write_file(*arguments: Any) -> bytes:
        assert event.wait(60)
        return real(*arguments)

    monkeypatch.setattr(checkpoint_saver, "write_file", write_file)
    yield event
    event.set()


def test_training_goes_on_while_the_snapshot_is_written_and_is_not_in_it(tmp_path: Path, gate: threading.Event) -> None:
    tensors, state = {"model.w": torch.arange(1000.0), "first.w": torch.ones(3)}, {"step": 1, "data": {"consumed": 4}}
    saver = Saver(tmp_path, 1, tensors)
    saver.save(1, tensors, state, {})
    for tensor in tensors.values():
        tensor.fill_(-1)
    state["data"]["consumed"] = 5
    assert steps(tmp_path) == []
    gate.set()
    saver.wait()
    written = Checkpoint(tmp_path / "step-00000001")
    assert torch.equal(written.read("model.w"), torch.arange(1000.0))
    assert torch.equal(written.read("first.w"), torch.ones(3))
    assert written.state["data"] == {"consumed": 4}


def test_the_next_save_waits_for_the_last(tmp_path: Path, gate: threading.Event) -> None:
    tensors = {"model.w": torch.zeros(5)}
    saver = Saver(tmp_path, 2, tensors)
    saver.save(1, tensors, {"step": 1}, {})
    tensors["model.w"].fill_(2)
    second = threading.Thread(target=saver.save, args=(2, tensors, {"step": 2}, {}))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    gate.set()
    second.join(60)
    saver.wait()
    read = [Checkpoint(path).read("model.w") for _, path in list_checkpoints(tmp_path)]
    assert [float(each[0]) for each in read] == [0, 2]


def test_an_old_checkpoint_goes_only_after_the_new_one_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K11: keep=1 must have no moment without a whole checkpoint."""
    tensors = {"model.w": torch.zeros(5)}
    save_tensors(tmp_path, 1, tensors)
    seen = []
    real = checkpoint_directory.flush

    def spy(directory: Path) -> None:
        seen.append((steps(tmp_path), sorted(path.name for path in directory.iterdir() if path.is_file())))
        real(directory)

    monkeypatch.setattr(checkpoint_directory, "flush", spy)
    save_tensors(tmp_path, 2, tensors)
    assert seen == [([1], ["00000.safetensors", "index.json"]), ([1, 2], [])]
    assert steps(tmp_path) == [2]


LIMITED = """
import resource, sys, torch
from pathlib import Path
from dsv3fp8.errors import UserError
from dsv3fp8.training.checkpoint_saver import Saver, write_checkpoint
directory, tensors = Path(sys.argv[1]), {"model.w": torch.zeros(1 << 20)}
saver = Saver(directory, 1, tensors)
saver.save(1, tensors, {"step": 1}, {})
saver.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
saver.save(2, tensors, {}, {})
print("goes on")
try:
    saver.save(3, tensors, {}, {})
except UserError as error:
    print(error)
"""


def test_a_write_that_fails_is_told_at_the_next_save_and_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    """K10: a 4 MB tensor under a file size limit of 1 MB."""
    done = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    first, line = done.stdout.splitlines()
    assert first == "goes on"
    assert line.startswith("cannot write checkpoint step-00000002/00000.safetensors")
    assert "the checkpoint of step 1 is kept" in line
    assert names(tmp_path) == ["step-00000001"]
    assert Checkpoint(tmp_path / "step-00000001").read("model.w").shape == (1 << 20,)


@pytest.mark.parametrize("where", ["00000.safetensors", "index.json"])
def test_a_full_disk_is_named_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """K10: when the file is flushed, as on file systems that allocate late."""
    real = os.fsync

    def fsync(file: int) -> None:
        if os.readlink(f"/proc/self/fd/{file}").endswith(where):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    saver = Saver(tmp_path, 1, {"model.w": torch.zeros(5)})
    saver.save(1, {"model.w": torch.zeros(5)}, {}, {})
    with pytest.raises(UserError, match=rf"step-00000001/{where} .*No space left on device.*no earlier checkpoint exists"):
        saver.wait()
    assert names(tmp_path) == []
    saver.wait()  # it is told once


def test_the_end_of_a_failing_run_waits_and_says_nothing_more(tmp_path: Path, gate: threading.Event) -> None:
    tensors = {"model.w": torch.zeros(5)}
    saver = Saver(tmp_path, 1, tensors)
    saver.save(1, tensors, {"step": 1}, {})
    threading.Timer(0.1, gate.set).start()
    saver.close()
    assert steps(tmp_path) == [1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_tensor_that_is_not_finite_is_never_saved(tmp_path: Path, bad: float) -> None:
    """O07: the first of them is named, and the checkpoint before stays."""
    tensors = {"model.count": torch.arange(3), "model.w": torch.zeros(5), "second.w": torch.zeros(5).bfloat16()}
    saver = Saver(tmp_path, 1, tensors)
    saver.save(1, tensors, {"step": 1}, {})
    tensors["second.w"][3] = bad
    with pytest.raises(UserError, match=r"^second\.w is not finite after step 3, so no checkpoint is written"):
        saver.save(3, tensors, {}, {})
    tensors["model.w"][1] = bad
    with pytest.raises(UserError, match=r"^model\.w is not finite"):
        saver.save(3, tensors, {}, {})
    assert names(tmp_path) == ["step-00000001"]


def test_the_size_of_a_file_is_known_beforehand(tmp_path: Path) -> None:
    tensors = {"model.w": torch.zeros(500, 400), "first.w": torch.zeros(500, 400).bfloat16(), "model.steps": torch.tensor(3)}
    saver = Saver(tmp_path, 1, tensors)
    saver.save(1, tensors, {"step": 1}, {})
    saver.wait()
    assert saver.share_bytes == 500 * 400 * 6 + 8
    assert 0 < (tmp_path / "step-00000001" / "00000.safetensors").stat().st_size - saver.share_bytes < 2_000


def test_tensors_made_one_at_a_time_give_the_files_of_a_save(tmp_path: Path) -> None:
    """Byte for byte, but for the generators, of which there are none yet."""
    tensors = {
        "model.w": torch.arange(6.0).view(2, 3),
        "model.b": torch.ones(3),
        "first.w": torch.zeros(2, 3, dtype=torch.bfloat16),
    }
    state = {"step": 0, "config": {"a": 1}}
    saver = Saver(tmp_path / "saved", 1, tensors)
    saver.save(0, tensors, state, {})
    saver.wait()
    layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    write_checkpoint(tmp_path / "written", 0, layout, lambda name: tensors[name].clone(), state)
    saved, written = (sorted((tmp_path / name / "step-00000000").iterdir()) for name in ("saved", "written"))
    assert [path.name for path in saved] == [path.name for path in written] == ["00000.safetensors", "index.json"]
    assert all(one.read_bytes() == other.read_bytes() for one, other in zip(saved, written, strict=True))


def test_a_file_that_the_first_rank_cannot_see_makes_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where hosts have a run_dir each, of the same name."""
    real = checkpoint_saver._write_parts

    def write_parts(path: Path, *rest: Any) -> tuple[int, int]:
        written = real(path, *rest)
        path.unlink()
        return written

    monkeypatch.setattr(checkpoint_saver, "_write_parts", write_parts)
    with pytest.raises(UserError, match=r"00000\.safetensors .*is run_dir= on a disk that all hosts share\?"):
        save_tensors(tmp_path, 1, {"model.w": torch.zeros(5)})
    assert names(tmp_path) == []
