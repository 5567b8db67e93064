"""Tokenizer files that `transformers` loads: the ids of a run's own tokenizer, behind the end of a document."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from dsv3fp8.data.bpe import train_bpe
from dsv3fp8.data.tokenizer import ByteTokenizer, IdTokenizer, SubwordTokenizer, Tokenizer
from dsv3fp8.hub.tokenizer import generation_config, is_byte_tokenizer, tokenizer_files

TEXTS = ("", "def main(x):\n\treturn  x", "é € 数 \x00\x7f\r\n", "a <|endoftext|> inside a text", "".join(map(chr, range(256))))


def bpe() -> SubwordTokenizer:
    return train_bpe(iter(["def main(x): return x\n" * 30, "hello world " * 40] * 5), 300)


def theirs(tokenizer: Tokenizer, directory: Path) -> Any:
    for name, content in tokenizer_files(tokenizer, 64).items():
        (directory / name).write_text(json.dumps(content, ensure_ascii=False))
    return AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("make", [ByteTokenizer, bpe])
def test_transformers_reads_texts_as_the_run_does(make: Any, tmp_path: Path) -> None:
    """D13: the text of a control token is text, and one id begins and ends documents."""
    ours = make()
    loaded = theirs(ours, tmp_path)
    for text in TEXTS:
        ids = loaded(text)["input_ids"]
        assert ids == [ours.eod, *ours.encode(text).tolist()]
        assert loaded.decode(ids, skip_special_tokens=True) == ours.decode(ids[1:]) == text
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (ours.eod,) * 3
    assert len(loaded) == ours.vocab_size
    assert loaded.model_max_length == 64


def test_somebodys_own_post_processor_stays() -> None:
    ours = bpe()
    own = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    definition = ours.to_dict()["definition"] | {"post_processor": own}
    theirs = SubwordTokenizer(json.dumps(definition), "theirs", ours.eod)
    assert tokenizer_files(theirs, 64)["tokenizer.json"]["post_processor"] == own


def test_an_exported_byte_tokenizer_is_known_again() -> None:
    assert is_byte_tokenizer(tokenizer_files(ByteTokenizer(), 64)["tokenizer.json"])
    assert not is_byte_tokenizer(tokenizer_files(bpe(), 64)["tokenizer.json"])
    assert not is_byte_tokenizer({"model": None})


def test_ids_without_text_have_no_files() -> None:
    assert tokenizer_files(IdTokenizer(512, 0), 64) == {}


def test_ids_that_no_text_has_are_never_drawn() -> None:
    """A vocabulary is rounded up for the head's GEMM; `generate` leaves those ids out too."""
    assert generation_config(ByteTokenizer(), 260) == {
        "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256, "suppress_tokens": [257, 258, 259],
    }  # fmt: skip
    assert "suppress_tokens" not in generation_config(ByteTokenizer(), 257)
