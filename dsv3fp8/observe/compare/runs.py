"""Run directories as a comparison reads them: settings, corpus, records, and how far each run came."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dsv3fp8.config import RunConfig, load_saved
from dsv3fp8.errors import UserError
from dsv3fp8.observe.compare.recipes import AGAIN, names_of, once_more
from dsv3fp8.schema import shown
from dsv3fp8.training.child import LOG, last_error
from dsv3fp8.training.metrics import read_metrics
from dsv3fp8.training.resume import FREE_GROUPS, FREE_KEYS, flatten
from dsv3fp8.training.run_directory import RunDirectory

# What may differ between runs that are compared. Where files lie is no part of a corpus, whose hash is compared instead.
FREE = FREE_KEYS - {"training.validation_batches"} | {
    "training.seed", "data.paths", "data.validation_paths", "data.tokenizer", "parallel.dp_replicate", "parallel.dp_shard",
    "parallel.expert",
}  # fmt: skip
SHOWN = 8
"""Digits of a hash that a message shows."""
REQUIRED = ("loss", "grad_norm", "skipped")
"""Numbers that training logs at every step, beside the step itself."""
# What a comparison reads of corpus.json and environment.json: (key, type of its value, whether it may be absent or null).
CORPUS = (
    ("source", str, False), ("sha256", str, False), ("tokenizer.name", str, False), ("tokenizer.vocab_size", int, False),
    ("tokenizer.sha256", str, True), ("train.tokens", int, False), ("validation.tokens", int, False), ("bigram", dict, True),
    ("bigram.loss", float, True),
)  # fmt: skip
ENVIRONMENT = (("commit", str, True), ("packages", dict, False))
KINDS = {str: "a text", int: "a whole number", float: "a number", dict: "an object"}

State = Literal["complete", "gave up", "unfinished"]


@dataclass
class ComparedRun:
    """One run directory. records: as logged, by step. recipe: the name it is shown under, known once all runs are."""

    directory: Path
    config: RunConfig
    corpus: Mapping[str, Any]
    environment: Mapping[str, Any]
    records: list[dict[str, Any]]
    recipe: str = ""
    error: str | None = field(default=None)

    @property
    def again(self) -> bool:
        """Whether it is a second run of the same recipe and seed, which its directory's name says."""
        return self.directory.name.endswith(AGAIN)

    @property
    def seed(self) -> int:
        """Of the initial weights and of the order of the data."""
        return self.config.training.seed

    @property
    def name(self) -> str:
        """As in tables: recipe and seed."""
        return f"{self.recipe} seed {self.seed}"

    @property
    def last_step(self) -> int:
        """The last that was logged, 0 before the first."""
        return self.records[-1]["step"] if self.records else 0

    @property
    def state(self) -> State:
        """Whether it ran to its last step, or ended after as many skipped steps in a row as it was allowed."""
        if gave_up(self.records, self.config.training.max_skipped):
            return "gave up"
        return "complete" if is_complete(self.records, self.config.training.steps) else "unfinished"


def is_complete(records: Sequence[Mapping[str, Any]], steps: int) -> bool:
    """The last step is there, and it is logged after its validation."""
    return bool(records) and records[-1]["step"] >= steps and records[-1].get("validation_loss") is not None


def gave_up(records: Sequence[Mapping[str, Any]], max_skipped: int) -> bool:
    """The last `max_skipped` steps, one by one, had a loss or a gradient norm that is not finite."""
    tail = records[-max_skipped:]
    together = len(tail) == max_skipped and tail[-1]["step"] - tail[0]["step"] == max_skipped - 1
    return together and not any(math.isfinite(record["loss"]) and math.isfinite(record["grad_norm"]) for record in tail)


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """Run directories among `paths`, and directly below those that are none. UserError for a path without any, or one twice."""
    found: list[Path] = []
    for path in paths:
        if _is_run(path):
            found.append(path)
            continue
        below = sorted(each for each in path.iterdir() if _is_run(each)) if path.is_dir() else []
        if not below:
            raise UserError(f"{path}: no run directory and none directly below it (one has config.yaml and metrics.jsonl)")
        found += below
    given: set[Path] = set()
    for path in found:
        if path.resolve() in given:
            raise UserError(f"{path} is given twice: give each run once, by itself or by the directory that it is in")
        given.add(path.resolve())
    return [path.absolute() for path in found]


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file() and (path / "metrics.jsonl").is_file()


