"""Text to ids and back.

Every tokenizer here keeps one promise: the end-of-document id is put between documents by whoever packs them, and
no text inside a document ever becomes it, or any other control token. A document may well be about tokenizers.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dsv3fp8.data.cache import write_atomically
from dsv3fp8.data.fingerprint import sha256_of
from dsv3fp8.errors import UserError

Ids = npt.NDArray[np.uint32]


class Tokenizer(ABC):
    """What the rest of the project knows of a tokenizer."""

    name: str
    vocab_size: int  # ids are below it
    eod: int  # end of document

    @abstractmethod
    def encode(self, text: str) -> Ids:
        """The ids of a text, without an end of document."""

    @abstractmethod
    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """The text of some ids. Bytes that are no UTF-8 on their own become U+FFFD."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Plain values that `from_dict` makes an equal tokenizer of."""

    @property
    def fingerprint(self) -> str:
        """A hash of everything that decides the ids of a text."""
        return sha256_of({key: value for key, value in self.to_dict().items() if key != "name"})

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """`encode` of each."""
        return [self.encode(text) for text in texts]

    def save(self, path: Path) -> None:
        """Write a file for `load_tokenizer`, at once or not at all. Raises UserError if the disk does not take it."""
        write_atomically(Path(path), json.dumps(self.to_dict(), ensure_ascii=False))


