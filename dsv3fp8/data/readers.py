"""One reader per file format. Each yields the documents of a file as pieces of text.

A .txt file is one document; a line of a .jsonl file and a row of a .parquet file are one each. White-space lines of a
.jsonl file are skipped. Everything else that is not a record with text is refused by line or row number.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from dsv3fp8.data.text import COMPRESSIONS, broken_text, cut, open_binary, read_text, strip_bom
from dsv3fp8.errors import UserError

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
LINES_SUFFIXES = (".jsonl", ".ndjson")
ROWS = 256  # of a Parquet file at a time


class Piece(NamedTuple):
    """A stretch of one document. Documents come whole and one after another."""

    text: str
    last: bool  # the document ends with this piece
    file: int = 0  # which of the source's files it is from


def read_file(path: Path, text_key: str) -> Iterator[Piece]:
    """The documents of one file, read by its suffix. Raises UserError for a format that is not known."""
    kind = format_of(path)
    if kind in TEXT_SUFFIXES:
        yield from as_pieces(read_text(path))
    elif kind in LINES_SUFFIXES:
        yield from _read_lines(path, text_key)
    else:
        yield from _read_rows(path, text_key)


def format_of(path: Path) -> str:
    """The suffix that says how to read a file, behind the one of its compression. Raises UserError if none does."""
    inner = path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path
    kind = inner.suffix.lower()
    if kind == ".json":
        raise UserError(f"{path}: .json holds one value, not one record a line; rewrite it as .jsonl")
    if kind in (".bin", ".npy"):
        raise UserError(f"{path}: holds ids, not text; take data=memmap")
    if kind not in (*TEXT_SUFFIXES, *LINES_SUFFIXES, ".parquet"):
        known = " ".join((*TEXT_SUFFIXES, *LINES_SUFFIXES, ".parquet"))
        raise UserError(f"{path}: its format is not known by the suffix '{kind}'; rename it to one of {known}")
    return kind


def as_pieces(texts: Iterator[str]) -> Iterator[Piece]:
    """One document from its stretches of text."""
    held = next(texts, "")
    for text in texts:
        yield Piece(held, last=False)
        held = text
    yield Piece(held, last=True)


def as_document(text: object, where: str) -> Iterator[Piece]:
    """One document from the value of a record. Raises UserError, beginning with `where`, if it is not text."""
    if not isinstance(text, str):
        kind = "null" if text is None else type(text).__name__
        raise UserError(f"{where} is {kind}, not text; mend the record, or name the right key with data.text_key")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        bad = f"\\u{ord(text[error.start]):04x}"
        raise UserError(f"{where} has half of a surrogate pair, {bad}, at character {error.start}; mend the record") from None
    yield from as_pieces(cut([text]))


def _read_lines(path: Path, text_key: str) -> Iterator[Piece]:
    with open_binary(path) as stream:
        offset = 0
        # A file iterates by \n alone; str.splitlines would also break at U+2028 inside a string.
        for number, line in enumerate(stream, start=1):
            data = strip_bom(line, path) if number == 1 else line
            start = offset + len(line) - len(data)
            offset += len(line)
            try:
                text = data.decode()
            except UnicodeDecodeError as error:
                raise broken_text(path, start, error) from None
            if text.strip():
                yield from as_document(
                    _parse(text.rstrip("\r\n"), path, number, text_key), f"{path}: line {number}: {text_key!r}"
                )


def _parse(line: str, path: Path, number: int, text_key: str) -> object:
    where = f"{path}: line {number}"
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:  # its own message counts lines from this one
        raise UserError(f"{where} is not valid JSON ({error.msg}, column {error.colno}); mend or remove the line") from None
    except (ValueError, RecursionError) as error:  # numbers or nesting without end
        raise UserError(f"{where} is not valid JSON ({error}); mend or remove the line") from None
    if not isinstance(record, dict):
        raise UserError(
            f"{where} is a JSON {_JSON_NAMES[type(record)]}, not an object with {text_key!r}; write one object a line"
        )
    if text_key not in record:
        keys = ", ".join(map(repr, list(record)[:8])) or "no key"
        raise UserError(f"{where} has no key {text_key!r} (it has {keys}); mend the line, or set data.text_key")
    return record[text_key]


_JSON_NAMES = {list: "array", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}


def _read_rows(path: Path, text_key: str) -> Iterator[Piece]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    with open_binary(path) as stream, tempfile.TemporaryFile() as unpacked:
        try:
            table = ParquetFile(_seekable(path, stream, unpacked))
            if text_key not in table.schema_arrow.names:
                names = ", ".join(table.schema_arrow.names[:8])
                raise UserError(f"{path}: has no column {text_key!r} (it has {names}); set data.text_key")
            row = 0
            for batch in table.iter_batches(ROWS, columns=[text_key]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    yield from as_document(text, f"{path}: row {row}: {text_key!r}")
        except (pyarrow.ArrowException, UnicodeDecodeError) as error:
            raise UserError(f"{path}: cannot be read as Parquet ({error}); write it anew or leave it out") from error


def _seekable(path: Path, stream: IO[bytes], unpacked: IO[bytes]) -> IO[bytes]:
    """Parquet is read from its end: a compressed file has to be unpacked first."""
    if path.suffix.lower() not in COMPRESSIONS:
        return stream
    shutil.copyfileobj(stream, unpacked)
    unpacked.seek(0)
    return unpacked
