"""Where text comes from: the interpreter's own source files, or files of the user's. Hugging Face has its own module.

A source lists its files first and reads documents afterwards, so that a tokenized copy can be found without reading.
"""

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from dsv3fp8.data.config import DataConfig, path_list
from dsv3fp8.data.fingerprint import Memory, sha256_of, sha256_of_file
from dsv3fp8.data.paths import expand, walk
from dsv3fp8.data.readers import Piece, as_pieces, format_of, read_file
from dsv3fp8.data.text import BrokenText, read_text
from dsv3fp8.errors import UserError

# Other people's packages, and compiled copies.
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__"})
_NOT_PACKAGES = frozenset({"__pycache__"})


@dataclass
class SourceFile:
    """A file of a corpus."""

    name: str  # as a person would look for it
    bytes: int  # on disk
    sha256: str  # of the bytes on disk


class Source(Protocol):
    """Documents in a fixed order."""

    key: str  # of the config, for complaints
    name: str
    files: list[SourceFile]
    identity: str  # changes whenever the documents might
    unreadable: list[str]  # names of files that were passed over; filled while reading

    def read(self) -> Iterator[Piece]:
        """All documents, in order. Raises UserError for what cannot be read."""
        ...


@dataclass
class PythonSource:
    """The .py files that came with the running interpreter: some 30 MB of real text, without a download.

    All of the standard library is taken, its tests and its tools too (they are half of it); `site_packages` adds the
    packages installed beside it. A few files of the test suite are not UTF-8 on purpose: they are passed over.
    """

    key: str
    name: str
    files: list[SourceFile]
    identity: str
    paths: list[Path]
    unreadable: list[str] = field(default_factory=list)

    @classmethod
    def find(cls, config: DataConfig, memory: Memory) -> "PythonSource":
        """Look for the files. Raises UserError where the interpreter comes without any."""
        roots = [("", Path(sysconfig.get_path("stdlib")), _NOT_STDLIB)]
        if config.site_packages:
            folders = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
            roots += [("site-packages/", Path(folder), _NOT_PACKAGES) for folder in folders]
        found = [(prefix, root, path) for prefix, root, skip in roots for path in walk(root, ".py", skip)]
        if not found:
            raise UserError(f"data.source=python: no .py file below {roots[0][1]}; take data=files with text of your own")
        files = [_describe(path, prefix + path.relative_to(root).as_posix(), memory) for prefix, root, path in found]
        name = f"Python {sysconfig.get_python_version()} standard library"
        return cls(
            key="data.source=python",
            name=name + (" and site-packages" if config.site_packages else ""),
            files=files,
            identity=_identity(files, ["python"] * len(files)),
            paths=[path for _, _, path in found],
        )

    def read(self) -> Iterator[Piece]:
        """One document a file."""
        self.unreadable = []
        for index, path in enumerate(self.paths):
            try:
                pieces = list(as_pieces(read_text(path)))
            except BrokenText:
                self.unreadable.append(self.files[index].name)
                continue
            yield from (piece._replace(file=index) for piece in pieces)


@dataclass
class FileSource:
    """Text, JSON lines and Parquet files of the user's, plain or compressed."""

    key: str
    name: str
    files: list[SourceFile]
    identity: str
    paths: list[Path]
    text_key: str
    unreadable: list[str] = field(default_factory=list)

    @classmethod
    def find(cls, config: DataConfig, memory: Memory, key: str = "paths") -> "FileSource":
        """Expand the patterns of `data.<key>`. Raises UserError for those that name no file of a known format."""
        patterns = path_list(getattr(config, key))
        paths = expand(patterns, f"data.{key}")
        formats = [format_of(path) for path in paths]
        files = [_describe(path, str(path), memory) for path in paths]
        return cls(
            key=f"data.{key}",
            name=" ".join(patterns),
            files=files,
            # A .txt, a .jsonl and a .gz of the same bytes are different documents; names and folders do not matter.
            identity=_identity(files, [kind + path.suffix.lower() for kind, path in zip(formats, paths, strict=True)])
            + f"/{config.text_key}",
            paths=paths,
            text_key=config.text_key,
        )

    def read(self) -> Iterator[Piece]:
        """The documents of every file in turn."""
        for index, path in enumerate(self.paths):
            yield from (piece._replace(file=index) for piece in read_file(path, self.text_key))


def _describe(path: Path, name: str, memory: Memory) -> SourceFile:
    try:
        return SourceFile(name, path.stat().st_size, memory.recall(path, "sha256", sha256_of_file))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); restore it or leave it out") from error


def _identity(files: list[SourceFile], formats: list[str]) -> str:
    return sha256_of([[kind, file.sha256] for kind, file in zip(formats, files, strict=True)])