class ByteTokenizer(Tokenizer):
    """One id a byte of UTF-8, and 256 for the end of a document."""

    name = "bytes"
    vocab_size = 257
    eod = 256

    def encode(self, text: str) -> Ids:
        """The bytes of the text."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """The text; an end of document shows as <|endoftext|>. Raises ValueError for an id that is none of its own."""
        if len(ids) and not 0 <= min(ids) <= max(ids) <= self.eod:
            raise ValueError(f"ids from {min(ids)} to {max(ids)} are not all below {self.vocab_size}")
        marker = b"<|endoftext|>"
        return b"".join(marker if each == self.eod else bytes((int(each),)) for each in ids).decode(errors="replace")

    def to_dict(self) -> dict[str, Any]:
        """Its kind is all there is to it."""
        return {"kind": "bytes"}


class IdTokenizer(Tokenizer):
    """For corpora that are ids already and whose text is not known: a text is its ids, written in decimal."""

    name = "ids"

    def __init__(self, vocab_size: int, eod: int) -> None:
        self.vocab_size, self.eod = vocab_size, eod

    def encode(self, text: str) -> Ids:
        """`"17 4"` to [17, 4]. Raises UserError for anything else."""
        words = text.split()
        wrong = next((word for word in words if not (word.isdecimal() and int(word) < self.vocab_size)), None)
        if wrong is not None:
            raise UserError(
                f"data.tokenizer=ids: {wrong!r} is not an id below {self.vocab_size}; write ids with spaces between"
            )
        return np.array([int(word) for word in words], np.uint32)

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """[17, 4] to `"17 4"`."""
        return " ".join(str(int(each)) for each in ids)

    def to_dict(self) -> dict[str, Any]:
        """Its two numbers."""
        return {"kind": "ids", "vocab_size": self.vocab_size, "eod": self.eod}


# End-of-document tokens of well-known tokenizers, taken in this order where a file has several.
KNOWN_EODS = (
    "<|endoftext|>", "<｜end▁of▁sentence｜>", "<|end_of_text|>", "<|endofdocument|>", "<eod>", "<|eod|>", "</s>",
    "<eos>", "<|eos|>", "[EOS]", "[eos]",
)  # fmt: skip
# Added tokens written like markup steer a chat or a training format even where the file does not call them special;
# the others (runs of spaces, words of a domain) are text.
_MARKUP = re.compile(r"<.+>|\[.+\]", re.DOTALL)


class SubwordTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` package: a trained BPE, or somebody's tokenizer.json."""

    def __init__(self, definition: str, name: str, eod: int | str | None = None) -> None:
        """From the text of a tokenizer.json. `eod`: token or id; None: the first of KNOWN_EODS it has.

        Raises UserError, naming data.eod, if there is no such token, and ValueError for what is not a tokenizer.
        """
        from tokenizers import Tokenizer as Engine

        self.name = name
        try:
            self._engine = Engine.from_str(definition)
        except Exception as error:  # the package raises the base class itself
            raise ValueError(str(error)) from error
        # Settings of whoever wrote the file, that would cut documents off or fill them up.
        self._engine.no_truncation()
        self._engine.no_padding()
        vocabulary = self._engine.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.eod = _find_eod(vocabulary, self._engine.get_added_tokens_decoder(), eod, name)
        self._definition = definition
        self._control = self._disarm()

    def _disarm(self) -> npt.NDArray[np.uint32]:
        """Make the engine read control tokens in a text as text. Returns their ids."""
        from tokenizers import AddedToken

        added = self._engine.get_added_tokens_decoder()
        control = {i: token for i, token in added.items() if token.special or i == self.eod or _MARKUP.fullmatch(token.content)}
        # Only special tokens can be switched off, so all of these become special in this copy.
        self._engine.add_special_tokens([AddedToken(token.content, special=True) for token in control.values()])
        self._engine.encode_special_tokens = True
        # The unknown token stands for text, unless it doubles as the end of document.
        model = json.loads(self._definition).get("model", {})
        unknown = {self._engine.token_to_id(str(model.get("unk_token"))), model.get("unk_id")} - {self.eod}
        return np.array(sorted(set(control) - unknown), np.uint32)

    def encode(self, text: str) -> Ids:
        """The ids of the text alone: nothing is put before or behind it."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """`encode` of each, on every core. Raises UserError if the vocabulary itself spells a control token."""
        encodings = self._engine.encode_batch_fast(list(texts), add_special_tokens=False)
        found = [np.array(encoding.ids, np.uint32) for encoding in encodings]
        for ids in found:
            hits = ids[np.isin(ids, self._control)]
            if hits.size:
                token = self._engine.id_to_token(int(hits[0]))
                raise UserError(
                    f"data.tokenizer: {self.name} reads the text {token!r} as its control token {hits[0]} even inside a "
                    "document; take that text out of the corpus, or another tokenizer"
                )
        return found

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """The text, control tokens included."""
        return self._engine.decode([int(each) for each in ids], skip_special_tokens=False)

    def to_dict(self) -> dict[str, Any]:
        """The tokenizer.json as it was, and what was chosen for it."""
        return {"kind": "subword", "name": self.name, "eod": self.eod, "definition": json.loads(self._definition)}


def _find_eod(vocabulary: dict[str, int], added: dict[int, Any], eod: int | str | None, name: str) -> int:
    if isinstance(eod, int):
        if eod in vocabulary.values():
            return eod
        raise UserError(f"data.eod={eod}: {name} has no such id (its ids end at {max(vocabulary.values(), default=-1)})")
    found = [token for token in ((eod,) if eod is not None else KNOWN_EODS) if token in vocabulary]
    if found:
        return vocabulary[found[0]]
    has = ", ".join(token.content for token in list(added.values())[:12]) or "no added token at all"
    if eod is not None:
        raise UserError(f"data.eod={eod}: {name} has no such token; it has {has}")
    raise UserError(f"data.eod is not set and {name} has no end-of-document token of a known name; name one of its own: {has}")


def read_tokenizer_json(path: Path, eod: int | str | None = None) -> SubwordTokenizer:
    """A tokenizer of the `tokenizers` package by path. Raises UserError, naming the file, if it is not one."""
    try:
        definition = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"data.tokenizer={path}: cannot be read ({error}); give bytes, bpe or the path of a tokenizer.json"
        ) from error
    try:
        return SubwordTokenizer(definition, str(path), eod)
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"data.tokenizer={path}: is not a tokenizer.json of the tokenizers package ({reason})") from error


def from_dict(saved: dict[str, Any]) -> Tokenizer:
    """The tokenizer whose `to_dict` this is."""
    if saved["kind"] == "bytes":
        return ByteTokenizer()
    if saved["kind"] == "ids":
        return IdTokenizer(saved["vocab_size"], saved["eod"])
    return SubwordTokenizer(json.dumps(saved["definition"]), saved["name"], saved["eod"])


def load_tokenizer(path: Path) -> Tokenizer:
    """A tokenizer that was saved with `save`. Raises UserError if the file is missing or of another kind."""
    try:
        return from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: is not a saved tokenizer ({error}); copy it from the run directory again") from error
