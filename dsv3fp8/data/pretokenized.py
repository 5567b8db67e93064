"""Corpora that are ids already: files mapped into memory, and made-up data for trying things out."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dsv3fp8.data.config import DataConfig, path_list
from dsv3fp8.data.fingerprint import Memory, sha256_of
from dsv3fp8.data.paths import expand
from dsv3fp8.data.sources import SourceFile
from dsv3fp8.data.store import Segment, TokenStore
from dsv3fp8.data.tokenizer import Ids, Tokenizer
from dsv3fp8.errors import UserError

_BLOCK = 1 << 20  # bytes looked at in one go
_LOOK_AHEAD = 1 << 20  # ids within which the held-out part begins behind an end of document


class MemmapFiles:
    """Files of ids, never read as a whole: every id was looked at once, and the large files remember it."""

    def __init__(self, config: DataConfig, key: str, tokenizer: Tokenizer, memory: Memory) -> None:
        """Map the files of `data.<key>`. Raises UserError for what is not a row of ids of the tokenizer's."""
        self.files: list[SourceFile] = []
        self.segments: list[Segment] = []
        for path in expand(path_list(getattr(config, key)), f"data.{key}"):
            segment = map_ids(path, config.dtype)
            self.segments.append(segment)
            self.files.append(SourceFile(str(path), path.stat().st_size, _check(path, segment, tokenizer, memory)))
        self.identity = sha256_of(
            [[file.sha256, str(each.dtype)] for file, each in zip(self.files, self.segments, strict=True)]
        )

    def store(self, eod: int) -> TokenStore:
        """All of it as one split."""
        return TokenStore(self.segments, eod, fingerprint=self.identity)

    def halves(self, eod: int, share: float) -> tuple[TokenStore, TokenStore]:
        """(training, held out): about the last `share` of the ids, from the start of a document if one is near."""
        whole = self.store(eod)
        cut = int(len(whole) * (1 - share))
        ahead = whole.read(cut, min(cut + _LOOK_AHEAD, len(whole)))
        ends = np.flatnonzero(ahead == eod)
        if ends.size and cut + int(ends[0]) + 1 < len(whole):
            cut += int(ends[0]) + 1
        before: list[Segment] = []
        after: list[Segment] = []
        at = 0
        for segment in self.segments:
            middle = min(max(cut - at, 0), len(segment))
            before += [segment[:middle]] if middle else []
            after += [segment[middle:]] if middle < len(segment) else []
            at += len(segment)
        name = f"{self.identity}/{cut}"
        return TokenStore(before, eod, fingerprint=f"{name}/train"), TokenStore(after, eod, fingerprint=f"{name}/held out")


def map_ids(path: Path, dtype: str) -> Segment:
    """A file of ids as a memory map. Raises UserError, naming the file, if it is not one row of uint16 or uint32."""
    suffix = path.suffix.lower()
    if suffix not in (".bin", ".npy"):
        raise UserError(f"{path}: data.source=memmap reads .bin and .npy, not '{suffix}'; take data=files for text")
    try:
        size = path.stat().st_size
        if suffix == ".npy":
            found: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        elif size % np.dtype(dtype).itemsize:
            raise UserError(f"{path}: {size} bytes are no whole number of {dtype} ids; set data.dtype or write the file anew")
        else:
            found = np.memmap(path, np.dtype(dtype).newbyteorder("<"), mode="r") if size else np.empty(0, dtype)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path}: cannot be mapped as ids ({error}); write it anew or leave it out") from error
    if found.ndim != 1 or found.dtype not in (np.uint16, np.uint32):
        raise UserError(f"{path}: holds {found.dtype} of shape {found.shape}; write one row of uint16 or uint32")
    if not len(found):
        raise UserError(f"{path}: is empty; leave it out or write it anew")
    return found


def _check(path: Path, segment: Segment, tokenizer: Tokenizer, memory: Memory) -> str:
    """The SHA-256 of the file. Raises UserError if it has ids that the tokenizer does not."""
    bits = segment.dtype.itemsize * 8
    if tokenizer.vocab_size > 2**bits:
        raise UserError(
            f"{path}: uint{bits} cannot hold the ids of a vocabulary of {tokenizer.vocab_size}: those above {2**bits - 1} "
            "have wrapped around; tokenize again into uint32 (and set data.dtype=uint32 for a .bin)"
        )
    start = path.stat().st_size - segment.nbytes
    facts = memory.recall(path, f"sha256 and largest {segment.dtype}", lambda file: _examine(file, segment.dtype, start))
    sha256, largest, position = facts
    if largest >= tokenizer.vocab_size:
        raise UserError(
            f"{path}: id {largest} at position {position} is beyond the vocabulary of {tokenizer.vocab_size} "
            f"(data.tokenizer={tokenizer.name}); set the tokenizer, data.vocab_size or data.dtype it was written with"
        )
    return sha256


def _examine(path: Path, dtype: np.dtype[Any], start: int) -> tuple[str, int, int]:
    """(SHA-256 of the file, its largest id, that one's first position), in one pass.

    Read, not mapped: mapped pages would count as this process's memory.
    """
    digest, largest, position, at = hashlib.sha256(), -1, 0, 0
    buffer = memoryview(bytearray(_BLOCK))
    with path.open("rb") as stream:
        digest.update(stream.read(start))
        while size := stream.readinto(buffer):
            digest.update(buffer[:size])
            ids = np.frombuffer(buffer[:size], dtype)
            if (here := int(ids.max())) > largest:
                largest, position = here, at + int(ids.argmax())
            at += ids.size
    return digest.hexdigest(), largest, position


def synthetic(count: int, tokenizer: Tokenizer) -> Ids:
    """`count` made-up ids that a model with attention can learn and a bigram cannot: phrases that repeat.

    A document is a random phrase of 8 to 32 ids, repeated 2 to 8 times, with one id in fifty replaced. Phrases differ
    from document to document, small ids are more frequent than large ones, and the same arguments give the same ids.
    """
    random = np.random.Generator(np.random.Philox(key=0))
    out = np.empty(count, np.uint32)
    at = 0
    while at < count:
        phrase = _frequent_first(random, int(random.integers(8, 33)), tokenizer)
        document = np.tile(phrase, int(random.integers(2, 9)))
        noisy = random.random(document.size) < 0.02
        document[noisy] = _frequent_first(random, int(noisy.sum()), tokenizer)
        document = np.append(document, np.uint32(tokenizer.eod))[: count - at]
        out[at : at + document.size] = document
        at += document.size
    return out


def _frequent_first(random: np.random.Generator, count: int, tokenizer: Tokenizer) -> Ids:
    """Ids whose frequency falls about as one over the id, without the end of document."""
    ids = (tokenizer.vocab_size ** random.random(count)).astype(np.int64) - 1
    return (ids + (ids >= tokenizer.eod)).astype(np.uint32)
