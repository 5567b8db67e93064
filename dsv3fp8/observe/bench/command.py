"""`dsv3fp8 bench KIND`: measure, print the tables, write JSON and a Markdown page."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from dsv3fp8.errors import UserError
from dsv3fp8.observe.bench import layer as layers
from dsv3fp8.observe.bench import linears, peers, steps
from dsv3fp8.observe.bench.casts import attention_tables, cast_tables
from dsv3fp8.observe.bench.exchange import exchange_tables
from dsv3fp8.observe.bench.fused import fused_tables
from dsv3fp8.observe.bench.gemms import dense_tables
from dsv3fp8.observe.bench.grouped import grouped_tables
from dsv3fp8.observe.bench.hopper import lacks_hopper
from dsv3fp8.observe.bench.operands import Setting, recipe_named
from dsv3fp8.observe.bench.outer import outer_tables
from dsv3fp8.observe.bench.page import page, rewrite, shown
from dsv3fp8.observe.bench.rates import Table, judged
from dsv3fp8.observe.bench.roofline import roofline, roofline_tables
from dsv3fp8.observe.bench.scale import command as scale
from dsv3fp8.observe.bench.scale.page import page as scale_page
from dsv3fp8.observe.bench.sizes import SIZES, StepSize
from dsv3fp8.observe.bench.timing import Clock, one_line, release, run_case
from dsv3fp8.observe.output import writable_directory
from dsv3fp8.precision.recipe import Recipe
from dsv3fp8.schema import build_words, key_values, leaves
from dsv3fp8.training.checks import device_problems, select_device
from dsv3fp8.training.config import raise_problems
from dsv3fp8.training.run_directory import environment

HELP = ("-h", "--help", "help")
KERNELS: dict[str, Callable[[Setting], list[Table]]] = {
    "casts": cast_tables, "fused": fused_tables, "exchange": exchange_tables, "outer": outer_tables,
    "grouped": grouped_tables, "dense": dense_tables, "attention": attention_tables,
}  # fmt: skip
KINDS: dict[str, tuple[str, ...]] = {
    "kernels": tuple(KERNELS), "linear": linears.PARTS, "layer": layers.PARTS, "step": steps.PARTS
}  # fmt: skip
"""What can be measured, and the parts of each that `only` picks."""
PAGE = "page"
TE_RECIPE = "te_blockwise"


@dataclass
class BenchConfig:
    """The keys of the command."""

    # Directory to write KIND.json and KIND.md to.
    out: str = "runs/bench"
    # Samples a way; the median counts. Fewer is quicker.
    rounds: int = 5
    # Other libraries' calls as well, where they can be imported: Transformer Engine, DeepGEMM.
    peers: bool = False
    # Parts of the kind, with commas. Empty: all of them.
    only: str = ""
    # Of `kernels` and `linear` the first recipe, of `layer` and `step` all, with commas; the last of `step` is the peer.
    recipes: str = "dsv3,bf16"
    # Of `step`.
    model: Literal["small", "medium"] = "small"
    # tiny tries the path, on a CPU too: its figures mean nothing.
    sizes: Literal["full", "tiny"] = "full"
    # auto, cpu or cuda.
    device: str = "auto"
    # The source's, for the page, where the source lies without its history.
    commit: str = ""

    def validate(self) -> None:
        """Raise UserError with every value that makes no sense."""
        problems = device_problems("device", self.device)
        if self.rounds < 1:
            problems.append(f"rounds={self.rounds} must be at least 1")
        if not self.names:
            problems.append("recipes is empty; give names with commas, such as recipes=dsv3,bf16")
        if len(set(self.names)) < len(self.names):
            problems.append(f"recipes={self.recipes} names one twice")
        if self.device == "cpu" and self.sizes != "tiny":
            problems.append("device=cpu measures nothing of use at full size: add sizes=tiny to try the command out")
        raise_problems(problems)

    def parts(self, kind: str) -> list[str]:
        """What is measured of this kind; UserError for what it has not."""
        wanted = [name for name in self.only.split(",") if name]
        problems = [f"only={name}: {kind} has {', '.join(KINDS[kind])}" for name in wanted if name not in KINDS[kind]]
        for name, needed in layers.NEEDS.items() if kind == "layer" else ():
            if name in wanted and not {*needed} & {*wanted}:
                problems.append(f"only={name}: it is of layers that run, so pick them too: only={needed[0]},{name}")
        raise_problems(problems)
        return wanted or list(KINDS[kind])

    @property
    def names(self) -> list[str]:
        return [name for name in self.recipes.split(",") if name]


def main(arguments: list[str]) -> int:
    """Measure one kind; the exit status."""
    if not arguments or any(argument in HELP for argument in arguments):
        print(help_text())
        return 0 if arguments else 2
    if arguments[0] == scale.KIND:
        return scale.main(arguments[1:])
    kind, config = parse(arguments)
    if kind == PAGE:
        for path in rewrite(Path(config.out).expanduser(), {**dict.fromkeys(KINDS, page), scale.KIND: scale_page}):
            print(path)
        return 0
    recipes = [recipe_named(name) for name in config.names]
    _check_recipes(kind, recipes)
    device = select_device(config.device)
    tried_out = config.sizes == "tiny" and config.device == "cpu"
    if not tried_out and lacks_hopper(device, f"bench {kind} needs a Hopper GPU"):
        return 1
    out = writable_directory(config.out, f"{kind}.json", f"{kind}.md")
    started = time.monotonic()
    found, left_out = peers.find() if config.peers else ({}, [])
    setting = Setting(SIZES[config.sizes], Clock(device, config.rounds), recipes[0], frozenset(found))
    torch.manual_seed(0)
    data: dict[str, Any] = {"about": {}, "notes": left_out, "tables": [], "roofline": {}, "breakdowns": {}}
    if device.type != "cuda":
        data["notes"].append("on a CPU, at tiny sizes: the path was tried, the figures mean nothing")
    if kind in ("layer", "step") and peers.TRANSFORMER_ENGINE in found and TE_RECIPE not in config.names:
        recipes.insert(1, recipe_named(TE_RECIPE))
    interrupted, known = False, len(data["notes"])
    try:
        measure(kind, config.parts(kind), setting, recipes, setting.sizes.steps[config.model], data)
    except KeyboardInterrupt:
        interrupted = True
        data["notes"].append("interrupted: this is what was measured until then")
    about = environment(device)
    about["commit"] = about["commit"] or config.commit or None
    about["packages"] |= found
    data["about"] = {
        **about, "kind": kind, "command": shlex.join(["dsv3fp8", "bench", *arguments]), "rounds": config.rounds,
        "sizes": config.sizes, "recipes": [recipe.name for recipe in recipes], "seconds": time.monotonic() - started,
    }  # fmt: skip
    _show(data)
    if not interrupted and not _measured(data):
        reasons = [*data["notes"][known:], *_failures(data), "no part of it has anything to run"]
        raise UserError(f"bench {kind}: nothing could be measured, and nothing is written: {reasons[0]}")
    (out / f"{kind}.json").write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (out / f"{kind}.md").write_text(page(data), encoding="utf-8")
    print(f"\nsee {out / f'{kind}.md'} and {out / f'{kind}.json'}; {data['about']['seconds']:.0f} s")
    return int(interrupted)


def parse(arguments: list[str]) -> tuple[str, BenchConfig]:
    """The kind and the keys; UserError for what is none."""
    kind, *rest = arguments
    if kind not in (*KINDS, PAGE):
        raise UserError(f"bench {kind}: there are {', '.join((*KINDS, scale.KIND, PAGE))}, as in `dsv3fp8 bench kernels`")
    given = key_values(rest, "rounds=3 out=runs/bench")
    config = build_words(BenchConfig, given)
    idle = {*given} - {"out"} if kind == PAGE else set() if kind == "step" else {"model"}
    raise_problems([f"{key}={text} has no effect on bench {kind}: leave it out" for key, text in given.items() if key in idle])
    if kind in KINDS:
        config.parts(kind)
    return kind, config


def _check_recipes(kind: str, recipes: list[Recipe]) -> None:
    """Refuse Transformer Engine's linears where our own would be measured under their name."""
    instead = {
        "linear": "Transformer Engine's Linear is a column beside another recipe's: recipes=dsv3 peers=true",
        "kernels": "its linears are Transformer Engine's, kernels are ours: leave it out",
    }
    if kind in instead:
        raise_problems([f"bench {kind} recipes={r.name}: {instead[kind]}" for r in recipes if r.linears == "te"])


def _measured(data: dict[str, Any]) -> bool:
    ways = [way for table in data["tables"] for case in table["cases"] for way in case["ways"].values()]
    return bool(data["breakdowns"]) or any(way["ms"] is not None for way in ways)


def _failures(data: dict[str, Any]) -> list[str]:
    """Why cases and ways have no figure."""
    cases = [case for table in data["tables"] for case in table["cases"]]
    found = [(case["case"], case["failed"]) for case in cases]
    found += [(f"{case['case']}, {name}", way["failed"]) for case in cases for name, way in case["ways"].items()]
    return [f"{name}: {failed}" for name, failed in found if failed]


def help_text() -> str:
    """The kinds, and the keys with their defaults and comments."""
    keys = "\n".join(f"  {key:<10}{note}" for key, _, note in leaves(BenchConfig))
    return (
        "Usage: dsv3fp8 bench kernels|linear|layer|step [key=value …]\n"
        "       dsv3fp8 bench scale [gpus=2] [key=value …]\n"
        "       dsv3fp8 bench page out=DIRECTORY\n\n"
        "Measures on one Hopper GPU, each figure beside its peer in the same run:\n"
        f"  kernels   each kernel by itself: {', '.join(KINDS['kernels'])}\n"
        f"  linear    one linear, forward and backward, from BF16 operands: {', '.join(KINDS['linear'])}\n"
        "  layer     a MoE layer of DeepSeek-V3's size, forward and backward, beside plain PyTorch and its own roofline:\n"
        f"            {', '.join(KINDS['layer'])}\n"
        f"  step      training steps of model=small or medium: {', '.join(KINDS['step'])}\n"
        "only= picks parts, which are named behind each kind.\n"
        "  scale     training steps on 1 GPU and many of one machine, layout by layout, beside what `plan` forecasts\n"
        "  page      writes the page of every run whose JSON lies in a directory again\n\n"
        f"{keys}\n\nKeys of scale, beside those of a run (model, training.batch, training.context, …):\n\n{scale.help_keys()}"
    )


