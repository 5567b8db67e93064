"""Tokenizer files for `transformers`, and out of them.

An exported tokenizer starts a text with the end of a document, as a run's windows and `generate` do, and reads the text of a
control token as text. A tokenizer.json that was somebody's own stays as it is.
"""

from __future__ import annotations

import json
from typing import Any

from dsv3fp8.data.bpe import END
from dsv3fp8.data.tokenizer import ByteTokenizer, SubwordTokenizer, Tokenizer

FILE = "tokenizer.json"


def tokenizer_files(tokenizer: Tokenizer, context: int) -> dict[str, Any]:
    """{file name: JSON content}; empty for ids whose text is not known."""
    if isinstance(tokenizer, ByteTokenizer):
        definition = byte_definition()
    elif isinstance(tokenizer, SubwordTokenizer):
        definition = tokenizer.to_dict()["definition"]
    else:
        return {}
    end = _written(definition, tokenizer.eod)
    if definition.get("post_processor") is None:
        definition = {**definition, "post_processor": _starts_with(end, tokenizer.eod)}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        "pad_token": end,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
    }
    return {FILE: definition, "tokenizer_config.json": settings}


def generation_config(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """Where text begins and ends, and that ids which no text has are never drawn, as in `generate`."""
    settings: dict[str, Any] = {"bos_token_id": tokenizer.eod, "eos_token_id": tokenizer.eod, "pad_token_id": tokenizer.eod}
    if tokenizer.vocab_size < vocab_size:
        settings["suppress_tokens"] = list(range(tokenizer.vocab_size, vocab_size))
    return settings


def byte_definition() -> dict[str, Any]:
    """The byte tokenizer as a tokenizer.json: a byte-level BPE without a merge, whose ids are the bytes."""
    from tokenizers import Tokenizer as Engine
    from tokenizers import decoders, models, pre_tokenizers

    letters = _letters()
    engine = Engine(models.BPE({letter: byte for byte, letter in enumerate(letters)}, []))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens([END])
    return json.loads(engine.to_str())


def is_byte_tokenizer(definition: dict[str, Any]) -> bool:
    """Whether the content of a tokenizer.json is an exported byte tokenizer."""
    ours = byte_definition()
    same = ("normalizer", "pre_tokenizer", "added_tokens")
    model = definition.get("model")
    return (
        isinstance(model, dict)
        and all(definition.get(key) == ours[key] for key in same)
        and all(model.get(key) == ours["model"][key] for key in ("type", "vocab", "merges"))
    )


def _letters() -> list[str]:
    """How byte-level tokenizers write each byte: printable ones as they are, the others as letters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _written(definition: dict[str, Any], number: int) -> str:
    """The token of an id."""
    from tokenizers import Tokenizer as Engine

    token = Engine.from_str(json.dumps(definition)).id_to_token(number)
    assert token is not None
    return token


def _starts_with(token: str, number: int) -> dict[str, Any]:
    """A post-processor that puts the token before a text."""
    first, text = {"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }
