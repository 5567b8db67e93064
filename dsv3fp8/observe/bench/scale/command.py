"""`dsv3fp8 bench scale`: layout after layout, each in processes of its own, into a JSON file and a page that grow with them."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path
from typing import Any

from dsv3fp8.config import load_config
from dsv3fp8.errors import UserError
from dsv3fp8.observe.bench.hopper import lacks_hopper
from dsv3fp8.observe.bench.operands import recipe_named
from dsv3fp8.observe.bench.scale.config import MODES, ScaleConfig, parse, words_of
from dsv3fp8.observe.bench.scale.exchange import measure_exchange
from dsv3fp8.observe.bench.scale.forecast import forecast
from dsv3fp8.observe.bench.scale.gathered import exchange_figures, layout_figures
from dsv3fp8.observe.bench.scale.launch import on_ranks
from dsv3fp8.observe.bench.scale.layouts import EXCHANGE, Row, rows
from dsv3fp8.observe.bench.scale.page import page
from dsv3fp8.observe.bench.scale.rank import measure_layout
from dsv3fp8.observe.output import writable_directory
from dsv3fp8.schema import leaves
from dsv3fp8.training.checks import select_device
from dsv3fp8.training.run_directory import environment

KIND = "scale"


def main(arguments: list[str]) -> int:
    """Measure all rows there is time for; the exit status: 1 where none could be measured, or when interrupted."""
    config, given = parse(arguments)
    for name in config.recipe_names:
        recipe_named(name)
    todo = rows(config.count, config.kinds, config.recipe_names)
    if not todo:
        raise UserError(f"gpus={config.count}: there is no exchange on one; start it on two or more")
    words = [words_of(config, given, row) for row in todo]  # what no row can be told is an error now
    settings = load_config(words[0])
    device = select_device(config.device)
    measured = device.type == "cuda" or config.sizes == "full"
    if measured and lacks_hopper(device, f"bench {KIND} needs Hopper GPUs"):
        return 1
    out = writable_directory(config.out, f"{KIND}.json", f"{KIND}.md")
    started = time.monotonic()
    about = environment(device)
    about["commit"] = about["commit"] or config.commit or None
    training, model = settings.training, settings.model
    data: dict[str, Any] = {
        "about": {
            **about, "kind": KIND, "command": shlex.join(["dsv3fp8", "bench", KIND, *arguments]), "rounds": config.rounds,
            "sizes": config.sizes, "recipes": config.recipe_names, "seconds": 0.0,
        },
        "settings": {
            "model": model.name, "vocabulary": model.vocab_size, "batch": training.batch, "context": training.context,
            "accumulate": training.accumulate, "optimizer_moments": settings.optimizer.moments,
            "moe_layers": model.moe_layers, "words": given,
        },
        "notes": [], "rows": [], "exchange": [],
    }  # fmt: skip
    if device.type != "cuda":
        data["notes"].append("on a CPU, at tiny sizes: the path was tried, the figures mean nothing")
    interrupted = False
    try:
        _measure(config, list(zip(todo, words, strict=True)), data, out, started)
    except KeyboardInterrupt:
        interrupted = True
        data["notes"].append("interrupted: this is what was measured until then")
    _write(data, out, started)
    print(f"\n{page(data)}\nsee {out / f'{KIND}.md'} and {out / f'{KIND}.json'}; {data['about']['seconds']:.0f} s")
    return int(interrupted or (not any(row["modes"] for row in data["rows"]) and not data["exchange"]))


def _measure(config: ScaleConfig, todo: list[tuple[Row, list[str]]], data: dict[str, Any], out: Path, started: float) -> None:
    for row, words in todo:
        left = config.budget - (time.monotonic() - started)
        name = f"{row.layout}{f', {row.recipe}' if row.recipe else ', the exchange'}"
        if left <= 0:
            data["notes"].append(f"left out, as budget={config.budget:g} s were over: {name}")
            continue
        began = time.monotonic()
        measure = _measure_exchange if row.layout.kind == EXCHANGE else _measure_layout
        said = measure(row, words, config, min(config.limit, left), data)
        print(f"{name:<44} {said}, {time.monotonic() - began:.1f} s", flush=True)
        _write(data, out, started)


def _measure_layout(row: Row, words: list[str], config: ScaleConfig, limit: float, data: dict[str, Any]) -> str:
    layout, settings, began = row.layout, data["settings"], time.monotonic()
    outcome = on_ranks(layout.gpus, limit, measure_layout, words, config.mode_names, config.rounds)
    tokens = settings["batch"] * settings["context"] * settings["accumulate"] * layout.gpus
    figures = layout_figures(outcome, MODES, tokens)
    entry = {
        "name": str(layout), "recipe": row.recipe, "gpus": layout.gpus, "kind": layout.kind, "parallel": layout.words,
        "tokens": tokens, "failed": outcome.failed, **figures, "plan": forecast(words, figures["imbalance"] or 1.0),
        "seconds": time.monotonic() - began,
    }  # fmt: skip
    data["rows"].append(entry)
    measured = {mode: found["tokens_per_second"] for mode, found in figures["modes"].items() if not found["failed"]}
    said = [f"{rate:,.0f} tokens/s {mode}" for mode, rate in measured.items()]
    return ", ".join([*said, *([outcome.failed] if outcome.failed else [])])


def _measure_exchange(row: Row, words: list[str], config: ScaleConfig, limit: float, data: dict[str, Any]) -> str:
    gpus, device = row.layout.gpus, load_config(words).training.device
    fits = [size for size in config.exchanges if size.experts % gpus == 0]
    outcome = on_ranks(gpus, limit, measure_exchange, fits, device, gpus, config.rounds)
    for size in fits:
        if (told := outcome.all_told(size.name)) is not None:
            data["exchange"].append({"gpus": gpus, **exchange_figures(told)})
    if outcome.failed:
        data["notes"].append(f"{row.layout}, the exchange: {outcome.failed}")
    return outcome.failed or "measured"


def _write(data: dict[str, Any], out: Path, started: float) -> None:
    """What there is so far."""
    data["about"]["seconds"] = time.monotonic() - started
    texts = {f"{KIND}.json": json.dumps(data, indent=1, ensure_ascii=False) + "\n", f"{KIND}.md": page(data)}
    for name, text in texts.items():
        whole = out / f".{name}.writing"
        whole.write_text(text, encoding="utf-8")
        whole.replace(out / name)  # never half a file


def help_keys() -> str:
    """The keys with their comments."""
    return "\n".join(f"  {key:<10}{note}" for key, _, note in leaves(ScaleConfig))
