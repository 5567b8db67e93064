"""A comparison as data: what report.json holds, and what the page, the picture, the tables and W&B are made from."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from dsv3fp8.errors import UserError
from dsv3fp8.observe.compare.curves import (
    BAND_WINDOWS,
    Curve,
    Steps,
    band,
    default_window,
    false_alarm,
    mean_of,
    relative_error,
    smooth,
)
from dsv3fp8.observe.compare.recipes import AGAIN, common_keys, once_more
from dsv3fp8.observe.compare.runs import ComparedRun, refuse_unlike
from dsv3fp8.observe.compare.verdict import Verdict, has_blown_up, judge, worse

POINTS = 400
"""Points of a curve that report.json and the charts hold; metrics.jsonl has all of them."""
SMOOTHED = ("grad_norm", "expert_load_max", "expert_load_entropy")
COUNTED = ("flushed_share", "saturated_share")
"""Of records, shown as they are: every so many steps have them, and runs that are older than a count have none of it."""
BASELINE = "bf16"
"""The recipe that the others are held against where nobody asks for another."""
SETTLED = 5
"""Steps at the start whose speed does not count."""


def study(
    runs: Sequence[ComparedRun],
    baseline: str | None = None,
    window: int | None = None,
    kept: Callable[[ComparedRun], tuple[float | None, str]] = lambda run: (None, ""),
) -> dict[str, Any]:
    """Compare the runs; everything but `timings` repeats when the runs do.

    baseline: a recipe's name; None takes bf16, or else the first. kept: bytes a token that a layer keeps, or why not.
    Raises UserError for runs that cannot be compared.
    """
    refuse_unlike(runs)
    names = list(dict.fromkeys(run.recipe for run in runs if not run.again))
    baseline = choose_baseline(names, baseline)
    _refuse_repeats(runs, baseline)
    names = [baseline, *dict.fromkeys(run.recipe for run in runs if run.again), *(name for name in names if name != baseline)]
    by_recipe = {name: {run.seed: run for run in sorted(runs, key=_seed) if run.recipe == name} for name in names}
    steps = runs[0].config.training.steps
    window = check_window(window, steps)

    alike = shared_seeds(by_recipe, once_more(baseline))
    trained = _Loss(by_recipe, baseline, "loss", BAND_WINDOWS * window, window)
    validated = _Loss(by_recipe, baseline, "validation_loss", BAND_WINDOWS * window)
    states = {name: {s: _state(run, name, trained, baseline) for s, run in by_recipe[name].items()} for name in names}
    for loss in (trained, validated):
        loss.set_band([s for s, state in states[baseline].items() if state == "complete"])

    recipes = []
    for name in names:
        ended = {seed for seed, state in states[name].items() if state == "complete"} & {
            seed for seed, state in states[baseline].items() if state == "complete"
        }
        ends = {key: loss.end(name, ended, alike[name]) for key, loss in (("training", trained), ("validation", validated))}
        alone: Verdict | None = "baseline" if name == baseline else "again" if name == once_more(baseline) else None
        of_runs = [*states[name].values()]
        verdicts = {key: judge(of_runs, end["error_by_seed"], end["band"], alone) for key, end in ends.items()}
        per_token, reason = kept(next(iter(by_recipe[name].values())))
        seeds = len([state for state in states[baseline].values() if state == "complete"])
        recipes.append(
            {
                "name": name,
                "baseline": alone == "baseline",
                "again": alone == "again",
                "verdict": worse(*verdicts.values()),
                **{f"{key}_verdict": verdict for key, verdict in verdicts.items()},
                **ends,
                "false_alarm": false_alarm(seeds, len(ended)) if seeds > 1 and ended and alone is None else None,
                "runs": [_run_facts(run, states[name][seed]) for seed, run in by_recipe[name].items()],
                **_levels([by_recipe[name][seed] for seed in alike[name]], window),
                "kept_bytes_per_token": per_token,
                "kept_bytes_missing": reason,
            }
        )
    return {
        "settings": {**_settings(runs, baseline, window), "mean_seeds": alike},
        "recipes": recipes,
        "curves": {
            "training": trained.curves(alike),
            "validation": validated.curves(alike),
            **{key: _plain_curves(by_recipe, alike, key, window) for key in SMOOTHED},
            **{key: _plain_curves(by_recipe, alike, key, None) for key in COUNTED},
        },
        "timings": [_timings(name, by_recipe[name].values()) for name in names],
    }


def _refuse_repeats(runs: Sequence[ComparedRun], baseline: str) -> None:
    first = {run.seed for run in runs if run.recipe == baseline}
    for run in runs:
        if run.again and (run.recipe != once_more(baseline) or run.seed not in first):
            raise UserError(
                f"{run.directory} is {run.name}: a second run is held against the first of the baseline, {baseline}, with its "
                "seed; add that one, or leave this one out"
            )


def choose_baseline(names: Sequence[str], asked: str | None) -> str:
    """The recipe that the others are held against. UserError for one that is not there."""
    if not names:
        raise UserError(f"all runs are second ones (directories that end with {AGAIN}): add those that they repeat")
    if asked is None:
        return BASELINE if BASELINE in names else names[0]
    if asked not in names:
        raise UserError(f"baseline={asked}: no run has that recipe; there are {', '.join(names)}")
    return asked


def shared_seeds(by_recipe: Mapping[str, Mapping[int, ComparedRun]], again: str) -> dict[str, list[int]]:
    """The seeds whose mean stands for a recipe: those that every recipe has, and where there is none, its own.

    Seeds differ by more than recipes do: means over unlike seeds would show that as a difference of recipes.
    again: the baseline's second runs, which have no mean for that reason, only errors.
    """
    common = set.intersection(*(set(runs) for name, runs in by_recipe.items() if name != again))
    return {name: [] if name == again else sorted(common or runs) for name, runs in by_recipe.items()}


def check_window(asked: int | None, steps: int) -> int:
    """The smoothing window in steps. UserError for one that no curve fills."""
    if asked is None:
        return default_window(steps)
    if not 1 <= asked <= steps:
        raise UserError(f"window={asked}: give the steps to smooth over, from 1 to the {steps} of the runs")
    return asked


class _Loss:
    """One loss of all runs over one grid of steps, with errors and band."""

    def __init__(
        self,
        by_recipe: Mapping[str, Mapping[int, ComparedRun]],
        baseline: str,
        field: str,
        span: int,
        window: int | None = None,
    ) -> None:
        self._baseline, self._span = baseline, span
        self._last = next(iter(by_recipe[baseline].values())).config.training.steps
        self.steps = steps = _grid(by_recipe, field)
        raw = {name: {seed: _read(run, field, steps) for seed, run in runs.items()} for name, runs in by_recipe.items()}
        self.losses = {
            name: {seed: _read(run, field, steps, window) for seed, run in runs.items()} for name, runs in by_recipe.items()
        }
        self.errors = {
            name: {
                seed: _until(
                    min(run.last_step, by_recipe[baseline][seed].last_step),
                    steps,
                    relative_error(steps, raw[name][seed], raw[baseline][seed], window),
                )
                for seed, run in runs.items()
                if seed in raw[baseline]
            }
            for name, runs in by_recipe.items()
        }
        self.band: Curve | None = None

    def set_band(self, seeds: Sequence[int]) -> None:
        """seeds: of the baseline's runs that the band rests on."""
        self.band = band(self.steps, [self.losses[self._baseline][seed] for seed in seeds], self._span)

    def last(self, name: str, seed: int) -> float | None:
        """At the last step of the settings; None where the run has none."""
        at_end = len(self.steps) and self.steps[-1] == self._last
        return _number(self.losses[name][seed][-1]) if at_end and seed in self.losses[name] else None

    def end(self, name: str, seeds: set[int], alike: Sequence[int]) -> dict[str, Any]:
        """Loss, error and band at the last step. seeds: those that ended here and in the baseline; alike: `shared_seeds`."""
        losses = {seed: self.last(name, seed) for seed in self.losses[name]}
        known = [loss for seed, loss in losses.items() if loss is not None and seed in alike]
        errors = {s: _number(self.errors[name][s][-1]) for s in sorted(seeds) if self.last(name, s) is not None}
        finite = {seed: error for seed, error in errors.items() if error is not None}
        return {
            "loss": sum(known) / len(known) if known else None,
            "loss_by_seed": losses,
            "error": sum(finite.values()) / len(finite) if finite and name != self._baseline else None,
            "largest_error": None if name == self._baseline else self._largest(name, finite),
            "error_by_seed": {} if name == self._baseline else finite,
            "band": None if self.band is None or not len(self.band) else _number(self.band[-1]),
        }

    def _largest(self, name: str, seeds: Collection[int]) -> tuple[float, int] | None:
        """The largest error of one of these runs at any step, signed, and the step."""
        curves = [self.errors[name][seed] for seed in seeds]
        found = [(float(curve[at]), int(self.steps[at])) for curve in curves for at in [_farthest(curve)] if at >= 0]
        return max(found, key=lambda pair: abs(pair[0]), default=None)

    def curves(self, alike: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        """For report.json: thinned, with null where there is no value. alike: `shared_seeds`."""
        keep = _thinned(self.steps)
        return {
            "step": self.steps[keep].tolist(),
            "band": None if self.band is None else _plain(self.band[keep]),
            "recipes": {
                name: {
                    "loss": _plain(mean_of([curves[seed] for seed in alike[name]], len(self.steps))[keep]),
                    "loss_by_seed": {seed: _plain(curve[keep]) for seed, curve in curves.items()},
                    "error": _plain(mean_of([*self.errors[name].values()], len(self.steps))[keep])
                    if self.errors[name]
                    else None,
                    "error_by_seed": {seed: _plain(curve[keep]) for seed, curve in self.errors[name].items()},
                }
                for name, curves in self.losses.items()
            },
        }


def _farthest(curve: Curve) -> int:
    """Where its largest value lies, whatever the sign; -1 where it has none."""
    sizes = np.where(np.isfinite(curve), np.abs(curve), -1.0)
    return int(sizes.argmax()) if sizes.size and sizes.max() >= 0 else -1


def _grid(by_recipe: Mapping[str, Mapping[int, ComparedRun]], field: str) -> Steps:
    """Steps at which every finished run (of counts: that has any) logged the field; without one, those of any run."""
    runs = [run for runs in by_recipe.values() for run in runs.values()]
    logged = {id(run): {r["step"] for r in run.records if r.get(field) is not None} for run in runs}
    finished = [logged[id(run)] for run in runs if run.state == "complete" and (logged[id(run)] or field not in COUNTED)]
    common = set.intersection(*finished) if finished else set.union(*logged.values())
    return np.array(sorted(common), np.int64)


def _read(run: ComparedRun, field: str, steps: Steps, window: int | None = None) -> Curve:
    """The field at those steps, smoothed if there is a window; NaN behind the run's end and where it is not finite."""
    values = {record["step"]: record[field] for record in run.records if record.get(field) is not None}
    curve = np.array([values.get(step, math.nan) for step in steps.tolist()], np.float64)
    curve = np.where(np.isfinite(curve), curve, math.nan)
    return curve if window is None else _until(run.last_step, steps, smooth(steps, curve, window))


def _until(last: int, steps: Steps, curve: Curve) -> Curve:
    """NaN behind a run's end, which a window still reaches back before."""
    return np.where(steps <= last, curve, math.nan)


def _state(run: ComparedRun, name: str, loss: _Loss, baseline: str) -> str:
    """complete, unfinished or diverged."""
    if run.state == "unfinished":
        return "unfinished"
    curve = loss.losses[name][run.seed]
    reference = None if name == baseline else loss.last(baseline, run.seed)
    return "diverged" if has_blown_up(curve, run.state == "gave up", reference) else "complete"


def _run_facts(run: ComparedRun, state: str) -> dict[str, Any]:
    last = run.records[-1]
    return {
        "seed": run.seed,
        "state": state,
        "last_step": last["step"],
        "skipped": last["skipped"],
        "error": None if run.state == "complete" else run.error,
    }


def _levels(runs: Iterable[ComparedRun], window: int) -> dict[str, Any]:
    """What a recipe's curves end at, a mean over its runs: smoothed, but for the last counts of what casts lose."""
    found: dict[str, Any] = {}
    for field in (*SMOOTHED, *COUNTED):
        ends = []
        for run in runs:
            pairs = [(r["step"], r[field]) for r in run.records if r.get(field) is not None and math.isfinite(r[field])]
            recent = [value for step, value in pairs if step > run.last_step - window]
            if pairs and field in COUNTED:
                ends.append(pairs[-1][1])
            elif recent:
                ends.append(sum(recent) / len(recent))
        found[field] = sum(ends) / len(ends) if ends else None
    return found


def _plain_curves(
    by_recipe: Mapping[str, Mapping[int, ComparedRun]], alike: Mapping[str, Sequence[int]], field: str, window: int | None
) -> dict[str, Any]:
    """A field of all runs, a mean over the seeds in `alike`, for report.json."""
    steps = _grid(by_recipe, field)
    keep = _thinned(steps)
    return {
        "step": steps[keep].tolist(),
        "recipes": {
            name: _plain(mean_of([_read(runs[seed], field, steps, window) for seed in alike[name]], len(steps))[keep])
            for name, runs in by_recipe.items()
        },
    }


def _settings(runs: Sequence[ComparedRun], baseline: str, window: int) -> dict[str, Any]:
    """What all runs have in common."""
    config, corpus = runs[0].config, runs[0].corpus
    training = config.training
    tokens_a_step = training.batch * training.accumulate * training.context * config.parallel.ranks
    train_tokens = corpus["train"]["tokens"]
    return {
        "model": config.model.name,
        "recipe_keys": common_keys([run.config.recipe for run in runs]),
        "corpus": {
            "source": corpus["source"],
            "sha256": corpus["sha256"],
            "tokenizer": corpus["tokenizer"]["name"],
            "vocab_size": corpus["tokenizer"]["vocab_size"],
            "training_tokens": train_tokens,
            "validation_tokens": corpus["validation"]["tokens"],
            "bigram_loss": corpus.get("bigram", {}).get("loss"),
        },
        "steps": training.steps,
        "tokens_a_step": tokens_a_step,
        "context": training.context,
        "tokens": tokens_a_step * training.steps,
        "epochs": tokens_a_step * training.steps / train_tokens,
        "schedule": config.schedule.name,
        "warmup": config.schedule.warmup,
        "lr": config.optimizer.lr,
        "baseline": baseline,
        "window": window,
        "band_span": BAND_WINDOWS * window,
    }


def _timings(name: str, runs: Collection[ComparedRun]) -> dict[str, Any]:
    """Speed, memory and time of a recipe's runs, as they came out on the machine they had."""
    speeds = [
        [r["tokens_per_second"] for r in run.records if r["step"] > SETTLED and r.get("tokens_per_second")] for run in runs
    ]
    medians = [median(each) for each in speeds if each]
    cuda = [r["cuda_allocated_peak_gb"] for run in runs for r in run.records if r.get("cuda_allocated_peak_gb")]
    host = [r["rss_peak_gb"] for run in runs for r in run.records if r.get("rss_peak_gb")]
    return {
        "name": name,
        "tokens_per_second": sum(medians) / len(medians) if medians else None,
        "cuda_allocated_peak_gb": max(cuda, default=None),
        "rss_peak_gb": max(host, default=None),
        "seconds_by_seed": {run.seed: run.records[-1].get("seconds") for run in runs},
    }


def _thinned(steps: Steps) -> Steps:
    """Indices of at most POINTS steps, evenly spread, the last one among them."""
    count = len(steps)
    return np.unique(np.linspace(0, max(count - 1, 0), min(count, POINTS)).round().astype(np.int64))


def _plain(curve: Curve) -> list[float | None]:
    return [None if not math.isfinite(value) else float(f"{value:.7g}") for value in curve.tolist()]


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _seed(run: ComparedRun) -> int:
    return run.seed
