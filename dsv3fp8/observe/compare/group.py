"""A comparison in W&B: a group of its runs, and one run more that holds the errors, the verdicts and the page."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsv3fp8.observe.compare.runs import ComparedRun
from dsv3fp8.observe.compare.tables import verdict_table
from dsv3fp8.training.config import LoggingConfig
from dsv3fp8.training.loggers.weights_and_biases import WeightsAndBiases


def log_group(
    logging: LoggingConfig, runs: Sequence[ComparedRun], data: Mapping[str, Any], out: Path, say: Callable[[str], None]
) -> None:
    """Send the comparison to the group of `logging`, or to `out`/wandb where that is offline.

    Runs that were logged into the group while they trained are there already. Ids follow from the group and the run, so a
    report that is made again replaces what W&B has of it.
    """
    if logging.wandb == "disabled":
        return
    group = logging.group
    assert group is not None
    try:
        for run in runs:
            if _is_in_group(run, group):
                continue
            with_name = dataclasses.replace(logging, name=run.directory.name)
            logger = WeightsAndBiases(with_name, out, run.config.to_dict(), _id(group, run.name), say)
            for record in run.records:
                logger.log(record)
            logger.close()
        _log_report(dataclasses.replace(logging, name=f"{group} report"), data, out, _id(group, "report"), say)
    except ImportError:
        say("W&B is not installed, so there is no group of the comparison (`pip install wandb`; logging.wandb=disabled)")
        return
    say(f"W&B {logging.wandb}: group {group}" + (f" below {out}/wandb" if logging.wandb == "offline" else ""))


def _log_report(logging: LoggingConfig, data: Mapping[str, Any], out: Path, run_id: str, say: Callable[[str], None]) -> None:
    import wandb

    logger = WeightsAndBiases(logging, out, {"comparison": data["settings"]}, run_id, say)
    points: dict[int, dict[str, Any]] = {}
    for key in ("training", "validation"):
        curves = data["curves"][key]
        for index, step in enumerate(curves["step"]):
            record = points.setdefault(step, {"step": step})
            if curves["band"]:
                record[f"band/{key}"] = curves["band"][index]
            for name, each in curves["recipes"].items():
                if each["error"] is not None and name != data["settings"]["baseline"]:
                    record[f"relative_error/{key}/{name}"] = each["error"][index]
    for step in sorted(points):
        logger.log(points[step])
    table = verdict_table(data)
    shown: dict[str, Any] = {
        "verdicts": wandb.Table(columns=_distinct(table.heads), data=[list(row) for row in table.rows]),
        "report": wandb.Html(str(out / "report.html")),
    }
    if (out / "report.png").is_file():
        shown["curves"] = wandb.Image(str(out / "report.png"))
    logger.log({"step": data["settings"]["steps"], **shown})
    logger.close()


def _is_in_group(run: ComparedRun, group: str) -> bool:
    logging = run.config.logging
    return logging.group == group and logging.wandb != "disabled" and (run.directory / "wandb").is_dir()


def _id(group: str, name: str) -> str:
    return hashlib.sha256(f"{group}/{name}".encode()).hexdigest()[:12]


def _distinct(heads: Sequence[str]) -> list[str | int]:
    """Column names that are all different."""
    return [head if heads.index(head) == index else f"{head} ({heads[index - 1]})" for index, head in enumerate(heads)]
