"""`dsv3fp8 map`: run one block and show what precision everything ran in."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from dsv3fp8.config import GROUPS, RunConfig, group_options, load_config, no_such
from dsv3fp8.errors import UserError
from dsv3fp8.kernels.te import INSIDE
from dsv3fp8.observe.map.difference import compare
from dsv3fp8.observe.map.geometry import arrange
from dsv3fp8.observe.map.html import page
from dsv3fp8.observe.map.observed import Observed
from dsv3fp8.observe.map.run import observe_block
from dsv3fp8.observe.map.svg import render
from dsv3fp8.observe.map.table import difference_table, map_table, missing_notice
from dsv3fp8.observe.output import writable_directory
from dsv3fp8.precision.ledger import Ledger
from dsv3fp8.schema import build_words, leaves, split_words
from dsv3fp8.training.checks import device_problems, select_device
from dsv3fp8.training.config import raise_problems
from dsv3fp8.training.host import keep_freed_memory, limit_memory

HELP = ("-h", "--help", "help")
MODEL_KEYS = ("model", "recipe", "model.KEY", "recipe.KEY")
FILES = ("map.json", "map.svg", "map.html")


@dataclass
class MapConfig:
    """The keys of the command, beside model, recipe and their keys."""

    # A recipe to compare with, node by node.
    against: str | None = None
    # Which block: dense, moe, or auto: moe where the model has experts.
    layer: Literal["auto", "dense", "moe"] = "auto"
    # Tokens the block runs on, one sequence.
    tokens: int = 256
    # Directory to write map.json, map.svg and map.html to.
    out: str = "runs/map"
    # Of the weights, the input and the output's gradient.
    seed: int = 0
    # auto, cpu or cuda.
    device: str = "cpu"

    def validate(self) -> None:
        """Raise UserError with every value that makes no sense."""
        problems = device_problems("device", self.device)
        if self.tokens < 1:
            problems.append(f"tokens={self.tokens} must be at least 1")
        if self.seed < 0:
            problems.append(f"seed={self.seed} must be at least 0")
        options = group_options("recipe")
        if self.against is not None and self.against not in options:
            problems.append(no_such("against", "recipe", self.against, options))
        raise_problems(problems)


def main(arguments: list[str]) -> int:
    """Print the map, write its files; 1 if the ledger did not report what it should have, else 0."""
    if any(argument in HELP for argument in arguments):
        print(help_text())
        return 0
    config, settings = parse(arguments)
    compared = None
    if config.against is not None:
        words = [word for word in arguments if word.partition("=")[0] in ("model", "config") or word.startswith("model.")]
        compared = load_config([*words, f"recipe={config.against}"])
    _check(config, settings, compared)
    layer = _layer(config, settings)
    out = writable_directory(config.out, *FILES)
    ledger, this = _observe(config, settings, layer)
    data: dict[str, Any] = {
        "model": settings.model.name,
        "layer": layer,
        "tokens": config.tokens,
        "device": select_device(config.device).type,
    }
    data |= _entry(this, ledger)
    other, changes = None, []
    print(map_table(this))
    if compared is not None:
        ledger, other = _observe(config, compared, layer)
        changes = compare(this, other)
        data["against"] = _entry(other, ledger)
        data["difference"] = [vars(change) for change in changes if not change.equal]
        print(f"\n{difference_table(changes, this, other)}")
    drawing = arrange(this, other)
    data["missing"] = drawing.missing
    for name, text in zip(FILES, (json.dumps(data, indent=1), render(drawing), page(drawing, changes)), strict=True):
        (out / name).write_text(text, encoding="utf-8")
    print(f"\nsee {', '.join(str(out / name) for name in FILES)}")
    notice = missing_notice(drawing)
    if notice:
        print(notice)
    return 1 if notice else 0


def parse(arguments: list[str]) -> tuple[MapConfig, RunConfig]:
    """The command's own keys, and the settings that the other words choose. Raises UserError."""
    values, rest = split_words(MapConfig, arguments, "recipe=dsv3 against=bf16", (*GROUPS, "config"), MODEL_KEYS)
    return build_words(MapConfig, values), load_config(rest)


def help_text() -> str:
    """The keys with their defaults and comments."""
    keys = "\n".join(f"  {key:<14}{note}" for key, _, note in leaves(MapConfig))
    return (
        "Usage: dsv3fp8 map [recipe=dsv3] [model=tiny] [against=bf16] [recipe.KEY=value …] [key=value …]\n\n"
        "Runs one block forward and backward, and draws what every op computed in and every tensor was carried in.\n\n"
        f"{keys}"
    )


def _layer(config: MapConfig, settings: RunConfig) -> str:
    has = {"moe": settings.model.has_experts, "dense": settings.model.dense_layers > 0 or not settings.model.has_experts}
    if config.layer != "auto" and not has[config.layer]:
        raise UserError(f"layer={config.layer}: model={settings.model.name} has no such layer; leave the key out")
    return config.layer if config.layer != "auto" else "moe" if has["moe"] else "dense"


def _check(config: MapConfig, settings: RunConfig, compared: RunConfig | None) -> None:
    """Raise UserError with all that cannot be observed, before anything runs."""
    problems, model = [], settings.model
    for key, run in (("recipe", settings), ("against", compared)):
        if run is not None and run.recipe.linears == "te":
            problems.append(f"{key}={run.recipe.name} has no map: {INSIDE}; give another recipe")
    if config.tokens > model.context:
        problems.append(f"tokens={config.tokens} exceeds model.context={model.context}: lower it or raise the key")
    raise_problems(problems)


def _observe(config: MapConfig, settings: RunConfig, layer: str) -> tuple[Ledger, Observed]:
    model, recipe, device = settings.model, settings.recipe, select_device(config.device)
    if device.type == "cpu":
        keep_freed_memory()
        limit_memory()
    ledger = observe_block(model, recipe, layer == "dense", config.tokens, config.seed, device)
    records = ledger.to_dict()["records"]
    return ledger, Observed.from_records(records, config.tokens, layer, recipe.name, model.name)


def _entry(observed: Observed, ledger: Ledger) -> dict[str, Any]:
    return {"recipe": observed.recipe, "kept_bytes_per_token": observed.kept_bytes(), "ledger": ledger.to_dict()}