def measure(kind: str, parts: list[str], setting: Setting, recipes: list[Recipe], size: StepSize, data: dict[str, Any]) -> None:
    """Run parts of a kind into `data`, a line of progress for each case. size: of the steps."""
    if kind == "kernels":
        for part in parts:
            for table in KERNELS[part](setting):
                _run(table, setting, data)
    elif kind == "linear":
        tables = linears.linear_tables(setting)
        for part in parts:
            _run(tables[part], setting, data)
    elif kind == "layer":
        _measure_layer(parts, setting, recipes, data)
    else:
        with steps.trainers(setting, size, [recipe.name for recipe in recipes], data["notes"]) as made:
            timed: dict[str, float | None] = {}
            if "rates" in parts and made:
                (timed,) = _run(steps.step_table(size, made), setting, data).values()
            for name, trainer in made.items() if "breakdown" in parts else ():
                _break_down(name, data, partial(steps.step_breakdown, setting, trainer, timed.get(name)))


def _measure_layer(parts: list[str], setting: Setting, recipes: list[Recipe], data: dict[str, Any]) -> None:
    subjects = layers.layer_subjects(setting, recipes, parts, data["notes"])
    timed: dict[str, float | None] = {}
    if subjects:
        timed = _run(layers.layer_table(setting, subjects), setting, data)[layers.BOTH_WAYS]
    if "weights" in parts:
        for table in layers.weight_tables(setting, subjects):
            _run(table, setting, data)
    for name, subject in subjects.items() if "breakdown" in parts else ():
        _break_down(name, data, partial(layers.layer_breakdown, setting, subject, timed.get(name)))
        _break_down(name, data, partial(layers.layer_memory, setting, subjects, name))
    if "roofline" in parts:
        subjects.clear()  # their memory
        measured = {table.name: _run(table, setting, data) for table in roofline_tables(setting)}
        data["roofline"] = roofline(setting, measured, timed)


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
