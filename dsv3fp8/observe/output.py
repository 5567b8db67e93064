"""Where a command writes its files, checked before any work starts, and a table as its pages have it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from dsv3fp8.errors import UserError


def writable_directory(out: str | Path, *names: str) -> Path:
    """The directory `out`, made if need be, in which files of these names can be written. Raises UserError, naming the key."""
    directory = Path(out).expanduser()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name in names:
            path = directory / name
            existed = path.exists()
            path.open("a").close()
            if not existed:
                path.unlink()
    except OSError as error:
        raise UserError(f"out={directory}: {error.strerror}; give a directory that can be written to") from error
    return directory


def pipe_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; the first column is text, the others are aligned right."""
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)])
