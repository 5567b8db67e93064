"""A directory of finished work: an entry is there whole or not at all, whoever else is writing or dies halfway."""

import contextlib
import errno
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from dsv3fp8.errors import UserError

TEMPORARY = ".tmp-"
ABANDONED = 24 * 3600.0  # seconds after which nobody writes to a temporary entry any more


def default_cache_dir() -> Path:
    """$XDG_CACHE_HOME/dsv3fp8, or ~/.cache/dsv3fp8. Raises UserError where there is no home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsv3fp8"
    except RuntimeError as error:  # a container whose user has no home
        raise UserError("data.cache_dir is not set and there is no home directory to keep a cache in; set it") from error


def finished_entry(cache_dir: Path, name: str, build: Callable[[Path], None], usable: Callable[[Path], bool]) -> Path:
    """The directory `cache_dir/name`, made by `build(temporary directory)` unless a `usable` one is there.

    The temporary directory is renamed when it is complete and on disk. If another process was faster, its entry,
    made from the same inputs, is taken. Raises UserError if the cache cannot be written.
    """
    entry = cache_dir / name
    if entry.is_dir() and usable(entry):
        return entry
    with _explained(cache_dir):
        cache_dir.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(cache_dir)
        temporary = Path(tempfile.mkdtemp(prefix=f"{TEMPORARY}{name}-", dir=cache_dir))
        try:
            build(temporary)
            for file in temporary.iterdir():
                _sync(file)
            if entry.exists() and not usable(entry):  # damaged, or left by a power cut
                shutil.rmtree(entry)
            with contextlib.suppress(FileExistsError), _taken_is_exists():
                temporary.rename(entry)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return entry


def write_atomically(path: Path, text: str) -> None:
    """Write a small file so that a reader sees the old text or the new. Raises UserError if it cannot be written."""
    with _explained(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=TEMPORARY, dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(text)
            os.chmod(temporary, 0o666 & ~_umask())  # mkstemp makes it the owner's alone
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise


def _umask() -> int:
    """The process's mask for new files; it can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


@contextlib.contextmanager
def _taken_is_exists() -> Iterator[None]:
    """Systems differ in what they call renaming a directory onto one that is not empty."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:
            raise FileExistsError(*error.args) from error
        raise


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            f"data.cache_dir: cannot write to {folder} ({reason}); free space there or set another directory"
        ) from error


def _sync(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def _remove_abandoned(cache_dir: Path) -> None:
    for left in cache_dir.glob(f"{TEMPORARY}*"):
        with contextlib.suppress(FileNotFoundError):  # another process may be removing it too
            if time.time() - left.stat().st_mtime > ABANDONED:
                shutil.rmtree(left) if left.is_dir() else left.unlink()
