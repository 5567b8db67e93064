"""What a run can be told about its text: one flat dataclass for all sources, so `data=files data.paths=…` is all it takes.

The YAML files under ``configs/data/`` pick a source and give its keys; a key that means nothing to the source is
refused, because a setting that is silently ignored looks like one that works.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from dsv3fp8.errors import UserError

# Keys that only some sources read. Every other key means something to all of them.
_READ_BY = {
    "site_packages": ("python",),
    "paths": ("files", "memmap"),
    "validation_paths": ("files", "memmap"),
    "text_key": ("files", "huggingface"),
    "dataset": ("huggingface",),
    "subset": ("huggingface",),
    "split": ("huggingface",),
    "validation_split": ("huggingface",),
    "dtype": ("memmap",),
    "tokens": ("synthetic",),
    "max_bytes": ("python", "files", "huggingface"),
    "bpe_training_bytes": ("python", "files", "huggingface"),
}


@dataclass
class DataConfig:
    """Where the text comes from, how it becomes tokens, and how the tokens are packed."""

    # python: the standard library's source; files: text, JSON lines, Parquet; memmap: ids on disk; or the last two.
    source: Literal["python", "files", "memmap", "huggingface", "synthetic"] = "python"
    # source=python: also the packages installed with the interpreter (a few hundred MB where torch is installed).
    site_packages: bool = False
    # source=files, memmap: a path or glob, or a list of them, relative to the directory the command is started in.
    paths: str | list[str] = field(default_factory=list)
    # Files to validate on. Empty: a share of the paths is held out.
    validation_paths: str | list[str] = field(default_factory=list)
    # The JSON key or Parquet column that holds the text.
    text_key: str = "text"
    # source=huggingface: a name on the hub or a local path.
    dataset: str | None = None
    # source=huggingface: the data set's configuration, where it has several.
    subset: str | None = None
    # source=huggingface: the split to train on.
    split: str = "train"
    # source=huggingface: the split to validate on. null: a share of the training split is held out.
    validation_split: str | None = None
    # source=memmap: what a .bin file holds (a .npy file says it itself).
    dtype: Literal["uint16", "uint32"] = "uint16"
    # source=synthetic: ids to make up.
    tokens: int = 1_000_000
    # bytes; bpe (trained once on the training split); a path to a tokenizer.json; ids (memmap and synthetic).
    tokenizer: str = "bytes"
    # Ids of a bpe or ids tokenizer, end of document included. The other tokenizers know it themselves.
    vocab_size: int | None = None
    # End of document: an id (memmap), or a token or id of the tokenizer.json. null: the tokenizer's own.
    eod: int | str | None = None
    # Text that a bpe is trained on at most, drawn evenly from the training split.
    bpe_training_bytes: int = 100_000_000
    # Share of the text held out for validation.
    validation_fraction: float = 0.05
    # Read no more than so many bytes of text. null: all of it.
    max_bytes: int | None = None
    # True: attention, positions and targets stay inside a document. False: documents share a window, as in DeepSeek-V3.
    isolate_documents: bool = False
    # Threads that prepare batches ahead. The stream of batches is the same with any number.
    workers: int = 0
    # Where tokenized text is kept between runs. null: $XDG_CACHE_HOME/dsv3fp8, or ~/.cache/dsv3fp8.
    cache_dir: str | None = None

    def validate(self) -> None:
        """Raise UserError with every value that makes no sense. Looks at no file."""
        problems = [
            f"data.{name}={getattr(self, name)} means nothing under data.source={self.source}: "
            + (f"take data={sources[0]} or leave it out" if len(sources) == 1 else f"it is for {', '.join(sources)}")
            for name, sources in _READ_BY.items()
            if self.source not in sources and getattr(self, name) != _default(name)
        ]
        problems += [
            f"data.{name}={getattr(self, name)} must be at least {least}"
            for name, least in (("tokens", 2), ("bpe_training_bytes", 1), ("workers", 0), ("max_bytes", 1))
            if getattr(self, name) is not None and getattr(self, name) < least
        ]
        if not 0 < self.validation_fraction < 1:
            problems.append(f"data.validation_fraction={self.validation_fraction} must be a share between 0 and 1")
        if self.source in ("files", "memmap") and not path_list(self.paths):
            problems.append(f"data.paths is empty: give files to read, such as data.paths='[corpus/*.{_EXAMPLE[self.source]}]'")
        if self.source == "huggingface" and not self.dataset:
            problems.append("data.dataset is empty: give a name on the hub or a local path")
        if self.source == "huggingface" and self.validation_split == self.split:
            problems.append(
                f"data.validation_split={self.split} is the training split; take another, or null to hold out a share"
            )
        problems += self._tokenizer_problems()
        if problems:
            raise UserError("; ".join(problems))

    def _tokenizer_problems(self) -> list[str]:
        pretokenized = self.source in ("memmap", "synthetic")
        problems = []
        if self.source == "synthetic" and self.tokenizer != "ids":
            problems.append(f"data.tokenizer={self.tokenizer}: synthetic data are ids already; take data.tokenizer=ids")
        if self.tokenizer == "bpe" and pretokenized:
            problems.append("data.tokenizer=bpe is trained on text, of which ids have none; take ids or a tokenizer.json")
        if self.tokenizer == "ids" and not pretokenized:
            problems.append(f"data.tokenizer=ids: data.source={self.source} is text; take bytes, bpe or a tokenizer.json")
        if self.tokenizer == "ids" and self.vocab_size is None:
            problems.append("data.vocab_size is not set: with data.tokenizer=ids it says how many ids there are")
        if self.tokenizer not in ("ids", "bpe") and self.vocab_size is not None:
            problems.append(f"data.vocab_size={self.vocab_size}: data.tokenizer={self.tokenizer} has its own; leave it out")
        least = 257 if self.tokenizer == "bpe" else 3
        if self.vocab_size is not None and not least <= self.vocab_size <= 2**31:
            problems.append(f"data.vocab_size={self.vocab_size} must be from {least} to 2^31")
        if self.source == "memmap" and self.tokenizer == "ids" and self.eod is None:
            problems.append("data.eod is not set: give the id that was written after each document")
        if self.tokenizer in ("bytes", "bpe") and self.eod is not None:
            problems.append(f"data.eod={self.eod}: data.tokenizer={self.tokenizer} has its own; leave it out")
        if self.tokenizer == "ids" and isinstance(self.eod, str):
            problems.append(f"data.eod={self.eod} must be an id: data.tokenizer=ids has no token names")
        return problems


def path_list(paths: str | list[str]) -> list[str]:
    """One path or many, always as a list."""
    return [paths] if isinstance(paths, str) else list(paths)


_EXAMPLE = {"files": "jsonl", "memmap": "bin"}


def _default(name: str) -> Any:
    return getattr(DataConfig(), name)
