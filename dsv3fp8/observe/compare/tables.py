"""A comparison in tables and sentences: nothing here says more than a rule or a figure of the study does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsv3fp8.observe.compare.verdict import RULES
from dsv3fp8.observe.output import pipe_table

ABSENT = "–"


@dataclass(frozen=True)
class Table:
    """title: its caption. note: what the columns mean. The first column names the row, the others are aligned right."""

    title: str
    note: str
    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def markdown(self) -> str:
        """A pipe table."""
        return pipe_table(self.heads, self.rows)


def tables_of(data: Mapping[str, Any]) -> list[Table]:
    """Verdicts, costs and runs of a study."""
    return [verdict_table(data), cost_table(data), runs_table(data)]


def verdict_table(data: Mapping[str, Any]) -> Table:
    """What each recipe's loss is against the baseline's."""
    rows = []
    for recipe in data["recipes"]:
        cells = [recipe["name"], recipe["verdict"]]
        for key in ("training", "validation"):
            part = recipe[key]
            cells += [_loss(part["loss"]), _error(part), _half_width(part["band"]) + _mark(recipe[f"{key}_verdict"])]
        rows.append(tuple(cells))
    baseline, window = data["settings"]["baseline"], data["settings"]["window"]
    return Table(
        "Verdicts",
        f"Losses in nats a token at the last step, {means(data)}: training loss over the last {_steps(window)}, validation "
        f"loss on the same batches for every run. Errors are relative to {baseline} of the same seed: the mean, and in "
        "brackets each seed. A band is twice the root mean square of the difference between two seeds of the baseline "
        "(✓ within, ✗ outside); in training loss that holds what their batches differ by, too.",
        ("recipe", "verdict", "training loss", "error", "band", "validation loss", "error", "band"),
        rows,
    )


def cost_table(data: Mapping[str, Any]) -> Table:
    """What each recipe takes and how it behaved."""
    speeds = {each["name"]: each for each in data["timings"]}
    base = speeds[data["settings"]["baseline"]]["tokens_per_second"]
    rows = []
    for recipe in data["recipes"]:
        timing = speeds[recipe["name"]]
        speed = timing["tokens_per_second"]
        memory = timing["cuda_allocated_peak_gb"] or timing["rss_peak_gb"]
        rows.append(
            (
                recipe["name"],
                ABSENT if speed is None else f"{speed:,.0f}",
                ABSENT if speed is None or not base else f"{speed / base:.2f}",
                ABSENT if memory is None else f"{memory:.2f} GB",
                ABSENT if recipe["kept_bytes_per_token"] is None else f"{recipe['kept_bytes_per_token']:,.0f}",
                _share(recipe["flushed_share"]),
                _share(recipe["saturated_share"]),
                _number(recipe["grad_norm"], ".3f"),
                _number(recipe["expert_load_max"], ".2f"),
                _number(recipe["expert_load_entropy"], ".4f"),
                str(sum(run["skipped"] for run in recipe["runs"])),
            )
        )
    cuda = any(each["cuda_allocated_peak_gb"] for each in data["timings"])
    what = "allocated by CUDA at most" if cuda else "most host memory of a run's process"
    missing = "; ".join(f"{r['name']}: {r['kept_bytes_missing']}" for r in data["recipes"] if r["kept_bytes_missing"])
    return Table(
        "Cost and behaviour",
        f"Speed: median over the steps of a run, mean over seeds; runs that shared a machine shared its speed. Memory: {what}. "
        "Kept: bytes a token that one layer (a MoE layer where there is one) holds for backward, observed on a CPU. Flushed: "
        "share of nonzero values that quantization made zero; saturated: that a scale from earlier "
        "steps put beyond the largest code; at the last count. Gradient norm (before clipping) and expert "
        f"balance (worst layer; 1 is even): over the last {_steps(data['settings']['window'])}; these and what was counted: "
        f"{means(data)}. Skipped: steps whose loss or gradient was not finite, all seeds."
        f"{f' Not observed: {missing}.' if missing else ''}",
        (
            "recipe",
            "tokens/s",
            f"of {data['settings']['baseline']}",
            "memory",
            "kept bytes",
            "flushed",
            "saturated",
            "gradient norm",
            "busiest expert / mean",
            "entropy of shares",
            "skipped",
        ),
        rows,
    )


def runs_table(data: Mapping[str, Any]) -> Table:
    """How far each run came."""
    seconds = {each["name"]: each["seconds_by_seed"] for each in data["timings"]}
    rows = []
    for recipe in data["recipes"]:
        for run in recipe["runs"]:
            seed = run["seed"]
            rows.append(
                (
                    f"{recipe['name']} seed {seed}",
                    run["state"] if run["error"] is None else f"{run['state']}: {run['error']}",
                    f"{run['last_step']:,} of {data['settings']['steps']:,}",
                    str(run["skipped"]),
                    _loss(_at(recipe["training"]["loss_by_seed"], seed)),
                    _loss(_at(recipe["validation"]["loss_by_seed"], seed)),
                    _number(_at(seconds[recipe["name"]], seed), ",.0f"),
                )
            )
    heads = ("run", "state", "steps", "skipped", "training loss", "validation loss", "seconds in steps")
    return Table("Runs", "Losses at the last step, training loss smoothed.", heads, rows)


def means(data: Mapping[str, Any]) -> str:
    """Over which seeds a recipe's figures are averaged, in words."""
    alike = data["settings"]["mean_seeds"]
    recipes = [recipe for recipe in data["recipes"] if not recipe["again"]]
    seeds = alike[data["settings"]["baseline"]]
    if any(alike[recipe["name"]] != seeds for recipe in recipes):
        return "means over the seeds of each recipe, which are not the same ones"
    if all(len(recipe["runs"]) == len(seeds) for recipe in recipes):
        return "means over seeds"
    return f"of seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}, which all recipes have"


