"""Opening a corpus: the default one, its cache, and what the run directory is told about it."""

import contextlib
import json
import os
import re
import resource
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dsv3fp8.data import Corpus, DataConfig, open_corpus
from dsv3fp8.data import corpus as corpus_module
from dsv3fp8.data.cache import TEMPORARY
from dsv3fp8.data.store import TokenWriter
from dsv3fp8.errors import UserError

Open = Callable[..., Corpus]


@pytest.fixture(scope="module")
def python_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("python")


@pytest.fixture(scope="module")
def python(python_cache: Path) -> Corpus:
    return open_corpus(DataConfig(), python_cache)


def test_the_default_corpus_is_the_standard_library_of_this_interpreter(python: Corpus) -> None:
    described = python.describe()
    names = [each["name"] for each in described["files"]]
    assert len(names) > 300
    assert len(names) == len(set(names))
    assert {"ast.py", "json/decoder.py"} <= set(names)
    assert not any("site-packages" in name or "__pycache__" in name for name in names)
    stdlib = Path(sysconfig.get_path("stdlib"))
    text = (stdlib / "json" / "decoder.py").read_bytes()
    file = next(each for each in described["files"] if each["name"] == "json/decoder.py")
    assert file["bytes"] == len(text)
    store = getattr(python, file["split"])
    assert text in store.read(0, len(store)).astype(np.uint8).tobytes()


def test_files_of_the_default_corpus_that_are_not_utf8_are_left_out_and_reported(python: Corpus) -> None:
    described = python.describe()
    stdlib = Path(sysconfig.get_path("stdlib"))
    broken = set()
    for each in described["files"]:
        try:
            (stdlib / each["name"]).read_bytes().decode()
        except UnicodeDecodeError:
            broken.add(each["name"])
    assert set(described["unreadable"]) == broken
    assert {each["name"] for each in described["files"] if each["split"] == "unreadable"} == broken
    assert ("not UTF-8" in python.summary()) == bool(broken)


def test_every_byte_of_the_default_corpus_is_in_one_of_the_splits(python: Corpus) -> None:
    described = python.describe()
    for name in ("train", "validation"):
        sizes, store = described[name], getattr(python, name)
        assert sizes["tokens"] == len(store) == sizes["bytes"] + sizes["documents"]
        assert int((np.asarray(store.tokens) == 256).sum()) == sizes["documents"]
    assert 0.05 <= described["validation"]["bytes"] / (described["train"]["bytes"] + described["validation"]["bytes"]) < 0.075


def test_the_default_corpus_is_not_tokenized_again_when_it_is_known(
    python: Corpus, python_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(corpus_module, "tokenize")
    again = open_corpus(DataConfig(), python_cache)
    assert again.describe() == python.describe()
    assert again.train.fingerprint == python.train.fingerprint
    assert isinstance(again.train.tokens, np.memmap)


def test_the_bigram_of_the_default_corpus_is_far_below_guessing(python: Corpus) -> None:
    baseline = python.bigram()
    assert 2.2 < baseline.loss < 2.8
    assert baseline.bits_per_byte == pytest.approx(baseline.loss / np.log(2), rel=1e-3)


def test_the_description_is_plain_and_says_what_the_ids_are(python: Corpus) -> None:
    described = json.loads(json.dumps(python.describe()))
    assert described["tokenizer"]["name"] == "bytes"
    assert described["tokenizer"]["vocab_size"] == 257
    assert len(described["sha256"]) == len(described["files"][0]["sha256"]) == 64


def test_site_packages_are_added_by_key(cache: Path) -> None:
    corpus = open_corpus(DataConfig(site_packages=True, max_bytes=100_000), cache)
    names = [each["name"] for each in corpus.describe()["files"]]
    assert "site-packages/numpy/__init__.py" in names
    assert "ast.py" in names


def test_a_corpus_is_known_by_its_contents_not_by_its_place(tmp_path: Path, open_files: Open) -> None:
    hashes = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text("the same text\n" * 9)
        hashes.append(open_files(tmp_path / folder / "x.txt").describe()["sha256"])
    assert hashes[0] == hashes[1]
    (tmp_path / "b" / "x.txt").write_text("other, equally long\n" * 9)
    assert open_files(tmp_path / "b" / "x.txt").describe()["sha256"] != hashes[0]


def test_bpe_is_trained_on_the_training_split_alone_and_once(tmp_path: Path, open_files: Open, cache: Path) -> None:
    (tmp_path / "a.txt").write_text("aaaa bbbb " * 200)
    (tmp_path / "b.txt").write_text("zqzq " * 200)
    keys = {"tokenizer": "bpe", "vocab_size": 300, "validation_paths": str(tmp_path / "b.txt")}
    corpus = open_files(tmp_path / "a.txt", **keys)
    vocabulary = corpus.tokenizer.to_dict()["definition"]["model"]["vocab"]
    assert any("bbb" in token for token in vocabulary)
    assert not any("zq" in token for token in vocabulary)
    assert corpus.tokenizer.decode(corpus.validation.read(0, len(corpus.validation))) == "zqzq " * 200 + "<|endoftext|>"
    assert corpus.validation.bytes == 1000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_module, "train_bpe", None)
        again = open_files(tmp_path / "a.txt", **keys)
    assert again.tokenizer.to_dict() == corpus.tokenizer.to_dict()


