"""Sampling from a checkpoint, and what is said when that cannot be done."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dsv3fp8.errors import UserError
from dsv3fp8.training.generate import GenerateConfig, choose, load, main, stream
from dsv3fp8.training.loop import train


@pytest.fixture(scope="module")
def trained(nano_at: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learnt the few characters of its corpus."""
    run_dir = tmp_path_factory.mktemp("trained")
    words = ["recipe=bf16", "training.steps=60", "optimizer.lr=0.01", "training.checkpoint_every=40"]
    assert train(nano_at(run_dir, *words)) == 0
    return run_dir


def sampled(run: Path, **changes: Any) -> str:
    config = GenerateConfig(run=str(run), **{"tokens": 40, "prompt": "line ", **changes})
    return "".join(stream(*load(config)[:2], config, 32))


def test_the_text_is_repeatable_and_changes_with_the_seed(trained: Path) -> None:
    assert sampled(trained, seed=1) == sampled(trained, seed=1)
    assert sampled(trained, seed=1) != sampled(trained, seed=2)
    assert sampled(trained, temperature=0.0, seed=1) == sampled(trained, temperature=0.0, seed=2)


def test_greedy_text_is_the_likeliest_token_each_time(trained: Path) -> None:
    """Against logits taken one position at a time, the window cut to the context that was trained."""
    config = GenerateConfig(run=str(trained), prompt="line 4 of", temperature=0.0, tokens=30)
    model, tokenizer, window = load(config)
    assert window == 32
    ids = [tokenizer.eod, *tokenizer.encode(config.prompt).tolist()]
    for _ in range(30):
        ids.append(int(model.logits(torch.tensor([ids[-32:]]))[0, -1, :257].argmax()))
    assert "".join(stream(model, tokenizer, config, window)) == tokenizer.decode(ids[10:])


def test_the_command_prints_prompt_and_text(trained: Path, capsys: pytest.CaptureFixture) -> None:
    assert main([f"run={trained}", "prompt=a = b", "tokens=5", "temperature=0", "top_k=3", "step=40"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("a = b")
    assert len(output) == len("a = b") + 5 + 1


def test_characters_of_several_bytes_come_out_whole(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = GenerateConfig(run=str(trained), tokens=7)
    model, tokenizer, window = load(config)
    coming = iter([*"é€x".encode(), 0xE2])  # the last character is cut off by tokens=7
    monkeypatch.setattr("dsv3fp8.training.generate.choose", lambda *_: next(coming))
    assert list(stream(model, tokenizer, config, window)) == ["é", "€", "x", "\N{REPLACEMENT CHARACTER}"]


def test_the_end_of_a_document_ends_the_text(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = GenerateConfig(run=str(trained), tokens=50)
    model, tokenizer, window = load(config)
    coming = iter([ord("a"), tokenizer.eod])
    monkeypatch.setattr("dsv3fp8.training.generate.choose", lambda *_: next(coming))
    assert list(stream(model, tokenizer, config, window)) == ["a"]


def test_draws_follow_the_tempered_distribution_and_top_k() -> None:
    logits = torch.tensor([1.0, 0.0, 2.0, 2.0])
    generator = torch.Generator().manual_seed(0)
    draws = torch.tensor([choose(logits, 0.5, 3, generator) for _ in range(4000)])
    weights = torch.tensor([2.0, -torch.inf, 4.0, 4.0]).softmax(0)
    torch.testing.assert_close(draws.bincount(minlength=4) / 4000, weights, atol=0.03, rtol=0)
    assert choose(logits, 0.0, None, generator) == 2  # the lowest of equals
    assert {choose(logits, 1.0, 1, generator) for _ in range(20)} == {2}


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["tokns=3"], "tokns: no such key; did you mean tokens?"),
        (["prompt"], "prompt: expected key=value"),
        (["temperature=warm"], "temperature=warm: expected a number"),
        (["temperature=-1", "top_k=0"], "temperature=-1.0 must be 0 or above; top_k=0 must be at least 1"),
        (["step=7"], "step=7: run=.* has checkpoints of steps 40, 60"),
        (["device=tpu"], "device=tpu must be one of auto, cpu, cuda"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(trained: Path, words: list[str], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint) as error:
        main([f"run={trained}", *words])
    assert "\n" not in str(error.value)


def test_a_directory_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"run={tmp_path} has no checkpoint"):
        main([f"run={tmp_path}"])
    with pytest.raises(UserError, match="run: no value given"):
        main([])


def test_help_lists_every_key(capsys: pytest.CaptureFixture) -> None:
    assert main(["--help"]) == 0
    output = capsys.readouterr().out
    assert all(f"  {key} " in output for key in GenerateConfig.__dataclass_fields__)
