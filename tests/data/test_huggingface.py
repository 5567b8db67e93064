"""Data sets of the optional package: what is asked of it, and what is said when it, or the data set, is not there.

The package is not needed for these tests: a stand-in with the same calls takes its place.
"""

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsv3fp8.data import Corpus, DataConfig, open_corpus
from dsv3fp8.errors import UserError


class Rows:
    """The part of datasets.Dataset that is used."""

    def __init__(self, columns: dict[str, list[object]], fingerprint: str) -> None:
        self._columns, self._fingerprint, self.column_names = columns, fingerprint, list(columns)

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def select_columns(self, names: list[str]) -> "Rows":
        return Rows({name: self._columns[name] for name in names}, self._fingerprint)

    def __iter__(self) -> Iterator[dict[str, object]]:
        return (dict(zip(self._columns, row, strict=True)) for row in zip(*self._columns.values(), strict=True))


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """Puts the stand-in in place; returns the calls made to it."""
    calls: list[tuple[object, ...]] = []
    splits = {
        "train": Rows({"body": [f"document {i}" for i in range(40)], "id": list(range(40))}, "abc"),
        "test": Rows({"body": ["held out 1", "held out 2"], "id": [1, 2]}, "def"),
    }

    def load_dataset(name: str, subset: str | None, split: str) -> Rows:
        calls.append((name, subset, split))
        if split not in splits:
            raise ValueError(f'Unknown split "{split}".\nMore lines.')
        return splits[split]

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    module.load_from_disk = lambda path: splits if (Path(path) / "dataset_dict.json").exists() else splits["train"]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return calls


def open_it(cache: Path, **keys: Any) -> Corpus:
    settings = {"dataset": "some/name", "text_key": "body", **keys}
    return open_corpus(DataConfig(source="huggingface", **settings), cache)


def test_a_named_data_set_is_split_by_document(package: list[tuple[object, ...]], cache: Path) -> None:
    corpus = open_it(cache, subset="en")
    assert package == [("some/name", "en", "train")]
    described = corpus.describe()
    assert described["train"]["documents"] + described["validation"]["documents"] == 40
    assert corpus.tokenizer.decode(corpus.train.read(0, 8)) == "document"


def test_a_split_of_its_own_is_validated_on(package: list[tuple[object, ...]], cache: Path) -> None:
    corpus = open_it(cache, validation_split="test")
    assert corpus.describe()["train"]["documents"] == 40
    ids = corpus.validation.read(0, len(corpus.validation))
    assert corpus.tokenizer.decode(ids) == "held out 1<|endoftext|>held out 2<|endoftext|>"


def test_what_save_to_disk_wrote_is_read_from_its_folder(
    package: list[tuple[object, ...]], cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "state.json").write_text("{}")
    (tmp_path / "both").mkdir()
    (tmp_path / "both" / "dataset_dict.json").write_text("{}")
    assert open_it(cache, dataset=str(tmp_path / "one")).describe()["train"]["documents"] > 30
    assert open_it(cache, dataset=str(tmp_path / "both"), validation_split="test").describe()["validation"]["documents"] == 2
    for folder, has in (("one", "train"), ("both", "train, test")):
        with pytest.raises(UserError, match=rf"data\.split=other: .* has no such split \(it has {has}\)"):
            open_it(cache, dataset=str(tmp_path / folder), split="other")
    assert package == []


def test_faults_of_the_data_set_are_one_line_with_the_keys(package: list[tuple[object, ...]], cache: Path) -> None:
    for keys, complaint in (
        ({"text_key": "text"}, r"data\.text_key=text: some/name has no such column \(it has body, id\)"),
        ({"text_key": "id"}, "row 0: 'id' is int, not text"),
        ({"split": "other"}, r'data\.split=other: cannot be loaded \(Unknown split "other"\.\); correct the name'),
    ):
        with pytest.raises(UserError, match=complaint):
            open_it(cache, **keys)


def test_a_missing_package_is_one_line_with_what_to_install(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"needs the package datasets: pip install 'dsv3fp8\[hf\]'"):
        open_it(cache)
