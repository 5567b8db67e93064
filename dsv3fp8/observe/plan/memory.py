"""Memory of one GPU: what lies there all the time, and what a step adds, followed through backward to its peak."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dsv3fp8.model.config import ModelConfig
from dsv3fp8.observe.plan.stash import Load, kept_bytes
from dsv3fp8.observe.plan.weights import FP32, Unit, Weight, compute_bytes
from dsv3fp8.ops.cross_entropy import GPU_CHUNK_VALUES
from dsv3fp8.parallel.config import ParallelConfig
from dsv3fp8.precision.recipe import Recipe
from dsv3fp8.precision.tiles import ceil_div

PARTS = ("masters", "moments", "codes", "gradients", "stash", "transient")


@dataclass(frozen=True)
class Memory:
    """Bytes of each of PARTS. whole: the most that each takes on its own. peak: at the fullest moment, named `moment`."""

    whole: dict[str, int]
    peak: dict[str, int]
    moment: str

    @property
    def total(self) -> int:
        """Allocated at the fullest moment."""
        return sum(self.peak.values())


@dataclass(frozen=True)
class Planned:
    """What memory is counted of. moment_bytes: of one of AdamW's two moments, per parameter."""

    config: ModelConfig
    recipe: Recipe
    parallel: ParallelConfig
    units: list[Unit]
    load: Load
    accumulate: int
    moment_bytes: int


def memory(plan: Planned) -> Memory:
    """Follows backward unit by unit: the stash shrinks, and gradients grow unless earlier micro-batches left them full."""
    elements = [sum(weight.kept(plan.parallel) for weight in unit.weights) for unit in plan.units]
    gradients = FP32 * sum(elements)
    stashes = [kept_bytes(plan.config, plan.recipe, unit.name, plan.load) for unit in plan.units]
    resting = {"masters": FP32 * sum(elements), "moments": 2 * plan.moment_bytes * sum(elements)}
    resting["codes"] = sum(resting_codes(weight, plan) for unit in plan.units for weight in unit.weights)
    moments: list[tuple[str, dict[str, int]]] = []
    for at in reversed(range(len(plan.units))):
        made = gradients if plan.accumulate > 1 else FP32 * sum(elements[at:])
        adds = {"gradients": made, "stash": sum(stashes[: at + 1]), "transient": transient(plan, at)}
        name = plan.units[at].name
        moments.append((f"backward of {name}" + (f" {at}" if name in ("dense", "moe") else ""), resting | adds))
    moments.append(("update", resting | {"gradients": gradients, "stash": 0, "transient": 0}))
    moment, peak = max(moments, key=lambda entry: sum(entry[1].values()))
    whole = {part: max(parts[part] for _, parts in moments) for part in PARTS}
    return Memory(whole, peak, moment)


def resting_codes(weight: Weight, plan: Planned) -> int:
    """What forward and backward read of it, as it stays from step to step: for a cut weight the GPU's part of its codes.

    Codes are made once a step. Both orientations stay where nothing is gathered. A cut weight that is read in the compute
    type is cast as it is sent.
    """
    if weight.wide or weight.name == "embedding":
        return 0
    coded, shard = weight.coded(plan.recipe), weight.shard(plan.parallel)
    if shard > 1 and not coded:
        return 0
    if not coded and compute_bytes(plan.recipe) == FP32:
        return 0  # the master itself
    both = 2 if coded and shard == 1 else 1
    return both * weight.of_rank(plan.parallel) * ceil_div(weight.read_bytes(plan.recipe), shard)


def transient(plan: Planned, at: int) -> int:
    """Beyond what stays and what is kept: tensors of this unit's backward, gathered weights, whole gradients on their way."""
    unit = plan.units[at]
    gathered = sum(_gathered(weight, plan, in_use=True) for weight in unit.weights)
    gathered += sum(_gathered(weight, plan, in_use=False) for ahead in plan.units[:at][-1:] for weight in ahead.weights)
    return working(plan, unit.name) + gathered + _whole_gradients(plan, plan.units[at : at + 2])


