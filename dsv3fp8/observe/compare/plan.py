"""Which runs a comparison makes: one of every recipe and seed, each checked before the first of them starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dsv3fp8.config import RunConfig, load_config, load_saved
from dsv3fp8.data import open_corpus
from dsv3fp8.errors import UserError
from dsv3fp8.observe.compare.recipes import AGAIN, directory_name, names_of, once_more, words_of
from dsv3fp8.observe.compare.runs import gave_up, is_complete, read_corpus, read_records
from dsv3fp8.observe.compare.study import check_window, choose_baseline
from dsv3fp8.training.checkpoint_directory import list_checkpoints
from dsv3fp8.training.checks import select_device, validate_run
from dsv3fp8.training.resume import changed_keys, refuse_changes, refuse_other_corpus
from dsv3fp8.training.run_directory import RunDirectory

# What runs of a comparison are told unless the command line says otherwise: the report has the curves.
DEFAULTS = ("logging.progress=plain", "logging.plot=false", "training.keep=1")
# Given by the comparison itself, with the key to use instead.
TAKEN = {"recipe": "recipes=A,B", "run_dir": "out=DIR", "resume": "another out=DIR"}
# What the command takes in place of the old settings or files of its runs.
ELSEWHERE = "or another out=DIR"


@dataclass
class CompareConfig:
    """The keys of the command; every other word goes to all runs, as `train` takes it."""

    # Recipes with commas in between, each a name or NAME:KEY=VALUE:… of the recipe, such as dsv3:attention_cache=compute.
    recipes: str
    # Runs of each recipe: seeds training.seed, training.seed + 1, …
    seeds: int = 2
    # Runs of the baseline, where its band should rest on more; null: as many as of the others.
    baseline_seeds: int | None = None
    # Runs of the baseline, from its first seed on, that are trained a second time: on a GPU they differ, and by no recipe.
    repeats: int = 0
    # The recipe that the others are held against; null: bf16 if it is among them, else the first.
    baseline: str | None = None
    # Directory of the report, with one run directory a run below it; null: runs/compare-MODEL.
    out: str | None = None
    # Runs at a time; null: one on each GPU that is visible, one on a CPU.
    jobs: int | None = None
    # Steps that curves are smoothed over; null: a twentieth of the run.
    window: int | None = None
    # false: delete the checkpoints of a run once it is finished.
    keep_checkpoints: bool = True

    def validate(self) -> None:
        """Raise UserError with every value that makes no sense."""
        problems = [
            f"{key}={value} must be at least 1"
            for key, value in (("seeds", self.seeds), ("baseline_seeds", self.baseline_seeds), ("jobs", self.jobs))
            if value is not None and value < 1
        ]
        if not 0 <= self.repeats <= (self.baseline_seeds or self.seeds):
            problems.append(
                f"repeats={self.repeats} must be from 0 to the {self.baseline_seeds or self.seeds} seeds of the baseline"
            )
        if self.baseline_seeds is not None and self.baseline_seeds < self.seeds:
            problems.append(f"baseline_seeds={self.baseline_seeds} must be at least seeds={self.seeds}: seeds are paired")
        if not self.recipes.strip(", "):
            problems.append("recipes is empty: give some, as in recipes=bf16,dsv3")
        if problems:
            raise UserError("; ".join(problems))


@dataclass
class PlannedRun:
    """One run to be made: recipe and seed, its settings, and the words that `train` is given."""

    recipe: str
    config: RunConfig
    words: list[str]

    @property
    def directory(self) -> Path:
        """Its run directory."""
        return Path(self.config.run_dir)

    @property
    def name(self) -> str:
        """As in the report."""
        return f"{self.recipe} seed {self.config.training.seed}"


@dataclass
class Plan:
    """runs: the baseline's first, then by recipe, seed after seed. out: of the report."""

    runs: list[PlannedRun]
    baseline: str
    out: Path
    window: int
    group: str


