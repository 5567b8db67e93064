"""A split as one long row of ids: documents packed, an end of document behind each; in memory or on disk."""

import bisect
import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt

from dsv3fp8.data.tokenizer import Ids

Segment = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
_HEADER = 128  # bytes that numpy writes before a row of any length


class TokenStore:
    """Ids of one split. Read through `read`: the ids may be memory-mapped, and in several files."""

    def __init__(
        self,
        tokens: Segment | Sequence[Segment],
        eod: int,
        bytes: int | None = None,
        documents: int | None = None,
        fingerprint: str | None = None,
    ) -> None:
        """`tokens`: 1-D uint16 or uint32, in one array or several; `bytes`: UTF-8 bytes of the text, None if not known;
        `fingerprint`: what makes the split itself and no other; None: a hash of the ids.
        """
        self.segments: list[Segment] = [tokens] if isinstance(tokens, np.ndarray) else list(tokens)
        self.eod, self.bytes, self.documents = eod, bytes, documents
        self._ends: list[int] = []  # Python integers: offsets beyond 2^31 are ordinary
        for segment in self.segments:
            assert segment.ndim == 1, segment.shape
            assert segment.dtype in (np.uint16, np.uint32), segment.dtype
            self._ends.append(len(segment) + (self._ends[-1] if self._ends else 0))
        self._fingerprint = fingerprint

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def tokens(self) -> Segment:
        """All ids as one array; a view unless they lie in several files."""
        return self.segments[0] if len(self.segments) == 1 else np.concatenate([np.empty(0, np.uint16), *self.segments])

    @property
    def fingerprint(self) -> str:
        """A name for exactly these ids."""
        if self._fingerprint is None:
            digest = hashlib.sha256()
            for segment in self.segments:
                digest.update(np.ascontiguousarray(segment, np.uint32).tobytes())
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Ids `start` up to, not with, `stop`, as int64."""
        assert 0 <= start <= stop <= len(self), (start, stop, len(self))
        out = np.empty(stop - start, np.int64)
        at = start
        while at < stop:
            index = bisect.bisect_right(self._ends, at)
            begin = self._ends[index] - len(self.segments[index])
            upto = min(stop, self._ends[index])
            out[at - start : upto - start] = self.segments[index][at - begin : upto - begin]
            at = upto
        return out

    def bits_per_byte(self, nats_per_token: float) -> float | None:
        """A mean loss over this split in bits per byte of its text; None if its text is not known."""
        if not self.bytes:
            return None
        return nats_per_token / math.log(2) * len(self) / self.bytes


class TokenWriter:
    """Appends ids to a .npy file of uint32 without holding them in memory."""

    def __init__(self, path: Path) -> None:
        self._stream: BinaryIO = path.open("wb")
        self._stream.write(b"\0" * _HEADER)
        self.count = 0

    def append(self, ids: Ids) -> None:
        """Write ids at the end."""
        self._stream.write(cast(Any, np.ascontiguousarray(ids, "<u4")))
        self.count += len(ids)

    def close(self) -> None:
        """Write the header, now that the length is known."""
        self._stream.seek(0)
        header = {"descr": "<u4", "fortran_order": False, "shape": (self.count,)}
        np.lib.format.write_array_header_1_0(self._stream, header)
        assert self._stream.tell() == _HEADER, f"numpy wrote a header of {self._stream.tell()} bytes"
        self._stream.close()
