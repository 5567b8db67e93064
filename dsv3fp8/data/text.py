"""From bytes on disk to text: decompression, UTF-8 and line ends, in pieces, so that no file has to fit in memory.

Nothing is ever decoded with replacement characters: a file that is not UTF-8 is refused with the offset of the first
bad byte, because a corpus that was read wrong trains just as smoothly as one that was read right.
"""

import bz2
import contextlib
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from dsv3fp8.errors import UserError

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
BLOCK = 4 << 20  # bytes read, and characters handed on, at a time

_UTF8_BOM = b"\xef\xbb\xbf"
# UTF-32 first: its little-endian mark begins with UTF-16's.
_FOREIGN_BOMS = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}


_OPENERS: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


class BrokenText(UserError):
    """A file that is not UTF-8."""


@contextlib.contextmanager
def open_binary(path: Path) -> Iterator[BinaryIO]:
    """The file's bytes, decompressed by suffix. Raises UserError, naming the file, if it is unreadable or cut short."""
    suffix = path.suffix.lower()
    try:
        if suffix in _OPENERS:
            with _OPENERS[suffix](path) as stream:
                yield stream
        elif suffix == ".zst":
            import pyarrow

            # Unlike the zstandard package's reader this one notices a stream that was cut short.
            with (
                pyarrow.CompressedInputStream(str(path), "zstd") as stream,
                io.BufferedReader(stream, BLOCK) as buffered,
            ):
                yield cast(BinaryIO, buffered)
        else:
            with path.open("rb") as plain:
                yield plain
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        kind = f"a {suffix} file" if suffix in COMPRESSIONS else "a file"
        raise UserError(f"{path}: cannot be read as {kind} ({error}); restore it or leave it out") from error


def strip_bom(head: bytes, path: Path) -> bytes:
    """The first bytes of a file without a UTF-8 byte order mark. Raises BrokenText for a mark of another encoding."""
    for mark, encoding in _FOREIGN_BOMS.items():
        if head.startswith(mark):
            raise BrokenText(f"{path}: is {encoding} (its first bytes are {mark.hex(' ')}); convert it to UTF-8")
    return head.removeprefix(_UTF8_BOM)


def broken_text(path: Path, offset: int, error: UnicodeDecodeError) -> BrokenText:
    """The complaint about a bad byte `error.start` bytes after `offset`."""
    at, value = offset + error.start, error.object[error.start]
    where = "of the decompressed text" if path.suffix.lower() in COMPRESSIONS else "of the file"
    return BrokenText(f"{path}: byte 0x{value:02x} at offset {at} {where} is not UTF-8; convert the file or leave it out")


def read_text(path: Path) -> Iterator[str]:
    """The text of a file in pieces (see `cut`), without a byte order mark and with `\\r\\n` as `\\n`."""
    yield from cut(_decoded(path))


def _decoded(path: Path) -> Iterator[str]:
    with open_binary(path) as stream:
        block = stream.read(BLOCK)
        held = strip_bom(block, path)
        offset = len(block) - len(held)
        while block:
            block = stream.read(BLOCK)
            text, rest = _decode(held, path, offset, final=not block)
            if block and text.endswith("\r"):  # its \n may begin the next block
                text, rest = text[:-1], b"\r" + rest
            yield text.replace("\r\n", "\n")
            offset += len(held) - len(rest)
            held = rest + block


def _decode(data: bytes, path: Path, offset: int, final: bool) -> tuple[str, bytes]:
    """The text, and the bytes of a character that the end of the block cut in two."""
    try:
        return data.decode(), b""
    except UnicodeDecodeError as error:
        if final or error.reason != "unexpected end of data":
            raise broken_text(path, offset, error) from None
        return data[: error.start].decode(), data[error.start :]


def cut(blocks: Iterable[str], size: int = BLOCK) -> Iterator[str]:
    """The same text in pieces of about `size` characters; the first has something beside white space if any has.

    Pieces end behind a line end with a visible character on both sides: there the usual pre-tokenizers split anyway,
    so that tokenizing the pieces one by one gives the tokens of the whole. Only text without such a line in four
    times the size is cut elsewhere.
    """
    held = ""
    for block in blocks:
        held += block
        while len(held) >= size and not held.isspace():
            at = _seam(held, size)
            if at == 0 and len(held) < 4 * size:
                break
            yield held[: at or len(held)]
            held = held[at or len(held) :]
    if held:
        yield held


def _seam(text: str, size: int) -> int:
    """Where to cut, or 0. At most `size` characters are searched, from the end."""
    at = len(text) - 1
    while (at := text.rfind("\n", max(1, len(text) - size), at)) > 0:
        if not text[at - 1].isspace() and not text[at + 1].isspace():
            return at + 1
    return 0
