"""`dsv3fp8 drift`: run the study, print its tables, and write the page, the figures and the data."""

from __future__ import annotations

import json
import shlex
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch

import dsv3fp8
from dsv3fp8.observe.drift.capture import check_run, describe_run
from dsv3fp8.observe.drift.claims import judge
from dsv3fp8.observe.drift.experiments import EXPERIMENTS
from dsv3fp8.observe.drift.figures import draw_figures
from dsv3fp8.observe.drift.known import compare
from dsv3fp8.observe.drift.page import known_summary, page
from dsv3fp8.observe.drift.study import Row, Study, size_for
from dsv3fp8.observe.drift.sums import Sums
from dsv3fp8.observe.drift.tables import tables_of
from dsv3fp8.observe.output import writable_directory
from dsv3fp8.schema import build_words, key_values, leaves
from dsv3fp8.training.checks import device_problems, select_device
from dsv3fp8.training.config import raise_problems
from dsv3fp8.training.run_directory import device_name, source_commit

HELP = ("-h", "--help", "help")
NO_RUN = "sums of real operands are left out: run=RUN_DIR takes them from a checkpoint of `dsv3fp8 train`"


@dataclass
class DriftConfig:
    """The keys of the command."""

    # Run directory whose newest checkpoint gives real activations, weights and gradients. null: only drawn operands.
    run: str | None = None
    # Directory to write drift.md, drift.json and the figures to.
    out: str = "runs/drift"
    # small takes half a minute on two CPU cores; full has more samples.
    size: Literal["small", "full"] = "small"
    # Of everything that is drawn.
    seed: int = 0
    # auto, cpu or cuda. A Hopper GPU's own sums are measured beside the emulated ones.
    device: str = "auto"

    def validate(self) -> None:
        """Raise UserError with every value that makes no sense."""
        problems = device_problems("device", self.device)
        if self.seed < 0:
            problems.append(f"seed={self.seed} must be at least 0")
        if self.seed >= 2**63:
            problems.append(f"seed={self.seed} must be below 2**63")
        raise_problems(problems)


def main(arguments: list[str]) -> int:
    """Run the study; the exit status."""
    if any(argument in HELP for argument in arguments):
        print(help_text())
        return 0
    config = parse(arguments)
    device = select_device(config.device)
    out = writable_directory(config.out, "drift.json")
    study = Study(config.seed, size_for(config.size, device), device, Sums.of(device), _run(config))
    started = time.monotonic()
    data = measure_all(study)
    data["about"] |= {
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(["dsv3fp8", "drift", *arguments]),
        "size": config.size,
        "seconds": time.monotonic() - started,
    }
    tables = tables_of(data)
    _show(data, tables)
    names = draw_figures(data["rows"], out)
    (out / "drift.json").write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (out / "drift.md").write_text(page(data, tables, names), encoding="utf-8")
    print(f"\nsee {out / 'drift.md'}, {out / 'drift.json'} and {len(names)} figures beside them")
    return 0


def parse(arguments: list[str]) -> DriftConfig:
    """The keys of the command; UserError for what is none."""
    return build_words(DriftConfig, key_values(arguments, "run=runs/tiny-dsv3 out=runs/drift"))


def help_text() -> str:
    """The keys with their defaults and comments."""
    keys = "\n".join(f"  {key:<14}{note}" for key, _, note in leaves(DriftConfig))
    return (
        "Usage: dsv3fp8 drift [run=RUN_DIR] [key=value …]\n\n"
        "Measures how far FP8 sums along K stray from the exact ones, promoted and not, in emulation and on a Hopper GPU.\n\n"
        f"{keys}"
    )


def measure_all(study: Study) -> dict[str, Any]:
    """Every experiment in turn, with a line of progress each: `rows` by experiment, the known figures, the claims judged."""
    rows: dict[str, list[Row]] = {}
    for index, (name, experiment) in enumerate(EXPERIMENTS.items(), start=1):
        started = time.monotonic()
        rows[name] = experiment(study)
        print(f"[{index}/{len(EXPERIMENTS)}] {name:<16} {time.monotonic() - started:6.1f} s", flush=True)
    notes = list(study.sums.notes)
    notes.append(f"real operands: {describe_run(study.run)}" if study.run else NO_RUN)
    about = {
        "device": device_name(study.device), "torch": torch.__version__, "threads": torch.get_num_threads(),
        "commit": source_commit(Path(dsv3fp8.__file__).parent), "seed": study.seed, "sizes": vars(study.size),
    }  # fmt: skip
    return {"about": about, "notes": notes, "rows": rows, "known": compare(rows), "claims": judge(rows)}


def _show(data: dict[str, Any], tables: list[Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 140)
    for table in tables:
        shown = Table(title=table.title, title_justify="left", box=SIMPLE_HEAD)
        for index, head in enumerate(table.heads):
            shown.add_column(head, justify="right" if index else "left", overflow="fold")
        for row in table.rows:
            shown.add_row(*(cell.replace("**", "") for cell in row))
        console.print(shown)
    verdicts = Table(title="The draft's claims", title_justify="left", box=SIMPLE_HEAD)
    for head in ("claim", "verdict", "numbers"):
        verdicts.add_column(head, overflow="fold")
    for claim in data["claims"]:
        verdicts.add_row(claim["name"], claim["verdict"], claim["numbers"])
    console.print(verdicts)
    for note in (*data["notes"], known_summary(data["known"])):
        print(note)


def _run(config: DriftConfig) -> Path | None:
    if config.run is None:
        return None
    path = Path(config.run).expanduser()
    check_run(path)  # what is wrong with it is said before anything is measured
    return path