def make_plan(config: CompareConfig, words: Sequence[str]) -> Plan:
    """The runs of a comparison. Raises UserError for settings that no run, or not this comparison, can have."""
    for word in words:
        key = word.lstrip("+").partition("=")[0]
        if key in TAKEN:
            raise UserError(f"{word}: a comparison makes its own runs; use {TAKEN[key]}")
    entries = [entry.strip() for entry in config.recipes.strip("[]").split(",") if entry.strip()]
    first = load_config([*words, *words_of(entries[0])])
    out = Path(config.out or f"runs/compare-{first.model.name}").expanduser().absolute()
    group = first.logging.group or out.name
    settings = [load_config([*words, *words_of(entry)]) for entry in entries]
    names = names_of([each.recipe for each in settings])
    for name, entry in zip(names, entries, strict=True):
        same = [other for other, other_name in zip(entries, names, strict=True) if other_name == name]
        if len(same) > 1:
            alike = f"{' and '.join(same)} are the same recipe; leave {entry} out"
            raise UserError(f"recipes={config.recipes}: {f'give {entry} once' if len(set(same)) == 1 else alike}")
    baseline = choose_baseline(names, config.baseline)
    runs = []
    for name, entry in sorted(zip(names, entries, strict=True), key=lambda pair: pair[0] != baseline):
        count = (config.baseline_seeds or config.seeds) if name == baseline else config.seeds
        seeds = range(first.training.seed, first.training.seed + count)
        again = seeds[: config.repeats] if name == baseline else ()
        for seed, shown, ending in [*((seed, name, "") for seed in seeds), *((seed, once_more(name), AGAIN) for seed in again)]:
            directory = out / (directory_name(name, seed) + ending)
            own = [f"training.seed={seed}", f"logging.group={_quoted(group)}", f"run_dir={_quoted(str(directory))}"]
            told = [*DEFAULTS, *words, *words_of(entry), *own]
            runs.append(PlannedRun(shown, load_config(told), told))
    for run in runs:
        _check(run)
    if config.repeats and (why := _repeats_bits(first)) is not None:
        raise UserError(f"repeats={config.repeats}: {why}, so that the second run would be the first; leave repeats out")
    if len({run.directory for run in runs}) < len(runs):
        raise UserError(f"recipes={config.recipes}: two of them would share a run directory; leave one out")
    return Plan(runs, baseline, out, check_window(config.window, first.training.steps), group)


def _repeats_bits(config: RunConfig) -> str | None:
    """Why two runs of the same settings and seed have the same bits, or None where they may differ."""
    if select_device(config.training.device).type == "cpu":
        return "a CPU repeats bits"
    return "training.deterministic=true repeats bits" if config.training.deterministic else None


def _check(run: PlannedRun) -> None:
    if run.config.parallel.ranks != 1:
        raise UserError(
            f"parallel.dp_replicate={run.config.parallel.dp_replicate} parallel.dp_shard={run.config.parallel.dp_shard}: a "
            "comparison trains each run in one process; set both to 1, or train the runs yourself and use `compare report`"
        )
    try:
        run.config.validate()
        validate_run(run.config)
    except UserError as error:
        raise UserError(f"{run.name}: {error}") from error


def check_against_disk(plan: Plan) -> None:
    """Raise UserError where runs that are there were made with other settings, or on another corpus."""
    corpus: str | None = None
    for run in plan.runs:
        saved = RunDirectory(run.directory)
        if not saved.config.is_file():
            continue
        step = last_step(run)
        changed = changed_keys(load_saved(saved.config).to_dict(), run.config.to_dict())
        refuse_changes(run.config.run_dir, step, changed, ELSEWHERE)
        description = saved.path / "corpus.json"
        if description.is_file():
            corpus = corpus or open_corpus(run.config.data).describe()["sha256"]
            refuse_other_corpus(run.config.run_dir, step, read_corpus(description)["sha256"], corpus, ELSEWHERE)


def last_step(run: PlannedRun) -> int:
    """The last step that the run has logged."""
    records = read_records(run.directory / "metrics.jsonl")
    return records[-1]["step"] if records else 0


def has_ended(run: PlannedRun) -> bool:
    """Whether there is nothing left to do: it is complete, or gave up and would do so again.

    A run whose checkpoints were deleted is complete with its records. One that was killed between its last record and its
    last checkpoint goes on from the checkpoint before.
    """
    records, training = read_records(run.directory / "metrics.jsonl"), run.config.training
    if gave_up(records, training.max_skipped):
        return True
    saved = list_checkpoints(run.directory / "checkpoints")
    return is_complete(records, training.steps) and (not saved or saved[-1][0] >= training.steps)


def _quoted(text: str) -> str:
    """For Hydra's grammar, whatever signs a path has."""
    return '"{}"'.format(text.replace("\\", "\\\\").replace('"', '\\"'))
