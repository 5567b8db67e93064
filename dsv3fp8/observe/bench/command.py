"""`dsv3fp8 bench KIND`: measure, print the tables, write JSON and a Markdown page."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from dsv3fp8.errors import UserError
from dsv3fp8.kernels.backend import hopper_reason
from dsv3fp8.observe.bench import peers
from dsv3fp8.observe.bench.casts import attention_tables, cast_tables
from dsv3fp8.observe.bench.fused import fused_tables
from dsv3fp8.observe.bench.gemms import dense_tables
from dsv3fp8.observe.bench.grouped import grouped_tables
from dsv3fp8.observe.bench.layer import layer_breakdown, layer_memory, layer_subjects, layer_table
from dsv3fp8.observe.bench.linears import linear_tables
from dsv3fp8.observe.bench.operands import Setting, recipe_named
from dsv3fp8.observe.bench.page import page, shown
from dsv3fp8.observe.bench.rates import Table, judged
from dsv3fp8.observe.bench.sizes import SIZES
from dsv3fp8.observe.bench.steps import step_breakdown, step_table, trainers
from dsv3fp8.observe.bench.timing import Clock, one_line, release, run_case
from dsv3fp8.observe.output import writable_directory
from dsv3fp8.schema import build, key_values, leaves
from dsv3fp8.training.checks import device_problems, select_device
from dsv3fp8.training.config import raise_problems
from dsv3fp8.training.run_directory import environment

HELP = ("-h", "--help", "help")
KINDS = ("kernels", "linear", "layer", "step")
PARTS: dict[str, Callable[[Setting], list[Table]]] = {
    "casts": cast_tables, "fused": fused_tables, "grouped": grouped_tables, "dense": dense_tables,
    "attention": attention_tables,
}  # fmt: skip


@dataclass
class BenchConfig:
    """The keys of the command."""

    # Directory to write KIND.json and KIND.md to.
    out: str = "runs/bench"
    # Samples a way; the median counts. Fewer is quicker.
    rounds: int = 5
    # Other libraries' calls as well, where they can be imported: Transformer Engine, DeepGEMM.
    peers: bool = False
    # Of `kernels`: casts, fused, grouped, dense, attention, several with commas. Empty: all of them.
    only: str = ""
    # Of `linear`, `layer` and `step`: recipes, with commas; `layer` and `step` compare with the last one.
    recipes: str = "dsv3,bf16"
    # Of `layer`: also the same layer in plain PyTorch, eager and under torch.compile, which becomes the peer.
    compiled: bool = False
    # Of `step`.
    model: Literal["small", "medium"] = "small"
    # tiny tries the path, on a CPU too: its figures mean nothing.
    sizes: Literal["full", "tiny"] = "full"
    # auto, cpu or cuda.
    device: str = "auto"

    def validate(self) -> None:
        """Raise UserError with every value that makes no sense."""
        problems = device_problems("device", self.device)
        if self.rounds < 1:
            problems.append(f"rounds={self.rounds} must be at least 1")
        problems += [f"only={name}: there are {', '.join(PARTS)}" for name in self.parts if name not in PARTS]
        if not self.names:
            problems.append("recipes is empty; give names with commas, such as recipes=dsv3,bf16")
        if len(set(self.names)) < len(self.names):
            problems.append(f"recipes={self.recipes} names one twice")
        if self.device == "cpu" and self.sizes != "tiny":
            problems.append("device=cpu measures nothing of use at full size: add sizes=tiny to try the command out")
        raise_problems(problems)

    @property
    def parts(self) -> list[str]:
        return [name for name in self.only.split(",") if name] or list(PARTS)

    @property
    def names(self) -> list[str]:
        return [name for name in self.recipes.split(",") if name]


def main(arguments: list[str]) -> int:
    """Measure one kind; the exit status."""
    if not arguments or any(argument in HELP for argument in arguments):
        print(help_text())
        return 0 if arguments else 2
    kind, config = parse(arguments)
    device = select_device(config.device)
    against = None if config.sizes == "tiny" and config.device == "cpu" else hopper_reason(device)
    if against is not None:
        print(
            f"dsv3fp8: error: bench {kind} needs a Hopper GPU (H100, H200) and torch for CUDA 12.9 or later: {against}; "
            "device=cpu sizes=tiny tries the command out",
            file=sys.stderr,
        )
        return 1
    recipes = [recipe_named(name) for name in config.names]
    out = writable_directory(config.out, f"{kind}.json", f"{kind}.md")
    started = time.monotonic()
    found, left_out = peers.find() if config.peers else ({}, [])
    setting = Setting(SIZES[config.sizes], Clock(device, config.rounds), recipes[0], frozenset(found))
    torch.manual_seed(0)
    data: dict[str, Any] = {"about": {}, "notes": left_out, "tables": [], "breakdowns": {}}
    if device.type != "cuda":
        data["notes"].append("on a CPU, at tiny sizes: the path was tried, the figures mean nothing")
    measure(kind, config, setting, data)
    about = environment(device)
    about["packages"] |= found
    data["about"] = {
        **about, "kind": kind, "command": shlex.join(["dsv3fp8", "bench", *arguments]), "rounds": config.rounds,
        "sizes": config.sizes, "recipes": config.names, "seconds": time.monotonic() - started,
    }  # fmt: skip
    _show(data)
    (out / f"{kind}.json").write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (out / f"{kind}.md").write_text(page(data), encoding="utf-8")
    print(f"\nsee {out / f'{kind}.md'} and {out / f'{kind}.json'}; {data['about']['seconds']:.0f} s")
    return 0


def parse(arguments: list[str]) -> tuple[str, BenchConfig]:
    """The kind and the keys; UserError for what is none."""
    kind, *rest = arguments
    if kind not in KINDS:
        raise UserError(f"bench {kind}: there are {', '.join(KINDS)}, as in `dsv3fp8 bench kernels`")
    return kind, build(BenchConfig, key_values(rest, "rounds=3 out=runs/bench"))


def help_text() -> str:
    """The kinds, and the keys with their defaults and comments."""
    keys = "\n".join(f"  {key:<10}{note}" for key, _, note in leaves(BenchConfig))
    return (
        "Usage: dsv3fp8 bench kernels|linear|layer|step [key=value …]\n\n"
        "Measures on one Hopper GPU, each figure beside its peer in the same run:\n"
        "  kernels   casts, fused ops, grouped and dense GEMMs, attention\n"
        "  linear    one linear, forward and backward, from BF16 operands\n"
        "  layer     a MoE layer of DeepSeek-V3's size, forward and backward, with a breakdown by kernel\n"
        "  step      training steps of model=small or medium, with a breakdown by kernel\n\n"
        f"{keys}"
    )


def measure(kind: str, config: BenchConfig, setting: Setting, data: dict[str, Any]) -> None:
    """Run the kind's cases into `data`, a line of progress for each."""
    if kind == "kernels":
        for part in config.parts:
            for table in PARTS[part](setting):
                _run(table, setting, data)
    elif kind == "linear":
        for table in linear_tables(setting):
            _run(table, setting, data)
    elif kind == "layer":
        subjects = layer_subjects(setting, [recipe_named(name) for name in config.names], config.compiled)
        timed = _run(layer_table(setting, subjects), setting, data)["forward + backward"]
        for name, subject in subjects.items():
            _break_down(name, data, partial(layer_breakdown, setting, subject, timed.get(name)))
            _break_down(name, data, partial(layer_memory, setting, subjects, name))
    else:
        size = setting.sizes.steps[config.model]
        with trainers(setting, size, config.names) as made:
            (timed,) = _run(step_table(size, made), setting, data).values()
            for name, trainer in made.items():
                _break_down(name, data, partial(step_breakdown, setting, trainer, timed.get(name)))


