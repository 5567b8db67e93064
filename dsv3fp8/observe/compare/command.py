"""`dsv3fp8 compare`: train recipes alike and report, or report on runs that exist (`compare report RUN_DIR…`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dsv3fp8.config import GROUPS
from dsv3fp8.data import open_corpus
from dsv3fp8.errors import UserError
from dsv3fp8.observe.compare.group import log_group
from dsv3fp8.observe.compare.plan import CompareConfig, Plan, check_against_disk, has_ended, make_plan
from dsv3fp8.observe.compare.pool import places_for, run_all
from dsv3fp8.observe.compare.recipes import AGAIN
from dsv3fp8.observe.compare.report import NAMES, write_report
from dsv3fp8.observe.compare.runs import find_runs, read_runs
from dsv3fp8.observe.compare.study import BASELINE
from dsv3fp8.observe.compare.tables import findings, subtitle, tables_of, title
from dsv3fp8.observe.output import writable_directory
from dsv3fp8.schema import build_words, leaves, split_words, suggest
from dsv3fp8.training.config import LoggingConfig
from dsv3fp8.training.run_directory import RunDirectory

HELP = ("-h", "--help", "help")
EXAMPLE = "recipes=bf16,dsv3 seeds=2 model=tiny"


@dataclass
class ReportConfig:
    """The keys of `compare report`."""

    # Directory of the report.
    out: str = "runs/report"
    # As for `compare`.
    baseline: str | None = None
    # As for `compare`.
    window: int | None = None
    # A W&B group with the runs and the report: offline below out/wandb, online, or disabled.
    wandb: Literal["offline", "online", "disabled"] = "offline"
    # The project in W&B.
    project: str = "dsv3fp8"
    # The name of the group; null: that of the directory out.
    group: str | None = None


def main(arguments: list[str]) -> int:
    """Run the command; 0 done, 1 where a run failed, 130 or 143 stopped by SIGINT or SIGTERM."""
    if any(argument in HELP for argument in arguments):
        print(help_text())
        return 0
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("compare starts its own processes: run it without torchrun; it uses every GPU that is visible")
    if arguments and arguments[0] == "report":
        return report(arguments[1:])
    config, words = parse(arguments)
    plan = make_plan(config, words)
    out = writable_directory(plan.out, *NAMES)
    with RunDirectory(out, key="out"):
        # Tokenized once, before several runs would each begin to.
        open_corpus(plan.runs[0].config.data, report=_say)
        check_against_disk(plan)
        places = places_for(plan.runs[0].config.training.device, config.jobs)
        _say(f"{len(plan.runs)} runs of {plan.runs[0].config.training.steps:,} steps, {len(places)} at a time, below {out}")
        failed, stopped = run_all(plan.runs, places, config.keep_checkpoints, _say)
        if stopped is not None:
            left = sum(not has_ended(run) for run in plan.runs)
            state = f"{left} of {len(plan.runs)} runs have not ended; the same command goes on from their checkpoints"
            _say(f"{stopped.name}: {state if left else 'every run has ended; the same command writes the report'}")
            return 128 + stopped
        _report_on_plan(plan, out)
    return 1 if failed else 0


def report(arguments: list[str]) -> int:
    """Compare runs that exist."""
    own = [key for key, _, _ in leaves(ReportConfig)]
    pairs, paths = {}, []
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if equals and key in own:
            pairs[key] = text
        elif equals and not Path(argument).expanduser().exists():
            known = f"there are {', '.join(own)}, and run directories"
            raise UserError(f"{key}: no such key; {suggest(key, own) or known}")
        else:
            paths.append(Path(argument).expanduser())
    if not paths:
        raise UserError("compare report: give run directories, or one directory with run directories in it")
    config = build_words(ReportConfig, pairs)
    runs = read_runs(find_runs(paths))
    out = writable_directory(config.out, *NAMES)
    data = write_report(runs, out, config.baseline, config.window, _say)
    if config.baseline is None and (taken := data["settings"]["baseline"]) != BASELINE:
        _say(f"held against {taken}, the first by name: baseline=NAME takes another")
    logging = LoggingConfig(wandb=config.wandb, project=config.project, group=config.group or out.absolute().name)
    log_group(logging, runs, data, out, _say)
    _show(data, out)
    return 0


def parse(arguments: Sequence[str]) -> tuple[CompareConfig, list[str]]:
    """The command's own keys, and the words that go to every run. Raises UserError."""
    beside = (*GROUPS, "config", "run_dir", "resume")
    example = f"{EXAMPLE}; or `compare report RUN_DIR…`"
    values, rest = split_words(CompareConfig, arguments, example, beside, ("and those of `train`",))
    if "recipes" not in values:
        raise UserError(f"recipes: no value given; name some, as in `dsv3fp8 compare {EXAMPLE}`")
    return build_words(CompareConfig, values), rest


def help_text() -> str:
    """The keys of both forms with their comments."""

    def keys(kind: type) -> str:
        return "\n".join(f"  {key:<18}{note}" for key, _, note in leaves(kind))

    return (
        "Usage: dsv3fp8 compare recipes=A,B [key=value …] [group=choice …]\n"
        "       dsv3fp8 compare report RUN_DIR… [key=value …]\n\n"
        "The first trains every recipe on the same data from the same initial weights, goes on where it was interrupted, and\n"
        "writes report.html, .json, .md and .png. Words that are no keys of it go to every run, as `train` takes them.\n"
        f"The second writes the same report on runs that exist.\n\n{keys(CompareConfig)}\n\nof `compare report`\n\n"
        f"{keys(ReportConfig)}"
    )


def _report_on_plan(plan: Plan, out: Path) -> None:
    present = [run.directory for run in plan.runs if (run.directory / "metrics.jsonl").is_file()]
    present = [path for path in present if (path / "metrics.jsonl").stat().st_size]
    # A second run without the first has nothing to be held against yet.
    present = [path for path in present if not path.name.endswith(AGAIN) or Path(str(path).removesuffix(AGAIN)) in present]
    if not present:
        _say("no run has made a step, so there is nothing to report")
        return
    runs = read_runs(present)
    data = write_report(runs, out, plan.baseline, plan.window, _say)
    log_group(plan.runs[0].config.logging, runs, data, out, _say)
    _show(data, out)


def _show(data: dict[str, Any], out: Path) -> None:
    _say(f"\n{title(data)}\n{subtitle(data)}\n")
    for table in tables_of(data):
        _say(f"{table.title}\n{table.markdown()}\n")
    for line in findings(data):
        _say(f"- {line}")
    _say(f"\nsee {', '.join(str(out / name) for name in NAMES if (out / name).is_file())}")


def _say(line: str) -> None:
    print(line, flush=True)