def test_a_bpe_can_be_trained_on_a_part_of_a_large_corpus(tmp_path: Path, open_files: Open) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "word{i:03} "}}\n' for i in range(1000)))
    corpus = open_files(tmp_path / "a.jsonl", tokenizer="bpe", vocab_size=2000, bpe_training_bytes=2000)
    numbers = [token for token in corpus.tokenizer.to_dict()["definition"]["model"]["vocab"] if re.fullmatch(r"\d{3}", token)]
    assert 200 < len(numbers) < 300, "2000 of 8000 bytes"
    assert {token[0] for token in numbers} == set("0123456789"), "from all over the corpus"
    ids = corpus.train.read(0, len(corpus.train))
    assert corpus.tokenizer.decode(ids[:50]).startswith("word000 <|endoftext|>word001 <|endoftext|>")


def test_every_key_that_decides_the_ids_has_an_entry_of_its_own(fixtures: Path, open_files: Open, cache: Path) -> None:
    ids = set()
    for keys in ({}, {"max_bytes": 20}, {"tokenizer": "bpe", "vocab_size": 260}, {"tokenizer": "bpe", "vocab_size": 261}):
        corpus = open_files(fixtures / "plain.jsonl", **keys)
        ids.add(corpus.train.fingerprint)
    assert len(ids) == 4
    assert len(list(cache.glob("tokens-*"))) == 4


