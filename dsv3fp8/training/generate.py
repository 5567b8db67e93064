"""`dsv3fp8 generate`: read what a run has learnt, by letting it write.

There is no key-value cache: every token runs the window again, under the run's own recipe. That is slow and simple, and
shows the model exactly as it is trained.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dsv3fp8.config import RunConfig
from dsv3fp8.data import Tokenizer, load_tokenizer
from dsv3fp8.model.transformer import Transformer
from dsv3fp8.schema import build_words, key_values, leaves
from dsv3fp8.training.checkpoint import open_checkpoint
from dsv3fp8.training.checks import device_problems, select_device
from dsv3fp8.training.config import raise_problems
from dsv3fp8.training.run_directory import RunDirectory
from dsv3fp8.training.state import load_state, load_weights

HELP = ("-h", "--help", "help")
# What decoding shows for the first bytes of a character whose last ones are yet to come.
UNFINISHED = "\N{REPLACEMENT CHARACTER}"


@dataclass
class GenerateConfig:
    """The keys of the command."""

    # Run directory to take the checkpoint and the tokenizer from.
    run: str
    # Text to go on from. Empty: the start of a document.
    prompt: str = ""
    # Tokens to write at most; the end of a document ends it earlier.
    tokens: int = 200
    # Divides the logits: below 1 keeps to what is likely. 0: always the likeliest token.
    temperature: float = 0.8
    # Draw among so many likeliest tokens. null: among all.
    top_k: int | None = None
    # Of the draws.
    seed: int = 0
    # Checkpoint to take. null: the newest.
    step: int | None = None
    # auto, cpu or cuda.
    device: str = "auto"

    def validate(self) -> None:
        """Raise UserError with every value that makes no sense."""
        problems = []
        if self.tokens < 1:
            problems.append(f"tokens={self.tokens} must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            problems.append(f"temperature={self.temperature} must be 0 or above")
        if self.top_k is not None and self.top_k < 1:
            problems.append(f"top_k={self.top_k} must be at least 1, or null for all tokens")
        if self.seed < 0:
            problems.append(f"seed={self.seed} must be at least 0")
        raise_problems(problems)


def main(arguments: list[str]) -> int:
    """Write text to standard output as it is sampled; the exit status."""
    if any(argument in HELP for argument in arguments):
        print(help_text())
        return 0
    config = build_words(GenerateConfig, key_values(arguments, 'run=runs/tiny-dsv3 prompt="def "'))
    model, tokenizer, window = load(config)
    sys.stdout.write(config.prompt)
    for text in stream(model, tokenizer, config, window):
        sys.stdout.write(text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return 0


def help_text() -> str:
    """The keys with their defaults and comments."""
    keys = "\n".join(f"  {key:<14}{note}" for key, _, note in leaves(GenerateConfig))
    return f'Usage: dsv3fp8 generate run=RUN_DIR [prompt="def main("] [key=value …]\n\n{keys}'


def load(config: GenerateConfig) -> tuple[Transformer, Tokenizer, int]:
    """(model in evaluation mode, tokenizer, longest context it was trained on) of a run; UserError if it has none."""
    checkpoint = open_checkpoint(config.run, config.step)
    raise_problems(device_problems("device", config.device))
    device = select_device(config.device)
    tokenizer = load_tokenizer(RunDirectory(Path(config.run)).tokenizer)
    trained = RunConfig.from_dict(load_state(checkpoint)[1])
    with device:
        model = Transformer(trained.model, trained.recipe)
    model.initialize(seed=0)  # defines what a checkpoint leaves out, such as counters of the current step
    load_weights(checkpoint, model)
    model.eval()
    return model, tokenizer, trained.training.context


def stream(model: Transformer, tokenizer: Tokenizer, config: GenerateConfig, window: int) -> Iterator[str]:
    """Pieces of the text that follows the prompt, up to the end of a document."""
    ids = [tokenizer.eod, *(int(each) for each in tokenizer.encode(config.prompt))]
    start, shown = len(ids), ""
    generator = torch.Generator().manual_seed(config.seed)
    device = model.embedding.device
    for _ in range(config.tokens):
        logits = model.logits(torch.tensor([ids[-window:]], device=device))[0, -1, : tokenizer.vocab_size]
        chosen = choose(logits.float().cpu(), config.temperature, config.top_k, generator)
        if chosen == tokenizer.eod:
            break
        ids.append(chosen)
        text = tokenizer.decode(ids[start:])
        if not text.endswith(UNFINISHED):
            yield text[len(shown) :]
            shown = text
    rest = tokenizer.decode(ids[start:])[len(shown) :]
    if rest:
        yield rest


def choose(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """One id from logits fp32 [V]: the likeliest at temperature 0 (the lowest of equals), else drawn."""
    if temperature == 0:
        return int((logits == logits.max()).nonzero()[0])
    scaled = logits.double() / temperature
    if top_k is not None and top_k < len(scaled):
        keep = torch.sort(scaled, descending=True, stable=True).indices[:top_k]
        scaled = torch.full_like(scaled, float("-inf")).scatter(0, keep, scaled[keep])
    return int(torch.multinomial(torch.softmax(scaled, dim=0), 1, generator=generator))
