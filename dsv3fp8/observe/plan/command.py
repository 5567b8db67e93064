"""`dsv3fp8 plan`: what a layout over GPUs takes, without one."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from dsv3fp8.config import GROUPS, RunConfig, load_config
from dsv3fp8.errors import UserError
from dsv3fp8.observe.output import writable_directory
from dsv3fp8.observe.plan.checks import check_layout, check_memory
from dsv3fp8.observe.plan.config import PlanConfig
from dsv3fp8.observe.plan.memory import Memory, Planned, memory
from dsv3fp8.observe.plan.rates import family, rates_of
from dsv3fp8.observe.plan.stash import load_of
from dsv3fp8.observe.plan.table import plan_text
from dsv3fp8.observe.plan.timing import Speeds, timing
from dsv3fp8.observe.plan.weights import units
from dsv3fp8.observe.plan.wire import exchange_bytes, transfers
from dsv3fp8.schema import build_words, leaves, split_words

HELP = ("-h", "--help", "help")
RUN_KEYS = ("model", "recipe", "optimizer", "training.batch", "training.context", "training.accumulate")
FILE = "plan.json"
VOCABULARY = 32_000
"""Taken where a run would take it from its tokenizer."""
MOMENT_BYTES = {"fp32": 4, "bf16": 2}


def main(arguments: list[str]) -> int:
    """Print the plan and write its file; a UserError for a layout that cannot work, after its table where memory is short."""
    if any(argument in HELP for argument in arguments):
        print(help_text())
        return 0
    config, settings = parse(arguments)
    out = None if config.out is None else writable_directory(config.out, FILE)
    check_layout(config, settings)
    notes = []
    if settings.model.vocab_size is None:
        settings.model = dataclasses.replace(settings.model, vocab_size=VOCABULARY)
        notes.append(f"model.vocab_size=null: {VOCABULARY:,} assumed")
    plan = planned(config, settings)
    used = memory(plan)
    data = describe(config, settings, plan, used, notes)
    print(plan_text(data))
    if out is not None:
        (out / FILE).write_text(json.dumps(data, indent=1), encoding="utf-8")
        print(f"\nsee {out / FILE}")
    check_memory(config, settings, plan, used)
    return 0


def parse(arguments: list[str]) -> tuple[PlanConfig, RunConfig]:
    """The command's own keys, and the settings that the other words choose. Raises UserError."""
    values, rest = split_words(PlanConfig, arguments, "model=v3_671b gpus=2048", (*GROUPS, "config"), RUN_KEYS)
    return build_words(PlanConfig, values), load_config(rest)


def planned(config: PlanConfig, settings: RunConfig) -> Planned:
    """What is counted, of the GPU that has most to do."""
    tokens = settings.training.batch * settings.training.context
    load = load_of(settings.model, config.parallel, tokens, config.imbalance)
    moment = MOMENT_BYTES[settings.optimizer.moments]
    return Planned(
        settings.model, settings.recipe, config.parallel, units(settings.model), load, settings.training.accumulate, moment
    )


def describe(config: PlanConfig, settings: RunConfig, plan: Planned, used: Memory, notes: list[str]) -> dict[str, Any]:
    """The plan as plain containers. Bytes, seconds, and rates in TFLOP/s and GB/s."""
    speeds, source = speeds_of(config, settings)
    sent = transfers(plan, config.node)
    time = timing(plan, sent, settings.training.context, speeds)
    training, ranks = settings.training, config.parallel.ranks
    tokens = training.batch * training.context * training.accumulate * ranks
    dispatch, combine, mirrored = exchange_bytes(plan)
    rates = {"nvlink": speeds.nvlink, "network": speeds.network, "copy": speeds.copy, "head": speeds.head.gemm}
    return {
        "model": settings.model.name,
        "recipe": settings.recipe.name,
        "gpus": ranks,
        "parallel": vars(config.parallel),
        "parameters": sum(unit.elements for unit in plan.units),
        "tokens": tokens,
        "tokens_of_gpu": plan.load.tokens,
        "accumulate": training.accumulate,
        "memory": vars(used) | {"total": used.total, "limit": round(config.memory * 1e9)},
        "exchange_of_layer": {
            "dispatch": dispatch,
            "combine": combine,
            "combine_backward": mirrored,
            "dispatch_backward": combine,
        },
        "wire": [
            {
                "what": t.what, "group": t.group.name, "size": t.group.size, "local": t.group.local, "payload": t.payload,
                "sent": t.sent, "network": t.network, "seconds": t.seconds(speeds.nvlink * 1e9, speeds.network * 1e9),
            }
            for t in sent
        ],
        "time": vars(time) | {"step": time.step, "tokens_per_second": tokens / time.step},
        "rates": rates | vars(speeds.blocks) | {"source": source},
        "notes": notes,
    }  # fmt: skip


def speeds_of(config: PlanConfig, settings: RunConfig) -> tuple[Speeds, str]:
    """(rates of this recipe, where its blocks' come from). Raises UserError where nothing was measured."""
    by_hand = {key: value for key in ("gemm", "attention", "passes") if (value := getattr(config.rates, key)) is not None}
    if settings.recipe.compute == "fp32" and len(by_hand) < 3:
        raise UserError(
            f"recipe={settings.recipe.name} computes in FP32, of which nothing was measured: give rates.gemm, rates.attention "
            "and rates.passes"
        )
    measured, source = rates_of(config.layer, settings.recipe)
    blocks = dataclasses.replace(measured[family(settings.recipe)], **by_hand)
    source = (
        f"{', '.join(f'rates.{key}' for key in by_hand)}{'' if len(by_hand) == 3 else ' and ' + source}" if by_hand else source
    )
    head = blocks if settings.recipe.compute == "fp32" else measured["bf16"]
    rates = config.rates
    return Speeds(blocks, head, rates.copy, rates.nvlink, rates.network), source


def help_text() -> str:
    """The keys with their comments."""
    keys = "\n".join(f"  {key:<26}{note}" for key, _, note in leaves(PlanConfig))
    return (
        "Usage: dsv3fp8 plan [model=v3_671b] [recipe=dsv3] [gpus=2048] [parallel.dp_shard=2048] [parallel.expert=64] …\n\n"
        "Memory of each GPU, bytes on the wire and time of a training step, without a GPU. Keys of a run are those of\n"
        "`train`: training.batch, training.context, training.accumulate, recipe.recompute, optimizer.moments and others.\n"
        "No effect here have training.steps, training.cuda_graph (whose memory is not counted), recipe.gemm, and all keys of\n"
        "data, schedule and logging.\n\n"
        f"{keys}"
    )
