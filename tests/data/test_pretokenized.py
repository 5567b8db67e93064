"""Corpora of ids: mapped, checked against the vocabulary, and correct beyond every 32-bit offset."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsv3fp8.data import Corpus, DataConfig, TokenStore, TrainBatches, open_corpus, validation_batches
from dsv3fp8.data.bpe import train_bpe
from dsv3fp8.data.pretokenized import map_ids, synthetic
from dsv3fp8.data.tokenizer import IdTokenizer
from dsv3fp8.errors import UserError

Open = Callable[..., Corpus]


@pytest.fixture
def open_ids(cache: Path) -> Open:
    def open_them(*paths: Path, **keys: Any) -> Corpus:
        settings = {"tokenizer": "ids", "vocab_size": 129280, "eod": 1, **keys}
        return open_corpus(DataConfig(source="memmap", paths=[str(path) for path in paths], **settings), cache)

    return open_them


def test_bin_and_npy_of_both_widths_are_mapped_not_read(tmp_path: Path, open_ids: Open) -> None:
    ids = np.arange(2, 1002)
    for width in ("uint16", "uint32"):
        ids.astype(width).tofile(tmp_path / f"{width}.bin")
        np.save(tmp_path / f"{width}.npy", ids.astype(width))
        for suffix in ("bin", "npy"):
            corpus = open_ids(tmp_path / f"{width}.{suffix}", dtype=width, vocab_size=1002)
            assert isinstance(corpus.train.tokens, np.memmap)
            assert corpus.train.tokens.dtype == width
            whole = np.concatenate([corpus.train.tokens, corpus.validation.tokens])
            assert whole.tolist() == ids.tolist()


def test_d01_ids_beyond_65535_are_kept_in_uint32(tmp_path: Path, open_ids: Open) -> None:
    ids = np.array([65536, 100015, 129279] * 40, np.uint32)
    np.save(tmp_path / "a.npy", ids)
    corpus = open_ids(tmp_path / "a.npy")
    assert corpus.train.read(0, 3).tolist() == [65536, 100015, 129279]
    assert next(TrainBatches(corpus.train, 1, 6, 0)).tokens.max() == 129279


@pytest.mark.parametrize("suffix", ["bin", "npy"])
def test_d01_uint16_cannot_be_the_ids_of_a_large_vocabulary(suffix: str, tmp_path: Path, open_ids: Open) -> None:
    path = tmp_path / f"a.{suffix}"
    ids = np.array([65536, 100015, 129279] * 40).astype(np.uint16)
    np.save(path, ids) if suffix == "npy" else ids.tofile(path)
    with pytest.raises(UserError, match=r"uint16 cannot hold the ids of a vocabulary of 129280: .* into uint32"):
        open_ids(path)


def test_an_id_beyond_the_vocabulary_is_named_with_its_position(tmp_path: Path, open_ids: Open) -> None:
    ids = np.full(3_000_000, 7, np.uint32)
    ids[2_500_001] = 1000
    np.save(tmp_path / "a.npy", ids)
    with pytest.raises(UserError, match=r"a\.npy: id 1000 at position 2500001 is beyond the vocabulary of 1000"):
        open_ids(tmp_path / "a.npy", vocab_size=1000)
    open_ids(tmp_path / "a.npy", vocab_size=1001)


def test_d14_offsets_beyond_4_gb_read_the_right_ids(tmp_path: Path) -> None:
    """A sparse file of 5 GB, whose last ids alone are written."""
    path = tmp_path / "large.bin"
    count = 5_000_000_000 // 4
    last = np.arange(1, 65, dtype=np.uint32)
    with path.open("wb") as stream:
        stream.truncate(count * 4)
        stream.seek(count * 4 - last.nbytes)
        stream.write(last.tobytes())
    store = TokenStore(map_ids(path, "uint32"), eod=0, fingerprint="large")
    assert isinstance(store.tokens, np.memmap)
    assert len(store) == count
    assert store.read(count - 64, count).tolist() == last.tolist()
    context = 1_000_000
    windows = (count - 1) // context
    batch = list(validation_batches(store, 1, context, limit=2))[-1]
    tail = store.read((windows - 1) * context, windows * context + 1)
    assert batch.tokens[0].tolist() == tail.tolist()
    assert store.read(count - 65, count - 63).tolist() == [0, 1]


def test_several_files_are_one_stream_across_their_borders(tmp_path: Path, open_ids: Open) -> None:
    ids = np.arange(2, 302, dtype=np.uint32)
    for i, part in enumerate(np.split(ids, [50, 51, 180]), start=8):
        np.save(tmp_path / f"shard_{i}.npy", part)
    corpus = open_ids(tmp_path / "shard_*.npy", validation_fraction=0.25)
    assert len(corpus.train) == 225
    assert corpus.train.tokens.tolist() == ids[:225].tolist()
    assert corpus.train.read(48, 182).tolist() == ids[48:182].tolist()
    assert corpus.validation.tokens.tolist() == ids[225:].tolist()


def test_the_held_out_end_begins_with_a_document(tmp_path: Path, open_ids: Open) -> None:
    ids = np.array(([5] * 9 + [1]) * 30, np.uint32)
    np.save(tmp_path / "a.npy", ids)
    corpus = open_ids(tmp_path / "a.npy", validation_fraction=0.1)
    assert corpus.train.tokens[-1] == 1
    assert len(corpus.validation) == 20


def test_files_to_validate_on_are_a_split_of_their_own(tmp_path: Path, open_ids: Open) -> None:
    np.full(100, 3, np.uint16).tofile(tmp_path / "train.bin")
    np.full(50, 4, np.uint16).tofile(tmp_path / "val.bin")
    corpus = open_ids(tmp_path / "train.bin", validation_paths=str(tmp_path / "val.bin"), vocab_size=50257)
    assert (len(corpus.train), len(corpus.validation)) == (100, 50)
    assert [each["split"] for each in corpus.describe()["files"]] == ["train", "validation"]
    with pytest.raises(UserError, match="is the same as"):
        open_ids(tmp_path / "train.bin", validation_paths=str(tmp_path / "train.bin"), vocab_size=50257)


def test_ids_of_a_tokenizer_json_are_checked_against_it_and_can_be_shown(tmp_path: Path, open_ids: Open) -> None:
    tokenizer = train_bpe(iter(["some text to learn from " * 9]), 262)
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer.to_dict()["definition"]))
    ids = np.concatenate([tokenizer.encode("some text "), [tokenizer.eod]] * 20).astype(np.uint16)
    ids.tofile(tmp_path / "a.bin")
    keys = {"tokenizer": str(tmp_path / "tokenizer.json"), "vocab_size": None, "eod": None}
    corpus = open_ids(tmp_path / "a.bin", **keys)
    assert corpus.tokenizer.eod == tokenizer.eod
    assert corpus.tokenizer.decode(corpus.train.read(0, len(ids) // 20)) == "some text <|endoftext|>"
    np.array([3, 262] * 9, np.uint16).tofile(tmp_path / "b.bin")
    with pytest.raises(UserError, match="id 262 at position 1 is beyond the vocabulary of 262"):
        open_ids(tmp_path / "b.bin", **keys)


def test_what_is_no_row_of_ids_is_refused_by_name(tmp_path: Path, open_ids: Open) -> None:
    path = tmp_path / "a.npy"
    for array, complaint in (
        (np.zeros((3, 4), np.uint16), r"holds uint16 of shape \(3, 4\)"),
        (np.zeros(4, np.int64), "holds int64 of shape"),
        (np.array([None, 3]), "cannot be mapped as ids"),
        (np.zeros(0, np.uint16), "cannot be mapped as ids|is empty"),
    ):
        np.save(path, array)
        with pytest.raises(UserError, match=rf"^{path}: ({complaint})"):
            open_ids(path)
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(UserError, match="cannot be mapped as ids"):
        open_ids(path)
    path.write_bytes(b"")
    with pytest.raises(UserError, match="cannot be mapped as ids"):
        open_ids(path)
    for name, data, complaint in (
        ("a.bin", b"", "is empty"),
        ("b.bin", b"abc", "3 bytes are no whole number of uint16 ids"),
        ("c.txt", b"text", "take data=files for text"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError, match=complaint):
            open_ids(tmp_path / name, vocab_size=1000)


def test_the_end_of_document_must_be_one_of_the_ids(tmp_path: Path, open_ids: Open) -> None:
    np.full(100, 3, np.uint16).tofile(tmp_path / "a.bin")
    with pytest.raises(UserError, match=r"data\.eod=1000 is not an id below data\.vocab_size=1000"):
        open_ids(tmp_path / "a.bin", vocab_size=1000, eod=1000)


@pytest.mark.parametrize("eod", [None, 0, 7])
def test_synthetic_ids_are_the_same_every_time_and_use_the_vocabulary(eod: int | None, cache: Path) -> None:
    config = DataConfig(source="synthetic", tokenizer="ids", vocab_size=300, eod=eod, tokens=200_000)
    corpus, again = open_corpus(config, cache), open_corpus(config, cache)
    ids = np.concatenate([corpus.train.tokens, corpus.validation.tokens])
    assert len(ids) == 200_000
    assert np.unique(ids).tolist() == list(range(300))
    assert corpus.tokenizer.eod == (299 if eod is None else eod)
    assert corpus.train.fingerprint == again.train.fingerprint
    assert not cache.exists()


def test_synthetic_documents_repeat_themselves() -> None:
    """What a model with attention can use and a bigram cannot: the same id some phrase length earlier."""
    tokenizer = IdTokenizer(512, 511)
    ids = synthetic(50_000, tokenizer).astype(int)
    repeats = max(np.mean(ids[lag:] == ids[:-lag]) for lag in range(8, 33))
    assert np.mean([any(ids[i] == ids[i - lag] for lag in range(8, 33)) for i in range(100, 2000)]) > 0.7
    assert repeats < 0.5
