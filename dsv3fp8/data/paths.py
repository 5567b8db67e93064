"""From the paths and globs of a config to a list of files in an order that every machine agrees on."""

import glob
import os
import re
from collections.abc import Iterable
from pathlib import Path

from dsv3fp8.errors import UserError


def natural_key(name: str) -> tuple[list[tuple[int, str]], str]:
    """Sort key that counts: shard_2 before shard_10. Runs of digits compare as numbers, all else by code point."""
    parts = re.split(r"([0-9]+)", name)
    return [(int(part), "") if i % 2 else (-1, part) for i, part in enumerate(parts)], name


def natural_sort(paths: Iterable[Path]) -> list[Path]:
    """Folder by folder in natural order, whatever order the file system lists them in."""
    return sorted(paths, key=lambda path: [natural_key(part) for part in path.parts])


def expand_user(path: str) -> Path:
    """`~/x` in the user's home. Left as it is where there is no such user or home."""
    return Path(os.path.expanduser(path))


def expand(patterns: list[str], key: str) -> list[Path]:
    """Every file the patterns name, each once, in natural order.

    Raises UserError, naming the config `key`, for a pattern that matches nothing and for a directory.
    """
    found: dict[str, Path] = {}
    for pattern in patterns:
        path = expand_user(pattern)
        if path.is_dir():
            raise UserError(f"{key}: {pattern} is a directory; name the files in it, as in {pattern.rstrip('/')}/*.txt")
        # A name that exists is taken as it is, even if it looks like a glob.
        matches = [path] if path.exists() else [Path(each) for each in glob.glob(str(path), recursive=True)]
        files = [match for match in matches if match.is_file()]
        if not files:
            raise UserError(f"{key}: no file matches {pattern} (looked from {os.getcwd()}); correct the path or the glob")
        found.update({os.path.realpath(file): file for file in files})
    return natural_sort(found.values())


def walk(root: Path, suffix: str, skip: frozenset[str]) -> list[Path]:
    """Every file below `root` with the suffix, in natural order, without the folders named in `skip`."""
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skip]
        files += [Path(folder, name) for name in names if name.endswith(suffix)]
    return natural_sort(files)
