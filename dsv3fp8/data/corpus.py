"""Opens the corpus of a run: everything that can be wrong with its data is found here, before any work starts.

Text is tokenized once and kept in the cache under a hash of all that decides the ids: the contents of the files, the
tokenizer and the keys that choose and split documents. Later starts map the ids into memory.
"""

import functools
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from dsv3fp8.data.bigram import BigramBaseline, fit_bigram
from dsv3fp8.data.bpe import train_bpe
from dsv3fp8.data.cache import default_cache_dir, finished_entry
from dsv3fp8.data.config import DataConfig
from dsv3fp8.data.fingerprint import Memory, sha256_of
from dsv3fp8.data.huggingface import HuggingFaceSource
from dsv3fp8.data.paths import expand_user
from dsv3fp8.data.prepare import Split, Written, choose, survey, tokenize, training_texts
from dsv3fp8.data.pretokenized import MemmapFiles, synthetic
from dsv3fp8.data.sources import FileSource, PythonSource, Source
from dsv3fp8.data.store import TokenStore, TokenWriter
from dsv3fp8.data.tokenizer import ByteTokenizer, IdTokenizer, Tokenizer, load_tokenizer, read_tokenizer_json
from dsv3fp8.errors import UserError

# Part of every cache key: raise it when the same text and keys come to give other ids.
FORMAT = 1
HALVES = ("train", "validation")


class Corpus:
    """A tokenizer and two splits, with where they come from."""

    def __init__(
        self, tokenizer: Tokenizer, train: TokenStore, validation: TokenStore, isolate: bool, origin: dict[str, Any]
    ) -> None:
        """`isolate`: targets do not cross documents; `origin`: what `describe` adds to the sizes."""
        self.tokenizer, self.train, self.validation = tokenizer, train, validation
        self._isolate, self._origin = isolate, origin

    def check_context(self, context: int) -> None:
        """Raise UserError if either split has less than one window of `context` tokens and the one after them."""
        for store, name, remedy in (
            (self.train, "training", "give more text or a smaller training.context"),
            (
                self.validation,
                "validation",
                "give more text, a larger data.validation_fraction or a smaller training.context",
            ),
        ):
            if len(store) < context + 1:
                raise UserError(
                    f"data: the {name} split of {self._origin['source']} has {len(store)} tokens, too short for one window "
                    f"of training.context={context} and the token after it; {remedy}"
                )

    @functools.cached_property
    def _bigram(self) -> BigramBaseline:
        return fit_bigram(self.train, self.validation, self.tokenizer.vocab_size, self._isolate)

    def bigram(self) -> BigramBaseline:
        """What a model of pairs of tokens reaches on the validation split: the least a model has to beat."""
        return self._bigram

    def describe(self) -> dict[str, Any]:
        """Plain values: the files with their hashes, what was left out, the tokenizer, and the size of the splits."""
        tokenizer = self.tokenizer
        sizes = {
            name: {"tokens": len(store), "bytes": store.bytes, "documents": store.documents}
            for name, store in zip(HALVES, (self.train, self.validation), strict=True)
        }
        naming = {"name": tokenizer.name, "vocab_size": tokenizer.vocab_size, "eod": tokenizer.eod}
        return {**self._origin, "tokenizer": {**naming, "sha256": tokenizer.fingerprint}, **sizes}

    def summary(self) -> str:
        """One line for a person."""
        sizes = ", ".join(
            f"{len(store):,} {name} tokens" for name, store in zip(HALVES, (self.train, self.validation), strict=True)
        )
        left_out = self._origin.get("unreadable", [])
        note = f"; {len(left_out)} files that are not UTF-8 left out" if left_out else ""
        files = f", {len(self._origin['files']):,} files" if self._origin["files"] else ""
        known_as = f"sha256 {self._origin['sha256'][:12]}"
        return f"{self._origin['source']}{files}: {sizes} ({self.tokenizer.name}); {known_as}{note}"


def open_corpus(config: DataConfig, cache_dir: Path | None = None, report: Callable[[str], None] | None = None) -> Corpus:
    """Read, split and tokenize the corpus, or find that done in the cache.

    `cache_dir`: None takes data.cache_dir, and that failing the user's cache; `report` is told, in a line, about work
    that takes a while. Raises UserError, one line, for every fault of the data.
    """
    config.validate()
    cache_dir = cache_dir or (expand_user(config.cache_dir) if config.cache_dir else default_cache_dir())
    if config.source == "memmap":
        return _open_memmap(config, Memory(cache_dir))
    if config.source == "synthetic":
        return _open_synthetic(config)
    return _open_text(config, cache_dir, report or (lambda line: None))


