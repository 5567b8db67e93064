"""Which checkpoints there are, which go, and whether there is room."""

import resource
from pathlib import Path

import pytest
import torch
from checkpoints import save_tensors

from dsv3fp8.errors import UserError
from dsv3fp8.training.checkpoint_directory import check_file_size, check_space, list_checkpoints, remove_unfinished

TENSORS = {"model.w": torch.arange(10.0)}


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_the_newest_two_stay_by_step_number_and_stray_files_are_ignored(tmp_path: Path) -> None:
    """K11: a string sort would delete step 1000 as the smallest; step-foo is nobody's checkpoint."""
    (tmp_path / "step-foo").mkdir()
    (tmp_path / "step-00000001").write_text("a file, not a checkpoint")
    (tmp_path / "step-900").mkdir()  # without padding: order must not hang on it
    for step in (950, 1000):
        save_tensors(tmp_path, step, TENSORS, keep=2)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [950, 1000]
    assert names(tmp_path) == ["step-00000001", "step-00000950", "step-00001000", "step-foo"]


def test_what_a_killed_process_left_is_no_checkpoint_and_is_removed(tmp_path: Path) -> None:
    save_tensors(tmp_path, 5, TENSORS, keep=2)
    half = tmp_path / ".writing-step-00000010"
    half.mkdir()
    (half / "00000.safetensors").write_bytes(b"half")
    assert [step for step, _ in list_checkpoints(tmp_path)] == [5]
    remove_unfinished(tmp_path)
    assert names(tmp_path) == ["step-00000005"]


def test_too_little_space_is_found_before_the_run_starts(tmp_path: Path) -> None:
    """K10."""
    check_space(tmp_path, needed=1000, keep=2)
    with pytest.raises(UserError, match=r"training\.keep=2 to fewer"):
        check_space(tmp_path, needed=1 << 60, keep=2)


def test_a_file_size_limit_is_found_before_the_run_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K10."""
    check_file_size(tmp_path, largest=1 << 60)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 20, 1 << 20))
    check_file_size(tmp_path, largest=1_000_000)
    with pytest.raises(UserError, match=r"at most 0\.00105 GB \(ulimit -f\).*needs 0\.002 GB"):
        check_file_size(tmp_path, largest=2_000_000)
