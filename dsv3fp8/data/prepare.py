"""From the documents of a source to two files of ids: read once to choose what is held out, and once to tokenize.

The first reading also finds everything that is wrong with the files, before any work starts.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dsv3fp8.data.readers import Piece
from dsv3fp8.data.sources import Source
from dsv3fp8.data.split import FILES_TO_HOLD_OUT, hash64, hold_out
from dsv3fp8.data.store import TokenWriter
from dsv3fp8.data.tokenizer import Tokenizer
from dsv3fp8.errors import UserError

GROUP = 4 << 20  # characters tokenized in one call: enough to use every core, little enough to stay small


@dataclass
class Survey:
    """What the first reading saw. Documents without a visible character are dropped, and counted."""

    hashes: npt.NDArray[np.uint64]  # of each document's text
    sizes: npt.NDArray[np.int64]  # UTF-8 bytes of each document
    files: npt.NDArray[np.int64]  # index of each document's file
    empty_documents: int

    @property
    def bytes(self) -> int:
        """UTF-8 bytes of all documents."""
        return int(self.sizes.sum())


def survey(source: Source, limit: int | None) -> Survey:
    """Read every document, up to `limit` bytes of text. Raises UserError for what is no text, or if there is none."""
    hashes, sizes, files, empty = array("Q"), array("q"), array("q"), [0]
    digest, size = blake2b(), 0
    for piece in _visible(source.read(), limit, empty):
        data = piece.text.encode()
        digest.update(data)
        size += len(data)
        if piece.last:
            hashes.append(hash64(digest.digest()))
            sizes.append(size)
            files.append(piece.file)
            digest, size = blake2b(), 0
    if not hashes:
        names = ", ".join(file.name for file in source.files[:3]) or source.name
        raise UserError(f"{source.key}: no text in {names}{' …' if len(source.files) > 3 else ''}; give some that has text")
    return Survey(np.frombuffer(hashes, np.uint64), np.frombuffer(sizes, np.int64), np.frombuffer(files, np.int64), empty[0])


def _visible(pieces: Iterator[Piece], limit: int | None, empty: list[int]) -> Iterator[Piece]:
    """The documents that are not white space alone, cut off behind `limit` bytes of text. Counts the others."""
    inside, room = False, limit
    for piece in pieces:
        if not inside and not piece.text.strip():  # a document's first piece shows something if the document does
            empty[0] += 1
            continue
        if room is not None:
            data = piece.text.encode()
            room -= len(data)
            if room <= 0:
                rest = data[: len(data) + room].decode(errors="ignore")
                if inside or rest.strip():
                    yield Piece(rest, True, piece.file)
                return
        inside = not piece.last
        yield piece


class Split(NamedTuple):
    """Where every document goes. `held_out` has one entry a document; of a single document the end is held out."""

    held_out: npt.NDArray[np.bool_]
    cut: int | None = None  # bytes of the only document to train on, up to the end of the line
    by: str = "document"


def choose(seen: Survey, source: Source, share: float) -> Split:
    """Hold out about `share` of the text. Raises UserError if all of it is the same document over and over."""
    if len(seen.sizes) == 1:
        return Split(np.zeros(1, bool), cut=int(seen.bytes * (1 - share)), by="position")
    present, index = np.unique(seen.files, return_inverse=True)
    if len(present) >= FILES_TO_HOLD_OUT:
        hashes = np.array([hash64(source.files[i].sha256) for i in present], np.uint64)
        by, mask = "file", hold_out(hashes, np.bincount(index, weights=seen.sizes).astype(np.int64), share)[index]
    else:
        by, mask = "document", hold_out(seen.hashes, seen.sizes, share)
    if not mask.any():
        raise UserError(
            f"{source.key}: all {len(mask)} documents of {source.name} are the same text, so none can be held out; "
            "give more text, or data of their own to validate on"
        )
    return Split(mask, by=by)


def training_texts(source: Source, limit: int | None, seen: Survey, split: Split, most: int) -> Iterator[str]:
    """Text of the training split: all of it, or pieces evenly spread over it that make about `most` bytes."""
    size = int(seen.sizes[~split.held_out].sum()) if split.cut is None else split.cut
    ratio = min(1.0, most / max(size, 1))
    passed, taken = 0, 0
    for held_out, piece in _routed(source, limit, split):
        if held_out:
            continue
        length = len(piece.text.encode())
        if taken <= passed * ratio:
            taken += length
            yield piece.text
        passed += length


def _routed(source: Source, limit: int | None, split: Split) -> Iterator[tuple[bool, Piece]]:
    """(whether it is held out, piece), in order."""
    document, done = 0, 0
    held_out = bool(split.held_out[0])
    for piece in _visible(source.read(), limit, [0]):
        if document == len(split.held_out):
            raise _changed(source)
        if split.cut is None:
            yield bool(split.held_out[document]), piece
        else:
            for behind, part in _cut(piece, held_out, split.cut - done):
                held_out = behind
                yield behind, part
            done += len(piece.text.encode())
        document += piece.last
    if document != len(split.held_out):
        raise _changed(source)


def _changed(source: Source) -> UserError:
    return UserError(f"{source.key}: {source.name} changed while it was read; start again when nobody writes to it")


def _cut(piece: Piece, held_out: bool, at: int) -> Iterator[tuple[bool, Piece]]:
    """The piece, or its two parts if byte `at` of it is where the held-out end begins."""
    data = piece.text.encode()
    if held_out or at >= len(data):
        yield held_out, piece
        return
    after, before = data.find(b"\n", at) + 1, data.rfind(b"\n", 0, at) + 1
    border = after if 0 < after < len(data) else before or at  # at a line end where there is one
    head = data[:border].decode(errors="ignore")
    yield False, Piece(head, True, piece.file)
    yield True, Piece(piece.text[len(head) :], piece.last, piece.file)


@dataclass
class Written:
    """One split on disk."""

    writer: TokenWriter
    bytes: int = 0
    documents: int = 0


@dataclass
class _Group:
    texts: list[str] = field(default_factory=list)
    targets: list[tuple[Written, bool]] = field(default_factory=list)
    characters: int = 0


def tokenize(source: Source, limit: int | None, split: Split, tokenizer: Tokenizer, train: Written, held_out: Written) -> None:
    """Write the ids of every document, an end of document behind each, to its split."""
    end = np.array([tokenizer.eod], np.uint32)
    group = _Group()

    def flush() -> None:
        for ids, text, (target, last) in zip(tokenizer.encode_batch(group.texts), group.texts, group.targets, strict=True):
            target.writer.append(ids)
            target.bytes += len(text.encode())
            if last:
                target.writer.append(end)
                target.documents += 1

    for is_held_out, piece in _routed(source, limit, split):
        group.texts.append(piece.text)
        group.targets.append((held_out if is_held_out else train, piece.last))
        group.characters += len(piece.text)
        if group.characters >= GROUP:
            flush()
            group = _Group()
    flush()
