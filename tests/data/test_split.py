"""The held-out part: stable, disjoint from what is trained on, and of about the share asked for."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3fp8.data import Corpus, DataConfig, open_corpus
from dsv3fp8.data.split import hash64, hold_out
from dsv3fp8.errors import UserError

Open = Callable[..., Corpus]


def texts(corpus: Corpus) -> tuple[list[str], list[str]]:
    """The documents of the two splits of a byte-level corpus."""

    def of(store: object) -> list[str]:
        ids = store.read(0, len(store))  # type: ignore[attr-defined, arg-type]
        ends = np.flatnonzero(ids == corpus.tokenizer.eod)
        return [bytes(part[part != 256].tolist()).decode() for part in np.split(ids, ends + 1)[:-1]]

    return of(corpus.train), of(corpus.validation)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    units=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 1000)), min_size=2, max_size=40),
    share=st.floats(0.01, 0.9),
)
def test_units_of_one_hash_stay_together_and_both_sides_have_some(units: list[tuple[int, int]], share: float) -> None:
    hashes = np.array([hash64(str(name)) for name, _ in units], np.uint64)
    mask = hold_out(hashes, np.array([size for _, size in units]), share)
    assert not set(hashes[mask].tolist()) & set(hashes[~mask].tolist())
    if len(set(hashes.tolist())) > 1:
        assert 0 < mask.sum() < len(mask)
    else:
        assert not mask.any()


def test_the_held_out_share_is_about_the_one_asked_for() -> None:
    random = np.random.default_rng(0)
    sizes = random.lognormal(8, 1.5, 2000).astype(np.int64)
    hashes = random.integers(0, 2**63, 2000).astype(np.uint64)
    for share in (0.01, 0.05, 0.3):
        held_out = sizes[hold_out(hashes, sizes, share)].sum() / sizes.sum()
        assert share <= held_out < 1.5 * share


def test_one_huge_unit_is_not_held_out() -> None:
    hashes = np.arange(21, dtype=np.uint64)
    mask = hold_out(hashes, np.array([10**9] + [1000] * 20), 0.05)
    assert not mask[0]


def lines(count: int, start: int = 0) -> str:
    return "".join(f'{{"text": "document {i} with some words"}}\n' for i in range(start, start + count))


def test_a_file_of_many_documents_is_split_by_document(tmp_path: Path, open_files: Open) -> None:
    (tmp_path / "a.jsonl").write_text(lines(400) + lines(400))
    corpus = open_files(tmp_path / "a.jsonl", held_out=False)
    train, validation = texts(corpus)
    assert corpus.describe()["split_by"] == "document"
    assert corpus.describe()["files"][0]["split"] == "both"
    assert len(train) + len(validation) == 800
    assert not set(train) & set(validation), "a copy of a held-out document was trained on"
    assert 20 <= len(validation) <= 60
    assert validation == sorted(validation[: len(validation) // 2], key=lambda text: int(text.split()[1])) * 2


def test_many_files_are_split_by_file_wherever_they_lie(tmp_path: Path, open_files: Open) -> None:
    held_out = []
    for folder in ("x", "other place"):
        (tmp_path / folder).mkdir()
        for i in range(30):
            (tmp_path / folder / f"{i}.jsonl").write_text(lines(10, 10 * i))
        corpus = open_files(tmp_path / folder / "*.jsonl", held_out=False)
        train, validation = texts(corpus)
        files = [each for each in corpus.describe()["files"] if each["split"] == "validation"]
        assert corpus.describe()["split_by"] == "file"
        assert len(validation) == 10 * len(files)
        assert not set(train) & set(validation)
        held_out.append([Path(each["name"]).name for each in files])
    assert held_out[0] == held_out[1] != []


def test_adding_a_file_does_not_reshuffle_the_split(tmp_path: Path, open_files: Open) -> None:
    for i in range(40):
        (tmp_path / f"{i}.txt").write_text(f"{i} " * 50)
    before = set(texts(open_files(tmp_path / "*.txt", held_out=False))[1])
    (tmp_path / "new.txt").write_text("new " * 50)
    after = set(texts(open_files(tmp_path / "*.txt", held_out=False))[1])
    assert len(before & after) >= len(before) - 1


def test_of_a_single_document_the_end_is_held_out_from_a_line_start(tmp_path: Path, open_files: Open) -> None:
    text = "".join(f"line {i} of a play\n" for i in range(1000))
    (tmp_path / "play.txt").write_text(text)
    corpus = open_files(tmp_path / "play.txt", held_out=False, validation_fraction=0.1)
    (train,), (validation,) = texts(corpus)
    assert corpus.describe()["split_by"] == "position"
    assert train + validation == text
    assert train.endswith("\n")
    assert abs(len(validation) / len(text) - 0.1) < 0.01


@pytest.mark.parametrize("text", ["€" * 1000, "a\n" + "b" * 2000, "a" * 2000 + "\n"])
def test_a_single_document_with_hardly_a_line_end_is_cut_between_characters(
    text: str, tmp_path: Path, open_files: Open
) -> None:
    (tmp_path / "a.txt").write_text(text)
    (train,), (validation,) = texts(open_files(tmp_path / "a.txt", held_out=False))
    assert train + validation == text
    assert train
    assert validation


def test_a_large_single_document_is_cut_in_the_right_piece(
    tmp_path: Path, open_files: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsv3fp8.data.text.BLOCK", 256)
    monkeypatch.setattr("dsv3fp8.data.text.cut.__defaults__", (256,))
    text = "".join(f"line {i}\n" for i in range(500))
    (tmp_path / "a.txt").write_text(text)
    (train,), (validation,) = texts(open_files(tmp_path / "a.txt", held_out=False, validation_fraction=0.25))
    assert train + validation == text
    assert 0.2 < len(validation) / len(text) < 0.3


def test_the_same_document_over_and_over_cannot_be_split(tmp_path: Path, open_files: Open) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "same"}\n' * 5)
    with pytest.raises(UserError, match=r"^data\.paths: all 5 documents of .* are the same text"):
        open_files(tmp_path / "a.jsonl", held_out=False)


def test_files_to_validate_on_are_taken_whole_and_must_not_be_trained_on(
    fixtures: Path, tmp_path: Path, open_files: Open
) -> None:
    corpus = open_files(fixtures / "plain.jsonl", validation_paths=[str(fixtures / "shard_*.txt")])
    train, validation = texts(corpus)
    assert len(train) == 3
    assert validation == ["shard 1\n", "shard 2\n", "shard 10\n"]
    (tmp_path / "copy.jsonl").write_bytes((fixtures / "plain.jsonl").read_bytes())
    with pytest.raises(UserError, match=r"^data\.validation_paths: .*copy\.jsonl is the same as .*plain\.jsonl"):
        open_files(fixtures / "plain.jsonl", validation_paths=str(tmp_path / "copy.jsonl"))


def test_max_bytes_reads_just_so_much_text(tmp_path: Path, open_files: Open, cache: Path) -> None:
    (tmp_path / "a.jsonl").write_text(lines(400))
    corpus = open_files(tmp_path / "a.jsonl", held_out=False, max_bytes=5000)
    assert corpus.train.bytes + corpus.validation.bytes == 5000  # type: ignore[operator]
    whole = open_files(tmp_path / "a.jsonl", held_out=False)
    assert whole.train.bytes > 8000  # type: ignore[operator]
    python = open_corpus(DataConfig(max_bytes=300_000), cache)
    assert python.train.bytes + python.validation.bytes == 300_000  # type: ignore[operator]
