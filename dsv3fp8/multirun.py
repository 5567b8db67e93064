"""`dsv3fp8 train -m key=A,B …`: one run for every combination, started by one of Hydra's launchers.

Hydra's grammar says what is swept, and its launcher plugins start the jobs: one after another, or with joblib or submitit where
`hydra/launcher=` asks for them. Each job is a training run in a process of its own, with a run directory that is named after
the values it was given: the same command goes on where it was interrupted, and `dsv3fp8 compare report` can read it all.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import shlex
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

from hydra import initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig

from dsv3fp8.config import GROUPS, config_dir, load_config
from dsv3fp8.errors import UserError
from dsv3fp8.training.child import LOG, last_error, start_training, wait_until_free
from dsv3fp8.training.signals import StopRequest

WORDS = ("-m", "--multirun")
DEFAULT_DIRECTORY = "runs/multirun"
# The extra that brings a launcher.
EXTRA = "sweep"
LAUNCHERS = ("basic", "joblib", "submitit_local", "submitit_slurm")


@dataclass(frozen=True)
class Job:
    """One run of a sweep. name: of its directory, below that of the sweep. words: for `train`."""

    name: str
    words: tuple[str, ...]
    directory: Path


def multirun(arguments: Sequence[str]) -> int:
    """Start all jobs and wait for them; 0 if every run is done, else 1. UserError for what no run could start with."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError("-m starts its runs itself, each in one process: leave out torchrun, or train one run with it")
    own = [word for word in arguments if word.startswith(("hydra/launcher=", "hydra.launcher."))]
    words = [word for word in arguments if word not in (*WORDS, *own)]
    base, jobs = expand(words)
    for job in jobs:
        load_config([*job.words])
    with _launcher(own, jobs, base) as launcher:
        base.mkdir(parents=True, exist_ok=True)
        print(f"{len(jobs)} runs below {base}", flush=True)
        results = launcher.launch([[f"hydra.sweep.subdir={job.name}"] for job in jobs], initial_job_idx=0)
    statuses = [result.return_value for result in results]
    for job, status in zip(jobs, statuses, strict=True):
        said = "" if status == 0 else f": {last_error(job.directory / LOG) or 'no word of why'}"
        print(f"{job.name}: {'done' if status == 0 else f'exit status {status}'}{said}")
    print(f"compare them with `dsv3fp8 compare report {shlex.quote(str(base))}`", flush=True)
    return 0 if not any(statuses) else 1


def expand(words: Sequence[str]) -> tuple[Path, list[Job]]:
    """(directory of the sweep, a job for every combination of the swept values). Raises UserError."""
    base, fixed = Path(DEFAULT_DIRECTORY), list[str]()
    swept: list[list[tuple[str, str]]] = []  # of each swept key: (part of the name, word)
    for word in words:
        key, _, text = word.lstrip("+").partition("=")
        values = _swept_values(word, key, text)
        if key == "run_dir":
            if values:
                raise UserError(
                    f"{word}: with -m, run_dir is the one directory above all runs, which are named after their values"
                )
            base = Path(text.strip("'\"")).expanduser()
        elif values:
            swept.append([(_part(key, value), f"{key}={value}") for value in values])
        else:
            fixed.append(word)
    if not swept:
        raise UserError("-m: no key has several values; sweep one, as in `train -m recipe=bf16,dsv3 training.seed=0,1`")
    base = base.absolute()
    jobs: list[Job] = []
    for combination in itertools.product(*swept):
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", "-".join(part for part, _ in combination))
        if any(job.name == name for job in jobs):
            name = f"{name}-{len(jobs)}"
        quoted = str(base / name).replace("\\", "\\\\").replace('"', '\\"')
        told = (*fixed, *(word for _, word in combination), f'run_dir="{quoted}"')
        jobs.append(Job(name, told, base / name))
    return base, jobs


def _swept_values(word: str, key: str, text: str) -> list[str]:
    """The values as words of the command line, none if the word gives one value."""
    if key == "config":
        return []
    try:
        parsed = OverridesParser.create().parse_override(f"{key}={text}")
        if not parsed.is_sweep_override():
            return []
        if not parsed.is_discrete_sweep():
            raise UserError(f"{word}: a sweep needs a list of values, as in {key}=1,2 or {key}=range(1,5)")
        return list(parsed.sweep_string_iterator())
    except HydraException as error:
        if "," in text and not text.startswith(("[", "'", '"')):
            raise UserError(f"{word}: cannot be read as values to sweep over ({str(error).splitlines()[0]})") from error
        return []  # one odd value; load_config says what is wrong with it, if anything is


def _part(key: str, value: str) -> str:
    if key in GROUPS:
        return value
    short = key.rpartition(".")[2]
    return f"{short}{value}" if short == "seed" else f"{short}_{value}"


@contextlib.contextmanager
def _launcher(own: Sequence[str], jobs: Sequence[Job], base: Path) -> Iterator[Any]:
    """Hydra's launcher, with the jobs behind it. UserError for one that is not there or not set up so."""
    asked = next((word.partition("=")[2] for word in own if word.startswith("hydra/launcher=")), "basic")
    if asked not in LAUNCHERS:
        raise UserError(f"hydra/launcher={asked}: no such launcher; there are {', '.join(LAUNCHERS)}")
    quoted = str(base).replace("\\", "\\\\").replace('"', '\\"')
    overrides = [
        *own, f'hydra.sweep.dir="{quoted}"', "hydra.output_subdir=null", "hydra/job_logging=disabled",
        "hydra/hydra_logging=disabled", "hydra.job.name=dsv3fp8",
    ]  # fmt: skip
    with initialize_config_dir(config_dir=str(config_dir()), version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        try:
            config: DictConfig = hydra.compose_config("config", overrides, RunMode.MULTIRUN, with_log_configuration=False)
            context = HydraContext(config_loader=hydra.config_loader, callbacks=Callbacks(config))
            task = functools.partial(run_job, tuple(jobs))
            launcher = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=task, config=config)
        except HydraException as error:
            if asked != "basic" and f"hydra/launcher/{asked}" in str(error):
                raise UserError(
                    f"hydra/launcher={asked} is not installed: `pip install 'dsv3fp8[{EXTRA}]'`, or leave it out to start the "
                    "runs one after another"
                ) from error
            raise UserError(f"{' '.join(own)}: {str(error).splitlines()[0]}") from error
        yield launcher


def run_job(jobs: tuple[Job, ...], settings: DictConfig) -> int:
    """What a launcher calls, wherever it runs jobs: trains the one whose turn it is; its exit status.

    SIGINT and SIGTERM are passed on, the run saves, and the launcher goes no further.
    """
    number = int(HydraConfig.get().job.num)
    job = jobs[number]
    say = functools.partial(print, flush=True)
    wait_until_free(job.directory, say)
    say(f"{job.name}: starts; see {job.directory / LOG}")
    with StopRequest() as stop:
        process = start_training([*job.words], job.directory / LOG, _gpu(number))
        while True:
            with contextlib.suppress(TimeoutExpired):
                process.wait(0.2)
                break
            if stop.heard():
                process.send_signal(stop.signal or signal.SIGTERM)
                process.wait()
                break
        if stop.heard():
            raise SystemExit(stop.exit_code)
    return process.returncode


def _gpu(number: int) -> dict[str, str]:
    """Jobs take turns on the GPUs that this process sees."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        import torch

        gpus = [str(index) for index in range(torch.cuda.device_count())]
    else:
        gpus = [name for name in given.split(",") if name]
    return {"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]} if gpus else {}
