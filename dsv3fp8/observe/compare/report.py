"""A comparison's files: report.json, report.html, report.md and report.png."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import dsv3fp8
from dsv3fp8.model.config import ModelConfig
from dsv3fp8.observe.compare.figure import draw
from dsv3fp8.observe.compare.html import page
from dsv3fp8.observe.compare.runs import ComparedRun
from dsv3fp8.observe.compare.study import study
from dsv3fp8.observe.compare.tables import findings, subtitle, tables_of, title
from dsv3fp8.observe.kept_bytes import observed_bytes
from dsv3fp8.precision.recipe import Recipe
from dsv3fp8.schema import to_plain
from dsv3fp8.training.run_directory import write_atomically

NAMES = ("report.json", "report.html", "report.md", "report.png")
EXPERTS = 8
"""Of the layer whose kept bytes are observed: how many there are changes nothing that a token keeps."""
TOKENS = 128


def write_report(
    runs: Sequence[ComparedRun], out: Path, baseline: str | None, window: int | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """Compare the runs and write the files into `out`; the data of report.json. UserError for runs that are unlike."""
    data = study(runs, baseline, window, KeptBytes())
    data["about"] = _about(runs)
    # Written as it will be read: the keys of a mapping over seeds are text there.
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomically(out / "report.json", text)
    write_atomically(out / "report.html", page(data))
    write_atomically(out / "report.md", markdown(data))
    if importlib.util.find_spec("matplotlib") is None:
        say("report.png is left out: matplotlib is not installed")
    else:
        draw(data, out / "report.png")
    return data


def markdown(data: Mapping[str, Any]) -> str:
    """The tables and findings for a page of somebody else's."""
    parts = [f"# {title(data)}", subtitle(data), "\n".join(f"- {line}" for line in findings(data))]
    for table in tables_of(data):
        parts += [f"## {table.title}", table.note, table.markdown()]
    return "\n\n".join([*parts, "\n".join(f"    {command}" for command in data["about"]["commands"])]) + "\n"


class KeptBytes:
    """Bytes a token that one layer of a run's model keeps for backward under its recipe, observed once for each pair."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float | None, str]] = {}

    def __call__(self, run: ComparedRun) -> tuple[float | None, str]:
        """(bytes, "") or (None, the reason)."""
        model, recipe = run.config.model, run.config.recipe
        key = json.dumps([to_plain(model), to_plain(recipe)], sort_keys=True)
        if key not in self._known:
            self._known[key] = self._observe(model, recipe)
        return self._known[key]

    def _observe(self, model: ModelConfig, recipe: Recipe) -> tuple[float | None, str]:
        if recipe.linears == "te":
            return None, "Transformer Engine's linears keep what they like, on a GPU"
        smaller = dataclasses.replace(model, experts=max(EXPERTS, model.top_k), groups=1, kept_groups=1)
        return observed_bytes(smaller, recipe, TOKENS, torch.device("cpu"), dense=not model.has_experts).tensors, ""


def _about(runs: Sequence[ComparedRun]) -> dict[str, Any]:
    """Where the figures come from; machine and moment, so none of it repeats."""
    machines = []
    for run in runs:
        there = run.environment
        commit = f"commit {there['commit'][:12]}" if there.get("commit") else "no commit known"
        torch_version = there["packages"].get("torch")
        machines.append(f"{there.get('device')} (torch {torch_version}, Python {there.get('python')}, {commit})")
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "dsv3fp8": dsv3fp8.__version__,
        "machines": list(dict.fromkeys(machines)),
        "commands": [f"{run.name}: {run.environment.get('command')}" for run in runs],
        "directories": [str(run.directory) for run in runs],
    }
