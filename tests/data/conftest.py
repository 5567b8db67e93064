"""What the tests of the data room share: the reduced bug reports in fixtures/, and short ways to open a corpus."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsv3fp8.data import Corpus, DataConfig, open_corpus

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture
def fixtures() -> Path:
    return FIXTURES


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def open_files(cache: Path) -> Callable[..., Corpus]:
    """Open files of text; they are given a validation file of their own unless told otherwise, so that none is split."""

    def open_them(*paths: Path | str, held_out: bool = True, **keys: Any) -> Corpus:
        if held_out:
            other = cache.parent / "held out.txt"
            other.write_text("text that is nowhere else\n")
            keys.setdefault("validation_paths", [str(other)])
        return open_corpus(DataConfig(source="files", paths=[str(path) for path in paths], **keys), cache)

    return open_them


@pytest.fixture
def documents(open_files: Callable[..., Corpus]) -> Callable[..., list[str]]:
    """The documents of files of text, as the byte-level corpus has them."""

    def read_them(*paths: Path | str, **keys: Any) -> list[str]:
        corpus = open_files(*paths, **keys)
        ids = corpus.train.read(0, len(corpus.train))
        ends = [i for i, each in enumerate(ids) if each == corpus.tokenizer.eod]
        assert ends, "no document"
        assert ends[-1] == len(ids) - 1, "something behind the last end of document"
        starts = [0] + [end + 1 for end in ends[:-1]]
        return [bytes(ids[start:end].tolist()).decode() for start, end in zip(starts, ends, strict=True)]

    return read_them