def _open_text(config: DataConfig, cache_dir: Path, report: Callable[[str], None]) -> Corpus:
    source, held_out = _sources(config, Memory(cache_dir))
    tokenizer = _text_tokenizer(config)
    decides = {
        "format": FORMAT,
        "corpus": [source.identity, held_out.identity if held_out else None],
        "tokenizer": tokenizer.fingerprint if tokenizer else ["bpe", _bpe_size(config), config.bpe_training_bytes],
        "validation_fraction": None if held_out else config.validation_fraction,
        "max_bytes": config.max_bytes,
    }
    build = functools.partial(_build, config=config, source=source, held_out=held_out, tokenizer=tokenizer, report=report)
    key = sha256_of(decides)
    entry = finished_entry(cache_dir, f"tokens-{key[:24]}", build, _usable)
    facts = json.loads((entry / "facts.json").read_text())
    tokenizer = load_tokenizer(entry / "tokenizer.json")
    train, validation = (
        TokenStore(
            np.load(entry / f"{half}.npy", mmap_mode="r"),
            tokenizer.eod,
            bytes=facts[half]["bytes"],
            documents=facts[half]["documents"],
            fingerprint=f"{key}/{half}",
        )
        for half in HALVES
    )
    origin = {
        "source": source.name,
        "sha256": sha256_of([source.identity, held_out.identity if held_out else None]),
        "split_by": facts["split_by"],
        "empty_documents": facts["empty_documents"],
        "unreadable": facts["unreadable"],
        "files": _files(source, facts, held_out),
    }
    return Corpus(tokenizer, train, validation, config.isolate_documents, origin)


def _sources(config: DataConfig, memory: Memory) -> tuple[Source, Source | None]:
    """What to train on, and what to validate on if that is not a part of it."""
    if config.source == "python":
        return PythonSource.find(config, memory), None
    if config.source == "huggingface":
        held_out = HuggingFaceSource.find(config, config.validation_split) if config.validation_split else None
        return HuggingFaceSource.find(config, config.split), held_out
    source = FileSource.find(config, memory)
    if not config.validation_paths:
        return source, None
    validation = FileSource.find(config, memory, "validation_paths")
    _refuse_shared(source.files, validation.files)
    return source, validation


def _refuse_shared(train: list[Any], validation: list[Any]) -> None:
    known = {file.sha256: file.name for file in train if file.bytes}
    for file in validation:
        if file.sha256 in known:
            copy = known[file.sha256]
            raise UserError(f"data.validation_paths: {file.name} is the same as {copy} in data.paths; leave one of them out")


def _text_tokenizer(config: DataConfig) -> Tokenizer | None:
    """The tokenizer of a text corpus; None for one that has yet to be trained."""
    if config.tokenizer == "bpe":
        return None
    return ByteTokenizer() if config.tokenizer == "bytes" else read_tokenizer_json(_path_of(config), config.eod)


def _id_tokenizer(config: DataConfig) -> Tokenizer:
    """The tokenizer of a corpus that is ids already."""
    if config.tokenizer == "bytes":
        return ByteTokenizer()
    if config.tokenizer != "ids":
        return read_tokenizer_json(_path_of(config), config.eod)
    assert config.vocab_size is not None, "validate() asks for it"
    eod = config.vocab_size - 1 if config.eod is None else int(config.eod)
    if not 0 <= eod < config.vocab_size:
        raise UserError(f"data.eod={eod} is not an id below data.vocab_size={config.vocab_size}")
    return IdTokenizer(config.vocab_size, eod)


def _path_of(config: DataConfig) -> Path:
    return expand_user(config.tokenizer)


BPE_SIZE = 8192  # of a vocabulary that nobody gave a size


def _bpe_size(config: DataConfig) -> int:
    return config.vocab_size or BPE_SIZE