def findings(data: Mapping[str, Any]) -> list[str]:
    """A sentence for each recipe but the baseline, and what the band can and cannot tell."""
    baseline = data["settings"]["baseline"]
    seeds = next(sum(run["state"] == "complete" for run in r["runs"]) for r in data["recipes"] if r["baseline"])
    lines = [_finding(recipe, baseline) for recipe in data["recipes"] if not recipe["baseline"]]
    if all(recipe["training"]["band"] is None for recipe in data["recipes"]):
        lines.append(
            f"There is no band: it takes two finished seeds of {baseline}. What single runs differ by cannot be told from what "
            "another seed would have made."
        )
    else:
        lines.append(
            f"The bands rest on {seeds} seeds of {baseline}. Within means no more than twice what those differ by, which "
            f"is not to say that there is no difference; outside means more{_chances(data)}."
        )
    lines.append(
        f"All of it holds for this model, {_tokens(data)} and these settings: what comes later, or with a larger model, "
        "is not measured here."
    )
    return lines


def _chances(data: Mapping[str, Any]) -> str:
    """How sure "outside" is, with so few seeds."""
    chances = [round(100 * recipe["false_alarm"]) for recipe in data["recipes"] if recipe["false_alarm"] is not None]
    if not chances:
        return ""
    return (
        f", yet a recipe whose runs differ from the baseline's only as two seeds do lands there in up to {max(1, *chances)} % "
        "of the cases with each loss, since so few seeds know their own spread badly"
    )


def _tokens(data: Mapping[str, Any]) -> str:
    count = data["settings"]["tokens"]
    return f"{count:,} tokens" if count < 1e6 else f"{count / 1e6:,.4g} M tokens"


def rules(data: Mapping[str, Any]) -> list[str]:
    """`verdict: rule`, for the verdicts that occur and the two that every comparison is about."""
    seen = {recipe["verdict"] for recipe in data["recipes"]}
    wanted = [name for name in RULES if name in seen or name.endswith("the band")]
    return [f"{name}: {RULES[name]}" for name in wanted]


def title(data: Mapping[str, Any]) -> str:
    """The comparison in a line."""
    names = [recipe["name"] for recipe in data["recipes"] if not recipe["again"]]
    return f"{', '.join(names[1:]) or names[0]}{f' against {names[0]}' if len(names) > 1 else ''}"