def _gathered(weight: Weight, plan: Planned, in_use: bool) -> int:
    """A whole weight on a GPU that keeps a part of it; codes in use are there for dgrad too."""
    if weight.shard(plan.parallel) == 1:
        return 0
    both = 2 if in_use and weight.coded(plan.recipe) else 1
    return both * weight.of_rank(plan.parallel) * weight.read_bytes(plan.recipe)


def _whole_gradients(plan: Planned, units: list[Unit]) -> int:
    """FP32, uncut: those of the first unit, and of the one behind it, which are still being reduced.

    Gradients of what is not cut are where they stay; with accumulation a finished one lies beside the sum it is added to.
    """

    def of(weight: Weight) -> int:
        return FP32 * weight.of_rank(plan.parallel) * weight.rows * weight.columns

    cut = sum(of(w) for unit in units for w in unit.weights if w.shard(plan.parallel) > 1)
    if plan.accumulate == 1:
        return cut
    return cut + max((of(w) for w in units[0].weights if w.shard(plan.parallel) == 1), default=0)


def working(plan: Planned, unit: str) -> int:
    """The most that tensors of a unit's backward take at a time; those of its attention, experts and FFN take turns."""
    config, recipe, load = plan.config, plan.recipe, plan.load
    carried = compute_bytes(recipe)
    vocabulary = config.vocab_size or 0
    if unit == "embedding":
        return load.tokens * config.dim * carried
    if unit == "head":
        logits = min(load.tokens * vocabulary, GPU_CHUNK_VALUES)
        return logits * (FP32 + carried) + load.tokens * config.dim * carried
    stream = load.tokens * config.dim * (4 * carried + 2 * FP32)  # dY and its rail, dX, and what is summed into it in FP32
    routed = config.has_experts and unit != "dense"
    wide = config.shared_experts * config.expert_ffn if routed else config.ffn
    parts = [_attention(config, recipe, load.tokens), _feed_forward(config, recipe, load.tokens, wide)]
    if routed:
        parts.append(_experts(config, recipe, load.padded) + _returned(plan))
    return stream + max(parts)


def _sizes(recipe: Recipe, op: str) -> tuple[int, Callable[[int], int], int]:
    """(bytes of a carried value, bytes of a row of operands, orientations that exist side by side) around a linear."""
    carried, coded = compute_bytes(recipe), recipe.linear(op).gradient.quantized
    return carried, (lambda width: width + 4 * ceil_div(width, 128)) if coded else (lambda width: carried * width), 1 + coded


def _attention(config: ModelConfig, recipe: Recipe, tokens: int) -> int:
    carried, operand, both = _sizes(recipe, "out")
    qk, v = config.heads * config.head_qk, config.heads * config.head_v
    row = carried * (2 * qk + v) + 2 * carried * v  # dq, dk, dv; the output decoded, and its gradient
    if both > 1:
        row += both * (operand(qk) + operand(config.heads * (config.head_nope + config.head_v)))
    if recipe.recompute == "norms_and_up":
        row += carried * (2 * qk + v)
    return tokens * row


def _feed_forward(config: ModelConfig, recipe: Recipe, tokens: int, hidden: int) -> int:
    carried, operand, both = _sizes(recipe, "shared_down")
    # dY and its re-tiled copy, the activation and its own, dact; dh cast both ways, or as it is; dX.
    row = sum(both * operand(width) for width in (config.dim, hidden, 2 * hidden)) + carried * (hidden + config.dim)
    return tokens * row


def _experts(config: ModelConfig, recipe: Recipe, rows: int) -> int:
    carried, operand, both = _sizes(recipe, "expert_down")
    dim, hidden = config.dim, config.expert_ffn
    row = sum(both * operand(width) for width in (dim, hidden, 2 * hidden)) + carried * (hidden + dim)
    return rows * (row + (operand(dim) if both > 1 else 0))  # the received codes re-tiled


def _returned(plan: Planned) -> int:
    """Rows that other GPUs send back, before they are summed by token."""
    copies = plan.load.tokens * plan.config.top_k if plan.parallel.expert > 1 else 0
    return copies * compute_bytes(plan.recipe) * plan.config.dim