def _run(table: Table, setting: Setting, data: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """Adds the table with every case; the medians by case and way."""
    entry: dict[str, Any] = {
        "name": table.name, "title": table.title, "unit": table.unit, "peer": table.peer, "about": table.about, "cases": [],
    }  # fmt: skip
    data["tables"].append(entry)
    medians: dict[str, dict[str, float | None]] = {}
    for case in table.cases:
        started = time.monotonic()
        ways, timings, failed = run_case(case, setting.clock)
        entry["cases"].append({**judged(case, table.unit, table.peer, ways, timings), "failed": failed})
        medians[case.name] = {name: timing.ms for name, timing in timings.items()}
        del ways
        release(setting.clock)
        print(f"{table.name}: {case.name:<36} {time.monotonic() - started:5.1f} s", flush=True)
    return medians


def _break_down(name: str, data: dict[str, Any], find: Callable[[], dict[str, Any]]) -> None:
    try:
        data["breakdowns"].setdefault(name, {}).update(find())
    except Exception as error:
        data["notes"].append(f"the breakdown of {name} is not whole: {one_line(error)}")


def _show(data: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as Grid

    console = Console(width=None if sys.stdout.isatty() else 140)
    for table in shown(data):
        grid = Grid(title=table.title, title_justify="left", box=SIMPLE_HEAD)
        for index, head in enumerate(table.heads):
            grid.add_column(head, justify="right" if index else "left", overflow="fold")
        for row in table.rows:
            grid.add_row(*(cell.replace("`", "").replace("[", "\\[") for cell in row))
        console.print(grid)
        for note in table.notes:
            print(f"  {note}")
    for note in data["notes"]:
        print(note)

