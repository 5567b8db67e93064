"""A run small enough to be made many times over: a model of a few thousand parameters on a few files of text."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv3fp8.config import RunConfig, load_config
from dsv3fp8.training.metrics import TIMING_FIELDS, read_metrics

NANO = (
    "data=files", "logging=quiet", "optimizer.lr=0.002", "schedule.warmup=3",
    "model.dim=32", "model.layers=2", "model.heads=2", "model.q_latent=16", "model.kv_latent=16", "model.head_nope=8",
    "model.head_rope=8", "model.head_v=8", "model.ffn=32", "model.expert_ffn=16", "model.experts=4", "model.groups=2",
    "model.kept_groups=1",
    "training.steps=10", "training.batch=2", "training.context=32", "training.validate_every=5",
    "training.validation_batches=2", "training.checkpoint_every=5",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    """Such small tensors gain nothing from threads, and lose much where other tests run beside."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def text_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of text files, and of the cache of their tokens."""
    directory = tmp_path_factory.mktemp("text")
    for file in range(8):
        lines = [f"line {line * file % 97} of file {file}\n" for line in range(400)]
        (directory / f"{file}.txt").write_text("".join(lines))
    return directory


@pytest.fixture(scope="session")
def data_words(text_files: Path) -> list[str]:
    """The command-line words of a nano run, but for its directory."""
    return [*NANO, f"data.paths={text_files}/*.txt", f"data.cache_dir={text_files}/cache"]


@pytest.fixture(scope="session")
def nano_at(data_words: list[str]) -> Callable[..., RunConfig]:
    """nano_at(run_dir, "key=value", …): the settings of a nano run anywhere."""
    return lambda run_dir, *words: load_config([*data_words, *words, f"run_dir={run_dir}"])


@pytest.fixture
def nano(nano_at: Callable[..., RunConfig], tmp_path: Path) -> Callable[..., RunConfig]:
    """nano("key=value", …, run="name"): the settings of a nano run in tmp_path/name."""
    return lambda *words, run="run": nano_at(tmp_path / run, *words)


@pytest.fixture
def curve() -> Callable[[str | Path], list[dict[str, Any]]]:
    """curve(run_dir): a run's metrics without those that hang on the clock."""

    def read(run_dir: str | Path) -> list[dict[str, Any]]:
        return [
            {name: value for name, value in record.items() if name not in TIMING_FIELDS}
            for record in read_metrics(Path(run_dir) / "metrics.jsonl")
        ]

    return read
