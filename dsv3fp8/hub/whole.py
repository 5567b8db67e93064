"""A directory that is there whole or not at all."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from dsv3fp8.errors import UserError
from dsv3fp8.training.checkpoint_directory import flush, in_gb

TEMPORARY = ".writing-"
# Room for the small files beside the tensors.
SPARE_BYTES = 16 << 20


def check_new(key: str, path: Path, needed: int) -> None:
    """Raise UserError unless `path` is free, or an empty directory, and its disk has room for `needed` bytes."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{key}={path} is there already: name a new directory, or remove that one")
    above = path.absolute().parent
    try:
        above.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(above).free
    except OSError as error:
        raise UserError(f"{key}={path} cannot be made: {error.strerror}; name a directory that can be written to") from error
    if free < needed + SPARE_BYTES:
        raise UserError(
            f"{key}={path} needs {in_words(needed + SPARE_BYTES)}, and {above} has {in_words(free)} free: free some space or "
            "name a directory on another disk"
        )


@contextlib.contextmanager
def new_directory(key: str, path: Path) -> Iterator[Path]:
    """A directory to write into, which becomes `path` when the block is left; after an error nothing of it stays.

    Raises UserError, naming `key`, for what the system refuses.
    """
    temporary = path.absolute().parent / f"{TEMPORARY}{path.name}"
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
        temporary.mkdir()
        yield temporary
        for each in [*temporary.rglob("*"), temporary]:
            flush(each)
        temporary.rename(path)
        flush(temporary.parent)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"{key}={path} cannot be written: {reason}; free some space or name another directory") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def in_words(size: int) -> str:
    """A number of bytes as a person reads it."""
    return in_gb(size) if size >= 1e8 else f"{size / 1e6:.3g} MB"
