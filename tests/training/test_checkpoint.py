"""What survives a kill, a full disk, another model and a broken file."""

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dsv3fp8.errors import UserError
from dsv3fp8.training import checkpoint
from dsv3fp8.training.checkpoint import (
    canonical_name,
    check_space,
    list_checkpoints,
    load_file,
    load_model,
    model_tensors,
    remove_unfinished,
    save_checkpoint,
)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_the_newest_two_stay_by_step_number_and_stray_files_are_ignored(tmp_path: Path) -> None:
    """K11: a string sort would delete step 1000 as the smallest; step-foo is nobody's checkpoint."""
    (tmp_path / "step-foo").mkdir()
    (tmp_path / "step-00000001").write_text("a file, not a checkpoint")
    (tmp_path / "step-900").mkdir()  # without padding: order must not hang on it
    for step in (950, 1000):
        save_checkpoint(tmp_path, step, {"state": {"step": step}}, keep=2)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [950, 1000]
    assert names(tmp_path) == ["step-00000001", "step-00000950", "step-00001000", "step-foo"]


def test_an_old_checkpoint_goes_only_after_the_new_one_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K11: keep=1 must have no moment without a whole checkpoint."""
    save_checkpoint(tmp_path, 1, {"state": {"step": 1}}, keep=1)
    seen = []
    real = checkpoint._flush_directory

    def spy(directory: Path) -> None:
        seen.append([step for step, _ in list_checkpoints(tmp_path)])
        real(directory)

    monkeypatch.setattr(checkpoint, "_flush_directory", spy)
    save_checkpoint(tmp_path, 2, {"state": {"step": 2}}, keep=1)
    assert seen == [[1], [1, 2]]
    assert [step for step, _ in list_checkpoints(tmp_path)] == [2]


def test_what_a_killed_process_left_is_no_checkpoint_and_is_removed(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 5, {"state": {"step": 5}}, keep=2)
    half = tmp_path / ".writing-step-00000010"
    half.mkdir()
    (half / "model.pt").write_bytes(b"half")
    assert [step for step, _ in list_checkpoints(tmp_path)] == [5]
    remove_unfinished(tmp_path)
    assert names(tmp_path) == ["step-00000005"]


LIMITED = """
import resource, sys, torch
from pathlib import Path
from dsv3fp8.errors import UserError
from dsv3fp8.training.checkpoint import save_checkpoint
directory = Path(sys.argv[1])
save_checkpoint(directory, 1, {"model": {"w": torch.zeros(10)}}, keep=1)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    save_checkpoint(directory, 2, {"state": {"step": 2}, "model": {"w": torch.zeros(1 << 20)}}, keep=1)
except UserError as error:
    print(error)
"""


def test_a_write_that_fails_keeps_the_previous_checkpoint_and_removes_its_own_files(tmp_path: Path) -> None:
    """K10: a 4 MB tensor under a file size limit of 1 MB."""
    done = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    (line,) = done.stdout.splitlines()
    assert line.startswith("cannot write checkpoint step-00000002/model.pt")
    assert "the checkpoint of step 1 is kept" in line
    assert names(tmp_path) == ["step-00000001"]
    assert load_file(tmp_path / "step-00000001", "model")["w"].shape == (10,)


def test_a_full_disk_is_named_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K10."""

    def full(content: Any, file: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(UserError, match=r"No space left on device.*no earlier checkpoint exists"):
        save_checkpoint(tmp_path, 1, {"model": {}}, keep=1)
    assert names(tmp_path) == []


def test_too_little_space_is_found_before_the_run_starts(tmp_path: Path) -> None:
    """K10."""
    check_space(tmp_path, needed=1000, keep=2)
    with pytest.raises(UserError, match=r"training\.keep=2 to fewer"):
        check_space(tmp_path, needed=1 << 60, keep=2)


def test_a_file_size_limit_is_found_before_the_run_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K10."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 20, 1 << 20))
    with pytest.raises(UserError, match=r"at most 0\.00105 GB \(ulimit -f\).*needs 0\.002 GB"):
        check_space(tmp_path, needed=2_000_000, keep=2)


@pytest.mark.parametrize("damage", ["truncated", "empty", "missing", "code"])
def test_a_damaged_file_is_one_line_with_its_name(tmp_path: Path, damage: str) -> None:
    target = save_checkpoint(tmp_path, 1, {"model": {"w": torch.arange(1000)}}, keep=1)
    path = target / "model.pt"
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:2000])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "missing":
        path.unlink()
    else:
        torch.save({"w": subprocess.Popen}, path)
    with pytest.raises(UserError, match=r"model\.pt.*delete") as error:
        load_file(target, "model")
    assert "\n" not in str(error.value)
    assert "weights_only" not in str(error.value)  # torch's advice to load it without: it would run what the file holds


class Layered(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.block = nn.Linear(width, width)
        self.register_buffer("bias", torch.full((3,), 0.51))


def test_wrappers_leave_no_trace_in_the_names_and_fp32_buffers_stay_fp32(tmp_path: Path) -> None:
    """K03: torch.compile on when saving, off when loading, and the other way round."""
    plain, wrapped = Layered(), Layered()
    wrapped.block = torch.compile(wrapped.block)  # type: ignore[assignment]
    assert "block._orig_mod.weight" in wrapped.state_dict()
    target = save_checkpoint(tmp_path, 1, {"model": model_tensors(wrapped)}, keep=1)
    saved = load_file(target, "model")
    assert list(saved) == ["bias", "block.weight", "block.bias"]
    assert saved["bias"].dtype is torch.float32
    load_model(plain, saved, target)
    assert torch.equal(plain.block.weight, wrapped.block.weight)
    with torch.no_grad():
        plain.block.weight.fill_(7.0)
    load_model(wrapped, model_tensors(plain), target)
    assert torch.equal(wrapped.block.weight, plain.block.weight)


def test_recomputation_wrappers_leave_no_trace_in_the_names() -> None:
    """K03: what torch.compile and activation checkpointing put into a name, alone and one inside the other."""
    assert canonical_name("blocks.0._checkpoint_wrapped_module._orig_mod.weight") == "blocks.0.weight"
    assert canonical_name("_orig_mod.blocks.0.attention.weight") == "blocks.0.attention.weight"
    assert canonical_name("blocks.0.module_list.weight") == "blocks.0.module_list.weight"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda saved: saved.pop("block.bias"), "it lacks block.bias"),
        (lambda saved: saved.update(extra=torch.zeros(1)), "it has extra, which this model has not"),
        (lambda saved: saved.update(bias=torch.zeros(5)), r"bias is \(5,\) float32 there and \(3,\) float32 here"),
        (lambda saved: saved.update(bias=torch.zeros(3).bfloat16()), r"bias is \(3,\) bfloat16 there"),
    ],
)
def test_a_checkpoint_of_another_model_loads_nothing(change: Any, complaint: str) -> None:
    """K04: no random weight may be left behind without a word."""
    model = Layered()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    saved = {name: torch.zeros_like(tensor) for name, tensor in model_tensors(model).items()}
    change(saved)
    with pytest.raises(UserError, match=f"another model: {complaint}"):
        load_model(model, saved, Path("step-00000001"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_every_tensor_of_a_loaded_model_is_the_saved_one(tmp_path: Path) -> None:
    """K04: counts the tensors whose value changed: all of them."""
    torch.manual_seed(0)
    saved = {name: torch.rand_like(tensor) for name, tensor in model_tensors(Layered()).items()}
    target = save_checkpoint(tmp_path, 1, {"model": saved}, keep=1)
    model = Layered()
    load_model(model, load_file(target, "model"), target)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())