def subtitle(data: Mapping[str, Any]) -> str:
    """What was trained on what."""
    settings = data["settings"]
    corpus = settings["corpus"]
    seeds = sorted({len(recipe["runs"]) for recipe in data["recipes"] if not recipe["again"]})
    number = f"{seeds[0]} to {seeds[-1]} seeds" if seeds[0] != seeds[-1] else f"{seeds[0]} seed{'s' if seeds[0] > 1 else ''}"
    keys = f", all with {' '.join(settings['recipe_keys'])}" if settings["recipe_keys"] else ""
    return (
        f"{settings['model']}, {_steps(settings['steps'])} of {settings['tokens_a_step']:,} tokens "
        f"({_tokens(data)}, {settings['epochs']:.2g} epochs) of {corpus['source']} "
        f"({corpus['tokenizer']}, {corpus['vocab_size']:,} ids), {number} a recipe{keys}"
    )


def _finding(recipe: Mapping[str, Any], baseline: str) -> str:
    name, verdict = recipe["name"], recipe["verdict"]
    if verdict == "diverged":
        bad = [run for run in recipe["runs"] if run["state"] == "diverged"]
        return (
            f"{name} diverged in {len(bad)} of {len(recipe['runs'])} runs (seed {', '.join(str(run['seed']) for run in bad)})."
        )
    if verdict == "unfinished":
        short = [run for run in recipe["runs"] if run["state"] == "unfinished"]
        where = ", ".join(f"seed {run['seed']} at step {run['last_step']:,}" for run in short)
        return f"{name} is not finished ({where}): no verdict."
    if verdict == "no baseline":
        return f"{name} has no finished run of {baseline} with the same seed to be held against."
    if verdict == "again":
        return _differs_from_itself(recipe, baseline)
    parts = []
    for key in ("training", "validation"):
        part, judged = recipe[key], recipe[f"{key}_verdict"]
        if part["error"] is None:
            continue
        text = f"{_signed(part['error'])} in {key} loss ({_by_seed(part['error_by_seed'])})"
        if judged.endswith("the band"):
            text += f", {judged.split()[0]} the band of ±{100 * part['band']:.2f} %"
        parts.append(text)
    return f"{name} ends against {baseline} at {', and at '.join(parts)}."


def _differs_from_itself(recipe: Mapping[str, Any], baseline: str) -> str:
    found = {key: recipe[key] for key in ("training", "validation") if recipe[key]["largest_error"] is not None}
    if all(part["largest_error"][0] == 0 for part in found.values()):
        return f"{baseline}, trained a second time from the same seed, took the same steps."
    parts = []
    for key, part in found.items():
        error, step = part["largest_error"]
        parts.append(f"{key} loss {_by_seed(part['error_by_seed'])} at the end, {_signed(error)} at step {step:,}, the most")
    return (
        f"{baseline} differs from itself, trained a second time from the same seed, in {'; in '.join(parts)}: a difference of "
        "that size at that place cannot be told from chance."
    )


def _by_seed(errors: Mapping[int, float]) -> str:
    return ", ".join(f"seed {seed}: {_signed(error)}" for seed, error in errors.items())


def _signed(error: float) -> str:
    text = f"{100 * abs(error):.2f} %"
    return text if round(100 * abs(error), 2) == 0 else f"{'+' if error > 0 else '−'}{text}"


def _error(part: Mapping[str, Any]) -> str:
    if part["error"] is None:
        return ABSENT
    return f"{_signed(part['error'])} ({', '.join(_signed(error)[:-2] for error in part['error_by_seed'].values())})"


def _mark(verdict: str) -> str:
    return {"within the band": " ✓", "outside the band": " ✗"}.get(verdict, "")


def _half_width(value: float | None) -> str:
    return ABSENT if value is None else f"±{100 * value:.2f} %"


def _loss(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.4f}"


def _number(value: float | None, form: str) -> str:
    return ABSENT if value is None else f"{value:{form}}"


def _share(value: float | None) -> str:
    return ABSENT if value is None else f"{100 * value:.3g} %"


def _at(values: Mapping[Any, Any], seed: int) -> Any:
    """Keys are text where the data were read from JSON."""
    return values.get(seed, values.get(str(seed)))


def _steps(count: int) -> str:
    return f"{count:,} step{'' if count == 1 else 's'}"
