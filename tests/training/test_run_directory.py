"""The lock, whole-file writes and the record of the machine."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dsv3fp8.errors import UserError
from dsv3fp8.training.run_directory import RunDirectory, source_commit, write_atomically

HOLDER = """
import sys, time
from pathlib import Path
from dsv3fp8.training.run_directory import RunDirectory
with RunDirectory(Path(sys.argv[1])):
    if sys.argv[2] == "fork":
        import os
        if os.fork() == 0:
            time.sleep(60)
    print("held", flush=True)
    time.sleep(60)
"""


def holder(path: Path, how: str = "") -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), how], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_process_is_refused_and_a_dead_holder_leaves_no_stale_lock(tmp_path: Path) -> None:
    """H08: two launches at once. The holder is killed while a child of it, like a data worker, lives on."""
    process = holder(tmp_path / "run", "fork")
    try:
        with pytest.raises(UserError, match=f"is in use by process {process.pid} on "), RunDirectory(tmp_path / "run"):
            pass
        process.kill()
        process.wait()
        with RunDirectory(tmp_path / "run"):
            assert f"process {os.getpid()} on" in (tmp_path / "run" / "lock").read_text()
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def test_a_run_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match=r"run_dir=.*file/run cannot be written: Not a directory"),
        RunDirectory(tmp_path / "file" / "run"),
    ):
        pass


def test_a_failed_write_keeps_what_was_there_and_removes_its_own_file(tmp_path: Path) -> None:
    path = tmp_path / "corpus.json"
    write_atomically(path, "old")
    write_atomically(path, "new")
    assert path.read_text() == "new"
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*taken: Is a directory"):
        write_atomically(tmp_path / "taken", "new")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["corpus.json", "taken"]


def test_the_environment_of_every_session_is_kept(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as directory:
        for _ in range(3):
            directory.record_environment(torch.device("cpu"))
    content = json.loads((tmp_path / "environment.json").read_text())
    assert content["packages"]["torch"] == torch.__version__
    assert content["device"].startswith("cpu")
    assert len(content["earlier"]) == 2
    assert "earlier" not in content["earlier"][0]


@pytest.mark.parametrize("content", ['{"started', "[1]", "3"])
def test_an_environment_that_somebody_damaged_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "environment.json").write_text(content)
    with RunDirectory(tmp_path) as directory, pytest.raises(UserError, match=r"environment\.json is not what a run writes"):
        directory.record_environment(torch.device("cpu"))


def test_the_commit_is_of_the_checkout_that_tracks_the_package(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert source_commit(package) is None
    git("init", "-q")
    assert source_commit(package) is None  # inside a checkout, but not of it
    git("add", "package/__init__.py")
    git("commit", "-q", "-m", "first")
    assert source_commit(package) == git("rev-parse", "HEAD")
    (package / "__init__.py").write_text("changed")
    assert source_commit(package) == git("rev-parse", "HEAD") + "-dirty"
