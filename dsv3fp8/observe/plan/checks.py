"""Layouts that cannot work: each refused in one line with key, value and remedy."""

from __future__ import annotations

import math

from dsv3fp8.config import RunConfig
from dsv3fp8.errors import UserError
from dsv3fp8.observe.plan.config import PlanConfig
from dsv3fp8.observe.plan.memory import Memory, Planned
from dsv3fp8.observe.plan.stash import largest_imbalance
from dsv3fp8.parallel.checks import layout_problems
from dsv3fp8.training.checks import context_problems
from dsv3fp8.training.config import raise_problems


def check_layout(config: PlanConfig, settings: RunConfig) -> None:
    """What no GPU is needed to see."""
    parallel = config.parallel
    ranks = parallel.ranks if config.gpus is None else config.gpus
    problems = layout_problems(parallel, ranks, settings.model, settings.recipe) + context_problems(settings)
    if settings.recipe.linears == "te":
        problems.append(f"recipe={settings.recipe.name}: what Transformer Engine keeps is not known; plan recipe=dsv3")
    if ranks > config.node and ranks % config.node:
        problems.append(f"gpus={ranks} do not fill nodes of node={config.node} GPUs: take {_whole_nodes(ranks, config.node)}")
    most = largest_imbalance(settings.model, parallel)
    if config.imbalance > most and not problems:
        problems.append(
            f"imbalance={config.imbalance:g} cannot be: where every token chooses all it can of one GPU's experts, that GPU "
            f"receives {most:g} times the mean under parallel.expert={parallel.expert}; lower it to {most:g}"
        )
    raise_problems(problems)


def check_memory(config: PlanConfig, settings: RunConfig, plan: Planned, used: Memory) -> None:
    """Raise UserError where the peak is above the GPU's memory, with what would help most first."""
    if used.total <= config.memory * 1e9:
        return
    cut = f"raise parallel.dp_shard={plan.parallel.dp_shard}"
    advice = {part: [cut] for part in ("masters", "moments", "codes", "gradients")}
    advice["moments"] += ["set optimizer.moments=bf16"] if plan.moment_bytes > 2 else []
    advice["stash"] = advice["transient"] = _fewer_tokens(settings)
    largest = sorted(used.peak, key=lambda part: -used.peak[part])
    parts = ", ".join(f"{part} {used.peak[part] / 1e9:,.1f}" for part in largest[:3])
    remedies = list(dict.fromkeys(remedy for part in largest for remedy in advice[part]))
    raise UserError(
        f"memory={config.memory:g} GB of a GPU is less than the {used.total / 1e9:,.1f} GB of this plan's peak ({parts}): "
        f"{', or '.join(remedies[:4])}"
    )


def _fewer_tokens(settings: RunConfig) -> list[str]:
    """What shrinks all that grows with the tokens."""
    training = settings.training
    again = [] if settings.recipe.recompute == "norms_and_up" else ["set recipe.recompute=norms_and_up"]
    fewer = f"lower training.batch={training.batch}" if training.batch > 1 else ""
    return [*again, fewer or f"lower training.context={training.context}"]


def _whole_nodes(ranks: int, node: int) -> str:
    return " or ".join(str(count) for count in (ranks // node * node, math.ceil(ranks / node) * node) if count)
