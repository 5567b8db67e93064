"""Text to ids and back, and the promise that no text ever becomes a control token."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from dsv3fp8.data import load_tokenizer
from dsv3fp8.data.bpe import train_bpe
from dsv3fp8.data.text import cut
from dsv3fp8.data.tokenizer import ByteTokenizer, IdTokenizer, SubwordTokenizer, read_tokenizer_json
from dsv3fp8.errors import UserError

TEXT = "def f(x):\n    return x + 1\n\n\nclass A:\n    '''naïve café 你好 😀'''\n    pass\n" * 8


@pytest.fixture(scope="module")
def bpe() -> SubwordTokenizer:
    return train_bpe(iter([TEXT]), 300)


def tokenizer_json(tmp_path: Path, tokens: list[AddedToken], **model: Any) -> Path:
    """A byte-level BPE of somebody else's, with added tokens."""
    engine = Tokenizer(models.BPE(**model))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    engine.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False))
    engine.add_tokens(tokens)
    path = tmp_path / "tokenizer.json"
    engine.save(str(path))
    return path


@settings(derandomize=True, deadline=None)
@given(st.text())
def test_bytes_are_those_of_utf8_and_come_back(text: str) -> None:
    ids = ByteTokenizer().encode(text)
    assert ids.dtype == np.uint32
    assert bytes(ids.tolist()) == text.encode()
    assert ByteTokenizer().decode(ids) == text


def test_bytes_that_are_no_utf8_show_as_the_replacement_character() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([0xE4, 0x41]) == "\ufffdA"
    assert tokenizer.decode([0x41, tokenizer.eod, 0x42]) == "A<|endoftext|>B"
    with pytest.raises(ValueError, match="257"):
        tokenizer.decode([0, 257])


def test_d13_special_text_in_a_document_is_plain_text(fixtures: Path, bpe: SubwordTokenizer) -> None:
    text = (fixtures / "special_tokens.txt").read_text()
    assert "<|endoftext|>" in text
    for tokenizer in (ByteTokenizer(), bpe):
        ids = tokenizer.encode(text)
        assert tokenizer.eod not in ids
        assert tokenizer.decode(ids) == text


def test_d13_no_added_token_of_a_tokenizer_json_is_read_from_text(fixtures: Path, tmp_path: Path) -> None:
    special = [AddedToken(each, special=True) for each in ("<s>", "</s>", "[PAD]")]
    # As in DeepSeek-V3's own file, where <｜User｜> is not marked special.
    path = tokenizer_json(tmp_path, [*special, AddedToken("<｜User｜>", special=False), AddedToken("<|endoftext|>")])
    tokenizer = read_tokenizer_json(path)
    text = (fixtures / "special_tokens.txt").read_text() + "<｜User｜>"
    ids = tokenizer.encode(text)
    assert max(ids) < 280
    assert tokenizer.decode(ids) == text


def test_d13_one_token_for_begin_and_end_still_ends_documents(tmp_path: Path) -> None:
    path = tokenizer_json(tmp_path, [AddedToken("<|endoftext|>", special=True)])
    tokenizer = read_tokenizer_json(path, "<|endoftext|>")
    assert tokenizer.eod == 280
    assert not np.isin(tokenizer.eod, tokenizer.encode("a<|endoftext|>b"))


def test_d13_a_vocabulary_that_spells_a_control_token_is_refused(tmp_path: Path) -> None:
    engine = Tokenizer(models.WordLevel({"[UNK]": 0, "</s>": 1, "word": 2}, unk_token="[UNK]"))
    engine.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    engine.add_special_tokens(["[UNK]", "</s>"])
    engine.save(str(tmp_path / "words.json"))
    tokenizer = read_tokenizer_json(tmp_path / "words.json")
    assert tokenizer.encode("word other").tolist() == [2, 0]
    with pytest.raises(UserError, match=r"words\.json reads the text '</s>' as its control token 1 even inside a document"):
        tokenizer.encode("word </s>")


def test_added_tokens_that_are_text_are_kept(tmp_path: Path) -> None:
    path = tokenizer_json(tmp_path, [AddedToken("</s>", special=True), AddedToken("        ", normalized=False)])
    tokenizer = read_tokenizer_json(path)
    assert tokenizer.encode("a        b").tolist().count(281) == 1


def test_truncation_and_padding_written_in_the_file_are_off(tmp_path: Path) -> None:
    path = tokenizer_json(tmp_path, [AddedToken("</s>", special=True)])
    engine = Tokenizer.from_file(str(path))
    engine.enable_truncation(4)
    engine.enable_padding(length=50)
    engine.save(str(path))
    tokenizer = read_tokenizer_json(path)
    for text in ("a", TEXT):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_fingerprint_is_of_the_ids_not_of_the_place(tmp_path: Path) -> None:
    path = tokenizer_json(tmp_path, [AddedToken(each, special=True) for each in ("<mine>", "</s>")])
    (tmp_path / "copy.json").write_bytes(path.read_bytes())
    assert read_tokenizer_json(path).fingerprint == read_tokenizer_json(tmp_path / "copy.json").fingerprint
    assert read_tokenizer_json(path).fingerprint != read_tokenizer_json(path, "<mine>").fingerprint


