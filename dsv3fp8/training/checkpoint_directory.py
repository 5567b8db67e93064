"""The directory of a run's checkpoints: which are whole, which must go, and whether there is room for more.

A checkpoint is a directory ``step-00001000``. It is written under a temporary name, flushed to the disk and renamed, and only
then is an older one deleted: a kill, a full disk or a lost machine leaves the previous checkpoint as it was.
"""

import os
import re
import resource
import shutil
from pathlib import Path

from dsv3fp8.errors import UserError

NAME = re.compile(r"step-(\d+)")
TEMPORARY = ".writing-"
# Room kept for the logs beside the checkpoints.
SPARE_BYTES = 16 << 20


def list_checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """(step, path) of every whole checkpoint, oldest first by step number; whatever else is there is ignored."""
    if not directory.is_dir():
        return []
    found = ((step_of(path), path) for path in directory.iterdir() if path.is_dir())
    return sorted((step, path) for step, path in found if step is not None)


def step_of(path: Path) -> int | None:
    """The step that a checkpoint's name tells; None for another name."""
    match = NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def remove_unfinished(directory: Path) -> None:
    """Delete what a killed process was writing or deleting. Call it only under the run directory's lock."""
    for path in directory.glob(f"{TEMPORARY}*"):
        shutil.rmtree(path)


def places(directory: Path, step: int) -> tuple[Path, Path]:
    """(where a checkpoint is written, where it then stands)."""
    target = directory / f"step-{step:08d}"
    return directory / f"{TEMPORARY}{target.name}", target


def publish(temporary: Path, target: Path) -> None:
    """Give a checkpoint that is written and flushed its name, for good. OSError where that fails."""
    flush(temporary)
    temporary.rename(target)
    flush(target.parent)


def delete_old(directory: Path, keep: int) -> None:
    """Delete all checkpoints but the newest `keep`. OSError where that fails."""
    for _, old in list_checkpoints(directory)[:-keep]:
        # Renamed first: a kill halfway must not leave half a checkpoint under a good name.
        shutil.rmtree(old.rename(directory / f"{TEMPORARY}{old.name}"))


def flush(path: Path) -> None:
    """Make a file, or the names in a directory, survive a lost machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cannot_write(directory: Path, file: str, reason: str) -> str:
    """The line for a checkpoint that could not be written."""
    kept = list_checkpoints(directory)
    previous = f"the checkpoint of step {kept[-1][0]} is kept" if kept else "no earlier checkpoint exists"
    free = shutil.disk_usage(directory).free if directory.is_dir() else 0
    return (
        f"cannot write checkpoint {file} in {directory}: {reason} ({in_gb(free)} free); {previous}: free some space or set "
        "run_dir= or training.keep= and run again"
    )


def check_space(directory: Path, needed: int, keep: int) -> None:
    """Raise UserError unless the file system has room for the checkpoints to come, each of about `needed` bytes.

    One more than `keep` exist for a moment, since an old one goes only after the new one is safe.
    """
    missing = max(1, keep + 1 - len(list_checkpoints(directory))) * needed + SPARE_BYTES
    free = shutil.disk_usage(directory).free
    if free < missing:
        raise UserError(
            f"run_dir={directory.parent} has {in_gb(free)} free, but its checkpoints need {in_gb(missing)} more: free some "
            f"space, set run_dir= to another disk, training.keep={keep} to fewer or optimizer.moments=bf16"
        )


def check_file_size(directory: Path, largest: int) -> None:
    """Raise UserError unless this process may write a file of about so many bytes."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and limit < largest:
        raise UserError(
            f"run_dir={directory.parent}: this process may write files of at most {in_gb(limit)} (ulimit -f), but a "
            f"checkpoint needs {in_gb(largest)}: raise the limit"
        )


def in_gb(size: int) -> str:
    """A number of bytes in GB, however few they are."""
    return f"{size / 1e9:.3g} GB"