def read_runs(directories: Iterable[Path]) -> list[ComparedRun]:
    """All of them, named. UserError, one line, for a file that is not there or broken, or for the same run twice."""
    runs = [_read_run(path) for path in directories]
    for run, name in zip(runs, names_of([run.config.recipe for run in runs]), strict=True):
        run.recipe = once_more(name) if run.again else name
    first: dict[tuple[str, int], Path] = {}
    for run in runs:
        other = first.setdefault((run.recipe, run.seed), run.directory)
        if other != run.directory:
            raise UserError(
                f"{other} and {run.directory} are both {run.recipe} with seed {run.seed}: leave one of them out (a second run "
                f"on purpose has a directory whose name ends with {AGAIN})"
            )
    return runs


def _read_run(path: Path) -> ComparedRun:
    directory = RunDirectory(path)
    records = read_records(directory.metrics)
    if not records:
        raise UserError(f"{directory.metrics} holds no step yet: let the run log one, or leave the run out")
    return ComparedRun(
        path,
        load_saved(directory.config),
        read_corpus(path / "corpus.json"),
        _json(path / "environment.json", ENVIRONMENT),
        records,
        error=last_error(path / LOG),
    )


def read_records(path: Path) -> list[dict[str, Any]]:
    """All whole records of a run, none if there is no file. UserError, one line, for a line that a comparison cannot use."""
    records = read_metrics(path) if path.is_file() else []
    for number, record in enumerate(records, 1):  # every whole line is a record
        missing = [name for name in REQUIRED if record.get(name) is None]
        if missing:
            raise UserError(f"{path}, line {number} has no {missing[0]}: delete the line, or leave the run out")
    return records


def read_corpus(path: Path) -> dict[str, Any]:
    """A run's corpus.json. UserError, one line, for one that is not there, broken, or without what a comparison reads."""
    return _json(path, CORPUS)


def _json(path: Path, wanted: Iterable[tuple[str, type, bool]]) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; a comparison needs the files that training writes beside it") from error
    except ValueError as error:
        raise UserError(f"{path} is no JSON ({error}): restore it, or leave the run out") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not what a run writes there: restore it, or leave the run out")
    for key, kind, optional in wanted:
        value: Any = content
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is None and optional:
            continue
        if not isinstance(value, (int, float) if kind is float else kind) or (kind is not str and isinstance(value, bool)):
            shown = "no value" if value is None else json.dumps(value)
            raise UserError(f"{path}: {key} is {shown}, not {KINDS[kind]}: restore the file, or leave the run out")
    return content


def refuse_unlike(runs: Sequence[ComparedRun]) -> None:
    """Raise UserError naming every key in which a run differs from the first one, recipe and seed apart."""
    first, *others = runs
    expected = identity(first.config, first.corpus)
    for run in others:
        found = identity(run.config, run.corpus)
        keys = [*expected, *(key for key in found if key not in expected)]
        differing = [key for key in keys if expected.get(key) != found.get(key)]
        if differing:
            listed = ", ".join(f"{key} {_shown(expected.get(key))} and {_shown(found.get(key))}" for key in differing)
            raise UserError(
                f"{first.directory} and {run.directory} cannot be compared ({listed}): compare runs of one corpus, model, "
                "schedule and number of tokens"
            )


def identity(config: RunConfig, corpus: Mapping[str, Any]) -> dict[str, Any]:
    """{key: value} of all that two runs must share, recipe and seed apart, for their losses to be compared."""
    settings = {
        key: value
        for key, value in flatten(config.to_dict()).items()
        if key not in FREE and key.partition(".")[0] not in {*FREE_GROUPS, "recipe"}
    }
    ranks = config.parallel.ranks
    tokens = config.training.batch * config.training.accumulate * config.training.context * ranks
    return settings | {
        "tokens a step": tokens,
        "corpus sha256": corpus.get("sha256"),
        "tokenizer sha256": corpus.get("tokenizer", {}).get("sha256"),
        "training tokens of the corpus": corpus.get("train", {}).get("tokens"),
        "validation tokens of the corpus": corpus.get("validation", {}).get("tokens"),
    }


def _shown(value: Any) -> str:
    if isinstance(value, str) and len(value) == 64:
        return value[:SHOWN]
    return shown(value)