def test_the_end_of_document_is_found_by_key_or_by_known_name(tmp_path: Path) -> None:
    path = tokenizer_json(tmp_path, [AddedToken(each, special=True) for each in ("<mine>", "</s>")])
    assert read_tokenizer_json(path).eod == 281
    assert read_tokenizer_json(path, "<mine>").eod == 280
    assert read_tokenizer_json(path, 7).eod == 7
    with pytest.raises(UserError, match=r"data\.eod=<other>: .* has no such token; it has <mine>, </s>"):
        read_tokenizer_json(path, "<other>")
    with pytest.raises(UserError, match=r"data\.eod=282: .* has no such id \(its ids end at 281\)"):
        read_tokenizer_json(path, 282)


def test_a_tokenizer_without_a_known_end_of_document_says_what_it_has(tmp_path: Path) -> None:
    path = tokenizer_json(tmp_path, [AddedToken("<mine>", special=True)])
    with pytest.raises(UserError, match=r"data\.eod is not set and .* name one of its own: <mine>"):
        read_tokenizer_json(path)


@pytest.mark.parametrize("content", [None, "{", "{}", '{"model": 3}'])
def test_a_path_that_is_no_tokenizer_json_is_refused_by_name(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=rf"^data\.tokenizer={path}: "):
        read_tokenizer_json(path)


def test_bpe_has_the_size_asked_for_or_what_the_text_allows(bpe: SubwordTokenizer) -> None:
    assert bpe.vocab_size == 300
    assert bpe.eod == 299
    assert 257 <= train_bpe(iter(["ab ab"]), 1000).vocab_size < 300


def test_bpe_reads_any_text_and_gives_it_back(bpe: SubwordTokenizer) -> None:
    for text in (TEXT, "", "\0\x7f\r\n\t  x", "".join(map(chr, range(1, 700))), "😀\u202e\ufeff"):
        assert bpe.decode(bpe.encode(text)) == text
    assert len(bpe.encode(TEXT)) < len(TEXT.encode()) / 2


def test_bpe_is_the_same_when_trained_again(bpe: SubwordTokenizer) -> None:
    assert train_bpe(iter([TEXT]), 300).to_dict() == bpe.to_dict()


@settings(derandomize=True, deadline=None, max_examples=200)
@given(text=st.text(alphabet="ab1'. \n\té", min_size=1, max_size=120), size=st.integers(4, 30))
def test_pieces_of_a_document_give_the_tokens_of_the_whole(text: str, size: int, bpe: SubwordTokenizer) -> None:
    pieces = list(cut([text], size))
    if all(piece.endswith("\n") for piece in pieces[:-1]):  # cut at lines, as all text with lines is
        assert np.concatenate(bpe.encode_batch(pieces)).tolist() == bpe.encode(text).tolist()


def test_ids_are_their_own_text() -> None:
    tokenizer = IdTokenizer(129280, 1)
    assert tokenizer.encode("17 129279\n0").tolist() == [17, 129279, 0]
    assert tokenizer.decode([17, 129279]) == "17 129279"
    for text in ("17 x", "129280", "-1", "1.5"):
        with pytest.raises(UserError, match="is not an id below 129280"):
            tokenizer.encode(text)


def test_a_saved_tokenizer_is_the_same_one(tmp_path: Path, bpe: SubwordTokenizer) -> None:
    given_path = tokenizer_json(tmp_path, [AddedToken("<mine>", special=True)])
    for tokenizer in (ByteTokenizer(), IdTokenizer(9, 4), bpe, read_tokenizer_json(given_path, "<mine>")):
        tokenizer.save(tmp_path / "saved")
        loaded = load_tokenizer(tmp_path / "saved")
        assert type(loaded) is type(tokenizer)
        assert loaded.to_dict() == tokenizer.to_dict()
        assert (loaded.name, loaded.vocab_size, loaded.eod) == (tokenizer.name, tokenizer.vocab_size, tokenizer.eod)
        assert loaded.encode("3 1").tolist() == tokenizer.encode("3 1").tolist()


@pytest.mark.parametrize("content", [None, "", "{}", "[]", json.dumps({"kind": "subword"})])
def test_a_file_that_is_no_saved_tokenizer_is_refused_by_name(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=rf"^{path}: is not a saved tokenizer"):
        load_tokenizer(path)


def test_a_saved_tokenizer_can_be_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        ByteTokenizer().save(tmp_path / "tokenizer.json")
    finally:
        os.umask(before)
    assert (tmp_path / "tokenizer.json").stat().st_mode & 0o777 == 0o640
