"""Memory of one GPU: what lies there all the time, and what a step adds, followed through backward to its peak."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dsv3fp8.model.config import ModelConfig
from dsv3fp8.observe.plan.stages import Stage, stages
from dsv3fp8.observe.plan.stash import Load, kept_bytes
from dsv3fp8.observe.plan.weights import FP32, SCALE, Unit, Weight, compute_bytes
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
    """Follows backward stage by stage: the stash shrinks, and gradients grow unless earlier micro-batches left them full."""
    elements = [sum(weight.kept(plan.parallel) for weight in unit.weights) for unit in plan.units]
    gradients = FP32 * sum(elements)
    stashes = [kept_bytes(plan.config, plan.recipe, unit.name, plan.load) for unit in plan.units]
    resting = {"masters": FP32 * sum(elements), "moments": 2 * plan.moment_bytes * sum(elements)}
    resting["codes"] = sum(resting_codes(weight, plan) for unit in plan.units for weight in unit.weights)
    moments: list[tuple[str, dict[str, int]]] = []
    for at in reversed(range(len(plan.units))):
        unit = plan.units[at]
        for stage in stages(plan.config, plan.recipe, unit.name, plan.load, dealt=plan.parallel.expert > 1):
            of_unit = sum(weight.kept(plan.parallel) for weight in unit.weights if stage.made(weight.name))
            adds = {
                "gradients": gradients if plan.accumulate > 1 else FP32 * (sum(elements[at + 1 :]) + of_unit),
                "stash": sum(stashes[: at + 1]) - stage.freed,
                "transient": stage.work + travelling(plan, at) + added_later(plan, unit, stage),
            }
            where = f"backward of {unit.name}" + (f" {at}" if unit.name in ("dense", "moe") else "")
            moments.append((f"{where}, {stage.name}" if stage.name else where, resting | adds))
    moments.append(("update", resting | {"gradients": gradients, "stash": 0, "transient": 0}))
    moment, peak = max(moments, key=lambda entry: sum(entry[1].values()))
    whole = {part: max(parts[part] for _, parts in moments) for part in PARTS}
    return Memory(whole, peak, moment)


def resting_codes(weight: Weight, plan: Planned) -> int:
    """What forward and backward read of it, as it stays from step to step: for a cut weight the GPU's part of its codes.

    Codes are made once a step. Both orientations stay where nothing is gathered; of a cut weight all scales lie on every GPU.
    What is read in the compute type is cast as it is sent.
    """
    if weight.wide or weight.name == "embedding":
        return 0
    coded, shard = weight.coded(plan.recipe), weight.shard(plan.parallel)
    if shard > 1:
        if not coded:
            return 0
        scales = SCALE * sum(weight.scales(plan.recipe))
        return weight.of_rank(plan.parallel) * (ceil_div(weight.travel_bytes(plan.recipe), shard) + scales)
    if not coded and compute_bytes(plan.recipe) == FP32:
        return 0  # the master itself
    return (2 if coded else 1) * weight.of_rank(plan.parallel) * weight.read_bytes(plan.recipe)


def travelling(plan: Planned, at: int) -> int:
    """Gathered weights of this unit and the next one, and FP32 gradients, whole, of this one and the one behind it.

    Those behind are still being reduced. What belongs to no block is gathered all the time, and its gradients are reduced at
    the end. Of the weights in use dgrad turns one at a time. Gradients of what is not cut are where they stay.
    """
    units = plan.units
    stay = [weight for unit in units for weight in unit.weights if weight.stays]
    moving = [weight for unit in units[max(at - 1, 0) : at + 1] for weight in unit.weights if not weight.stays]
    reduced = [weight for unit in units[at : at + 2] for weight in unit.weights if not weight.stays]
    reduced += [weight for unit in units[at:] for weight in unit.weights if weight.stays]
    gathered = sum(weight.of_rank(plan.parallel) * weight.travel_bytes(plan.recipe) for weight in _cut(stay + moving, plan))
    turned = [weight for weight in _cut(units[at].weights, plan) if weight.coded(plan.recipe)]
    one_way = [w.of_rank(plan.parallel) * w.rows * w.columns for w in turned if len(w.scales(plan.recipe)) == 1]
    return gathered + max(one_way, default=0) + sum(_whole_gradient(weight, plan) for weight in _cut(reduced, plan))


def _cut(weights: Iterable[Weight], plan: Planned) -> list[Weight]:
    return [weight for weight in weights if weight.shard(plan.parallel) > 1]


def added_later(plan: Planned, unit: Unit, stage: Stage) -> int:
    """With accumulation, finished gradients beside the sums that they are added to: a linear's, or those of the experts.

    The experts' wgrad in FP8 adds to the sum itself.
    """
    if plan.accumulate == 1:
        return 0
    uncut = [weight for weight in unit.weights if weight.shard(plan.parallel) == 1]
    if stage.name == "experts":
        return sum(_whole_gradient(w, plan) for w in uncut if w.experts and not w.coded(plan.recipe))
    return max((_whole_gradient(w, plan) for w in uncut if not w.experts and stage.made(w.name)), default=0)


def _whole_gradient(weight: Weight, plan: Planned) -> int:
    return FP32 * weight.of_rank(plan.parallel) * weight.rows * weight.columns
