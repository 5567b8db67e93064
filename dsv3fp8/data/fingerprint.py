"""What a file holds, as a hash, and other facts that take a whole pass over it.

A corpus is known by its contents, not by its names or dates. Hashing tens of gigabytes at every start would take
longer than the start itself, so facts about large files are remembered for as long as size, date and inode stay.
"""

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsv3fp8.data.cache import write_atomically
from dsv3fp8.data.text import BLOCK
from dsv3fp8.errors import UserError

REMEMBER_FROM = 64 << 20  # bytes; smaller files are always read
# A file changed again within the clock's resolution would keep its date: do not trust a date this fresh.
SETTLED = 2.0  # seconds


class Memory:
    """Facts about large files, kept in `cache_dir` between runs."""

    def __init__(self, cache_dir: Path) -> None:
        self._path = cache_dir / "files.json"

    def recall(self, path: Path, fact: str, find: Callable[[Path], Any]) -> Any:
        """`find(path)`, or what it returned last time (a JSON value) if the file has not been touched since."""
        status = path.stat()
        if status.st_size < REMEMBER_FROM:
            return find(path)
        name = f"{fact} of {path.resolve()}"
        stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        known = self._load().get(name)
        if known and known["stamp"] == stamp:
            return known["value"]
        value = find(path)
        if time.time() - max(status.st_mtime, status.st_ctime) > SETTLED:
            # Two runs at once may lose each other's entry: it is found again next time.
            write_atomically(self._path, json.dumps({**self._load(), name: {"stamp": stamp, "value": value}}))
        return value

    def _load(self) -> dict[str, Any]:
        try:
            return json.loads(self._path.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}


def sha256_of_file(path: Path) -> str:
    """The SHA-256 of the file as it is on disk. Raises UserError if it cannot be read."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as stream:
            while block := stream.read(BLOCK):
                digest.update(block)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); mend its permissions or leave it out") from error
    return digest.hexdigest()


def sha256_of(value: object) -> str:
    """The SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
