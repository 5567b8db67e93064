"""Every key that makes no sense is refused by name before a file is looked at."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from dsv3fp8.config import load_config
from dsv3fp8.data import DataConfig
from dsv3fp8.errors import UserError

FILES: dict[str, Any] = {"source": "files", "paths": ["a.txt"]}
IDS: dict[str, Any] = {"source": "memmap", "paths": "a.bin", "tokenizer": "ids", "vocab_size": 300, "eod": 1}


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"paths": ["a.txt"]}, "data.paths=['a.txt'] means nothing under data.source=python: it is for files, memmap"),
        ({"dataset": "x"}, "data.dataset=x means nothing under data.source=python: take data=huggingface"),
        ({"site_packages": True, **FILES}, "data.site_packages=True means nothing under data.source=files"),
        ({"tokens": 5}, "data.tokens=5 means nothing under data.source=python: take data=synthetic"),
        ({"source": "files"}, "data.paths is empty"),
        ({"source": "huggingface"}, "data.dataset is empty"),
        ({"source": "huggingface", "dataset": "x", "validation_split": "train"}, "data.validation_split=train is the training"),
        ({"validation_fraction": 0.0}, "data.validation_fraction=0.0 must be"),
        ({"validation_fraction": 1.0}, "data.validation_fraction=1.0 must be"),
        ({"validation_fraction": float("nan")}, "data.validation_fraction=nan must be"),
        ({"workers": -1}, "data.workers=-1 must be at least 0"),
        ({"max_bytes": 0}, "data.max_bytes=0 must be at least 1"),
        ({"tokenizer": "ids", "vocab_size": 9}, "data.tokenizer=ids: data.source=python is text"),
        ({"vocab_size": 9000}, "data.vocab_size=9000: data.tokenizer=bytes has its own"),
        ({"tokenizer": "bpe", "vocab_size": 256}, "data.vocab_size=256 must be from 257"),
        ({"tokenizer": "bpe", "eod": "</s>"}, "data.eod=</s>: data.tokenizer=bpe has its own"),
        ({**IDS, "tokenizer": "bpe"}, "data.tokenizer=bpe is trained on text"),
        ({**IDS, "vocab_size": None}, "data.vocab_size is not set"),
        ({**IDS, "eod": None}, "data.eod is not set: give the id"),
        ({**IDS, "eod": "</s>"}, "data.eod=</s> must be an id"),
        ({"source": "synthetic", "tokenizer": "bytes"}, "data.tokenizer=bytes: synthetic data are ids already"),
    ],
)
def test_a_key_that_makes_no_sense_is_named(keys: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError) as caught:
        DataConfig(**keys).validate()
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_complaints_come_at_once() -> None:
    with pytest.raises(UserError, match=r"data\.workers=-1 .*; data\.validation_fraction=2"):
        DataConfig(workers=-1, validation_fraction=2).validate()


@pytest.mark.parametrize(
    "words",
    [
        ["data=python", "data.site_packages=true"],
        ["data=python", "data.tokenizer=bpe", "data.vocab_size=4096"],
        ["data=files", "data.paths=a.txt"],
        ["data=files", "data.paths=[a.txt,b/*.jsonl]", "data.tokenizer=t/tokenizer.json", "data.eod='</s>'"],
        ["data=memmap", "data.paths=train.bin", "data.vocab_size=50257", "data.eod=50256"],
        ["data=huggingface", "data.dataset=some/name"],
        ["data=synthetic"],
    ],
)
def test_every_group_makes_a_valid_config_with_the_keys_its_file_asks_for(words: list[str]) -> None:
    load_config(words).data.validate()


def test_the_examples_of_the_documentation_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    commands = re.findall(r"^\./scripts/train (.*)$", page, re.MULTILINE)
    assert len(commands) >= 8
    for command in commands:
        load_config(shlex.split(command)).data.validate()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(program.replace("/tmp/dsv3fp8-cache", str(tmp_path)), {})