def _build(
    entry: Path,
    config: DataConfig,
    source: Source,
    held_out: Source | None,
    tokenizer: Tokenizer | None,
    report: Callable[[str], None],
) -> None:
    """Fill a cache entry: train.npy, validation.npy, tokenizer.json and facts.json."""
    seen = survey(source, config.max_bytes)
    seen_held_out = survey(held_out, None) if held_out else None
    everything = np.zeros(len(seen.sizes), bool)
    split = Split(everything, by="given files") if held_out else choose(seen, source, config.validation_fraction)
    report(f"tokenizing {seen.bytes / 1e3:,.0f} kB of {source.name} once; kept in {entry.parent}")
    if tokenizer is None:
        texts = training_texts(source, config.max_bytes, seen, split, config.bpe_training_bytes)
        tokenizer = train_bpe(texts, _bpe_size(config))
    written = {half: Written(TokenWriter(entry / f"{half}.npy")) for half in HALVES}
    tokenize(source, config.max_bytes, split, tokenizer, written["train"], written["validation"])
    if held_out and seen_held_out:
        whole = Split(np.zeros(len(seen_held_out.sizes), bool))
        tokenize(held_out, None, whole, tokenizer, written["validation"], written["validation"])
    tokenizer.save(entry / "tokenizer.json")
    facts: dict[str, Any] = {
        "split_by": split.by,
        "empty_documents": seen.empty_documents,
        "unreadable": source.unreadable,
        "file_split": {int(i): _side(split, seen.files == i) for i in np.unique(seen.files)},
    }
    for half, each in written.items():
        each.writer.close()
        facts[half] = {"tokens": each.writer.count, "bytes": each.bytes, "documents": each.documents}
    (entry / "facts.json").write_text(json.dumps(facts))


def _side(split: Split, documents: np.ndarray[Any, np.dtype[np.bool_]]) -> str:
    chosen = split.held_out[documents]
    if split.cut is not None or (chosen.any() and not chosen.all()):
        return "both"
    return "validation" if chosen.all() else "train"


def _usable(entry: Path) -> bool:
    """Whether everything is there, in the length it was written with."""
    try:
        facts = json.loads((entry / "facts.json").read_text())
        load_tokenizer(entry / "tokenizer.json")
        return all(np.load(entry / f"{half}.npy", mmap_mode="r").shape == (facts[half]["tokens"],) for half in HALVES)
    except (OSError, ValueError, EOFError, KeyError, UserError):
        return False


def _files(source: Source, facts: dict[str, Any], held_out: Source | None) -> list[dict[str, Any]]:
    """Name, size, hash and use of every file; a file whose text was not used says why."""
    unreadable = set(facts["unreadable"])
    sides = facts["file_split"]
    files = [
        {**asdict(file), "split": sides.get(str(i), "unreadable" if file.name in unreadable else "no text")}
        for i, file in enumerate(source.files)
    ]
    return files + [{**asdict(file), "split": "validation"} for file in (held_out.files if held_out else [])]


def _open_memmap(config: DataConfig, memory: Memory) -> Corpus:
    tokenizer = _id_tokenizer(config)
    files = MemmapFiles(config, "paths", tokenizer, memory)
    used = [{**asdict(file), "split": "train" if config.validation_paths else "both"} for file in files.files]
    identity = [files.identity]
    if config.validation_paths:
        held_out = MemmapFiles(config, "validation_paths", tokenizer, memory)
        _refuse_shared(files.files, held_out.files)
        used += [{**asdict(file), "split": "validation"} for file in held_out.files]
        identity.append(held_out.identity)
        train, validation = files.store(tokenizer.eod), held_out.store(tokenizer.eod)
    else:
        train, validation = files.halves(tokenizer.eod, config.validation_fraction)
    name = " ".join(each.name for each in files.files[:3]) + (" …" if len(files.files) > 3 else "")
    origin = {"source": name, "sha256": sha256_of(identity), "files": used}
    return Corpus(tokenizer, train, validation, config.isolate_documents, origin)


def _open_synthetic(config: DataConfig) -> Corpus:
    tokenizer = _id_tokenizer(config)
    ids = synthetic(config.tokens, tokenizer)
    cut = max(1, int(len(ids) * (1 - config.validation_fraction)))
    train, validation = TokenStore(ids[:cut], tokenizer.eod), TokenStore(ids[cut:], tokenizer.eod)
    origin = {"source": "synthetic", "sha256": sha256_of([train.fingerprint, validation.fingerprint]), "files": []}
    return Corpus(tokenizer, train, validation, config.isolate_documents, origin)