def test_an_entry_that_was_interrupted_or_damaged_is_never_used(
    fixtures: Path, open_files: Open, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: TokenWriter) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TokenWriter, "close", interrupt)
        with pytest.raises(KeyboardInterrupt):
            open_files(fixtures / "plain.jsonl")
    assert [path for path in cache.iterdir() if "tokens" in path.name] == []
    expected = open_files(fixtures / "plain.jsonl").train.tokens.tolist()
    (entry,) = cache.glob("tokens-*")
    for name in ("train.npy", "facts.json", "tokenizer.json"):
        whole = (entry / name).read_bytes()
        for damage in (whole[: len(whole) // 2], b"", None):
            (entry / name).unlink()
            if damage is not None:
                (entry / name).write_bytes(damage)
            assert open_files(fixtures / "plain.jsonl").train.tokens.tolist() == expected


def test_what_a_killed_process_left_is_removed_after_a_day(fixtures: Path, open_files: Open, cache: Path) -> None:
    fresh, old = cache / f"{TEMPORARY}fresh", cache / f"{TEMPORARY}old"
    for left in (fresh, old):
        left.mkdir(parents=True)
    two_days_ago = time.time() - 2 * 24 * 3600
    os.utime(old, (two_days_ago, two_days_ago))
    open_files(fixtures / "plain.jsonl")
    assert fresh.exists()
    assert not old.exists()


def test_many_at_once_get_the_same_ids_and_leave_one_entry(fixtures: Path, cache: Path) -> None:
    config = DataConfig(source="files", paths=str(fixtures / "plain.jsonl"), tokenizer="bpe", vocab_size=270)
    found: list[list[int]] = []
    start = threading.Barrier(4)

    def open_it() -> None:
        start.wait()
        found.append(open_corpus(config, cache).train.tokens.tolist())

    threads = [threading.Thread(target=open_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(ids == found[0] for ids in found)
    assert len(list(cache.iterdir())) == 1


def test_k10_a_full_disk_is_named_and_leaves_nothing_behind(tmp_path: Path, open_files: Open, cache: Path) -> None:
    (tmp_path / "a.txt").write_text("some text\n" * 100_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(UserError, match=rf"^data\.cache_dir: cannot write to {cache} \(.*\); free space there"):
            open_files(tmp_path / "a.txt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_a_directory_is_named(fixtures: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = DataConfig(source="files", paths=str(fixtures / "plain.jsonl"), cache_dir=str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match=r"^data\.cache_dir: cannot write to"):
        open_corpus(config)


def test_a_user_without_a_home_is_told_the_key(monkeypatch: pytest.MonkeyPatch, fixtures: Path) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(UserError, match=r"^data\.cache_dir is not set"):
        open_corpus(DataConfig(source="files", paths=str(fixtures / "plain.jsonl")))


def test_the_cache_is_where_the_key_or_the_environment_says(
    fixtures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    paths = str(fixtures / "plain.jsonl")
    for key, place in ((None, "xdg/dsv3fp8"), (str(tmp_path / "own"), "own"), ("~/c", "home/c")):
        open_corpus(DataConfig(source="files", paths=paths, cache_dir=key))
        assert len(list((tmp_path / place).glob("tokens-*"))) == 1
    monkeypatch.delenv("XDG_CACHE_HOME")
    open_corpus(DataConfig(source="files", paths=paths))
    assert (tmp_path / "home/.cache/dsv3fp8").is_dir()


@pytest.mark.parametrize("name", ["len_1_bytes.txt", "len_32_bytes.txt", "len_34_bytes.txt", "plain.txt"])
def test_a_corpus_shorter_than_a_window_is_refused_with_the_keys_to_change(name: str, fixtures: Path, open_files: Open) -> None:
    corpus = open_files(fixtures / name, held_out=False)
    with pytest.raises(UserError, match=r"split of .* too short for one window of training\.context=64 .*training\.context"):
        corpus.check_context(64)


def test_a_window_and_the_token_after_it_are_enough(fixtures: Path, open_files: Open) -> None:
    corpus = open_files(fixtures / "len_32_bytes.txt", validation_paths=str(fixtures / "len_34_bytes.txt"))
    corpus.check_context(32)
    with pytest.raises(UserError, match=r"the training split .* has 33 tokens"):
        corpus.check_context(33)


def test_long_work_is_announced_and_known_work_is_not(fixtures: Path, cache: Path) -> None:
    told: list[str] = []
    config = DataConfig(source="files", paths=str(fixtures / "plain.jsonl"))
    open_corpus(config, cache, told.append)
    assert len(told) == 1
    assert str(cache) in told[0]
    open_corpus(config, cache, told.append)
    assert len(told) == 1


def test_facts_about_large_files_are_remembered_until_the_file_changes(
    tmp_path: Path, open_files: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dsv3fp8.data import fingerprint, sources

    monkeypatch.setattr(fingerprint, "REMEMBER_FROM", 1000)
    path = tmp_path / "a.txt"
    path.write_text("one text\n" * 200)
    read: list[str] = []
    monkeypatch.setattr(sources, "sha256_of_file", lambda path: (read.append(path.name), fingerprint.sha256_of_file(path))[1])

    def reads() -> int:
        read.clear()
        open_files(path)
        return read.count("a.txt")

    assert [reads(), reads()] == [1, 1], "a file this fresh may still change within its date"
    monkeypatch.setattr(fingerprint, "SETTLED", -1.0)
    assert [reads(), reads(), reads()] == [1, 0, 0]
    before = open_files(path).describe()["sha256"]
    path.write_text("two text\n" * 200)
    assert reads() == 1
    assert open_files(path).describe()["sha256"] != before


def test_a_file_that_changes_while_it_is_read_is_noticed(
    tmp_path: Path, open_files: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b"}\n')
    real = corpus_module.survey

    def survey_then_change(*arguments: object) -> object:
        seen = real(*arguments)  # type: ignore[arg-type]
        if path.exists():
            path.write_text('{"text": "a"}\n')
        return seen

    monkeypatch.setattr(corpus_module, "survey", survey_then_change)
    with pytest.raises(UserError, match="changed while it was read"):
        open_files(path)
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    with pytest.raises(UserError, match="no file matches"):
        open_files(path)
