"""Run directories as training leaves them, with curves that are made up."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dsv3fp8.config import RunConfig, load_config
from dsv3fp8.training.metrics import MetricsFile

STEPS = 200
SMALL = (
    "model.dim=32", "model.layers=2", "model.heads=2", "model.q_latent=16", "model.kv_latent=16", "model.head_nope=8",
    "model.head_rope=8", "model.head_v=8", "model.ffn=32", "model.expert_ffn=16", "model.experts=4", "model.groups=2",
    "model.kept_groups=1", "model.vocab_size=320", "training.batch=2", "training.context=32",
)  # fmt: skip
CORPUS = {
    "source": "Python 3.11 standard library", "sha256": "ab" * 32,
    "tokenizer": {"name": "bytes", "vocab_size": 257, "sha256": "cd" * 32},
    "train": {"tokens": 30_000}, "validation": {"tokens": 1_000}, "bigram": {"loss": 2.47},
}  # fmt: skip
ENVIRONMENT = {
    "device": "cpu (x86_64)", "python": "3.11.7", "packages": {"torch": "2.13.0"}, "commit": "0123456789abcdef0123",
    "command": "train",
}  # fmt: skip


def falling(seed: int, noise: float = 0.01, offset: float = 0.0) -> Callable[[int], float]:
    """A loss from 5.5 to some 2, with noise of its own for each seed and an offset (a share of the loss) for all of it."""
    draws = np.random.default_rng(seed).standard_normal(100_000) * noise
    return lambda step: float((2.0 + 3.5 * math.exp(-step / 40)) * (1 + offset + draws[step]))


@functools.cache
def settings(recipe: str, *words: str) -> RunConfig:
    """Of a run with a model that builds in milliseconds."""
    return load_config([*SMALL, f"recipe={recipe}", "logging=quiet", *words])


def make_run(
    directory: Path,
    recipe: str = "bf16",
    seed: int = 0,
    loss: Callable[[int], float] | None = None,
    validation: Callable[[int], float] | None = None,
    words: Sequence[str] = (),
    steps: int = STEPS,
    stop: int | None = None,
    corpus: dict[str, Any] | None = None,
    fields: Callable[[int], dict[str, Any]] | None = None,
) -> Path:
    """A run directory. loss, validation: at a step. stop: the last step that was logged. fields: more of a record."""
    loss = loss or falling(seed)
    validation = validation or loss
    directory.mkdir(parents=True)
    config = settings(recipe, *words)
    training = dataclasses.replace(config.training, seed=seed, steps=steps)
    dataclasses.replace(config, training=training, run_dir=str(directory)).save(directory / "config.yaml")
    (directory / "corpus.json").write_text(json.dumps(CORPUS | (corpus or {})))
    (directory / "environment.json").write_text(json.dumps(ENVIRONMENT))
    metrics, skipped = MetricsFile(directory / "metrics.jsonl", 0), 0
    for step in range(1, (stop or steps) + 1):
        skipped += not math.isfinite(loss(step))
        checked = step % 20 == 0 or step == steps
        record = {
            "step": step, "loss": loss(step), "grad_norm": 1.0 + 4 / step if math.isfinite(loss(step)) else math.nan,
            "skipped": skipped, "expert_load_max": 1.2 + 1 / step, "expert_load_entropy": 0.99 - 0.1 / step,
            "flushed_share": 1e-4 if step == 1 or step % 10 == 0 else None, "seconds": 0.1 * step,
            "tokens_per_second": 1000.0 + step % 7, "rss_peak_gb": 1.5, "cuda_allocated_peak_gb": None,
            "validation_loss": validation(step) if checked else None,
        }  # fmt: skip
        metrics.append(record | (fields(step) if fields else {}))
    metrics.close()
    return directory
