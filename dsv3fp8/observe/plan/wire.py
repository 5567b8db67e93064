"""Bytes that a GPU sends in one optimizer step: weights, gradients, and the tokens of routed experts."""

from __future__ import annotations

from dataclasses import dataclass

from dsv3fp8.observe.plan.memory import Planned
from dsv3fp8.observe.plan.weights import FP32, SCALE, Weight, compute_bytes
from dsv3fp8.parallel.config import ParallelConfig
from dsv3fp8.precision.recipe import OperandSpec, Recipe
from dsv3fp8.precision.tiles import ceil_div

PASSES = 2
"""Forward and backward gather the weights of blocks anew: between them nobody keeps what was gathered."""


@dataclass(frozen=True)
class Group:
    """GPUs that exchange something. local: those of them in one node; the others are reached over the network."""

    name: str
    size: int
    local: int


@dataclass(frozen=True)
class Transfer:
    """payload: bytes that a GPU hands over in a step, its own share among them. sent: what of it leaves the GPU.

    network: what of it goes through the GPU's network adapter; the rest, and what is passed on inside a node, over NVLink.
    """

    what: str
    group: Group
    payload: int
    sent: float
    network: float

    def seconds(self, nvlink: float, network: float) -> float:
        """The slower of both ways, at rates in bytes per second and direction."""
        return max(self.sent / nvlink if self.group.local > 1 else 0.0, self.network / network)


def groups(parallel: ParallelConfig, node: int) -> dict[str, Group]:
    """The meshes by name; a node holds `node` consecutive ranks, and the innermost dimension of a mesh lies in it first."""
    shard, expert = parallel.dp_shard, parallel.expert
    return {
        "shard": _group("shard", shard, 1, node),
        "replicate": _group("replicate", parallel.dp_replicate, shard, node),
        "expert": _group("expert", expert, 1, node),
        "expert shard": _group("expert shard", parallel.expert_shard, expert, node),
        "expert replicate": _group("expert replicate", parallel.expert_replicate, expert * parallel.expert_shard, node),
    }


def _group(name: str, size: int, stride: int, node: int) -> Group:
    return Group(name, size, max(1, min(size, node // stride)))


def transfers(plan: Planned, node: int) -> list[Transfer]:
    """All of one step that some other GPU takes part in."""
    meshes = groups(plan.parallel, node)
    weights = [weight for unit in plan.units for weight in unit.weights]
    found = []
    for some, prefix in ((False, ""), (True, "expert ")):
        chosen = [weight for weight in weights if bool(weight.experts) is some]
        label = "expert weights" if some else "weights"
        shard, replicate = meshes[f"{prefix}shard"], meshes[f"{prefix}replicate"]
        passes = plan.accumulate * sum((1 if weight.stays else PASSES) * _travels(weight, plan) for weight in chosen)
        scales = SCALE * sum(w.of_rank(plan.parallel) * sum(w.scales(plan.recipe)) for w in chosen if w.coded(plan.recipe))
        whole = FP32 * sum(weight.of_rank(plan.parallel) * weight.rows * weight.columns for weight in chosen)
        found += [
            _ring(f"gather {label}", shard, passes),
            _ring(f"compare tiles of {label}", shard, 2 * scales),
            _ring(f"reduce-scatter gradients of {label}", shard, plan.accumulate * whole),
            _ring(f"all-reduce gradients of {label}", replicate, 2 * whole // shard.size),
        ]
    found += exchanges(plan, meshes["expert"])
    return [transfer for transfer in found if transfer.payload and transfer.group.size > 1]


def exchanges(plan: Planned, group: Group) -> list[Transfer]:
    """Dispatch and combine, forward and backward, of all MoE layers and micro-batches."""
    times = plan.config.moe_layers * plan.accumulate
    dispatch, combine, mirrored = exchange_bytes(plan)
    return [
        _all_to_all("dispatch", group, times * dispatch),
        _all_to_all("combine", group, times * combine),
        _all_to_all("combine's backward", group, times * mirrored),
        _all_to_all("dispatch's backward", group, times * combine),
    ]


def exchange_bytes(plan: Planned) -> tuple[int, int, int]:
    """Payload of one layer and micro-batch: dispatch, combine (and dispatch's backward), combine's backward."""
    config, recipe = plan.config, plan.recipe
    copies = plan.load.tokens * config.top_k
    sides = recipe.linear("expert_gate_up").input, recipe.linear("expert_down").gradient
    dispatch, mirrored = (copies * row_bytes(spec, config.dim, recipe) for spec in sides)
    return dispatch, copies * compute_bytes(recipe) * config.dim, mirrored


def row_bytes(spec: OperandSpec, width: int, recipe: Recipe) -> int:
    """A token's row on the wire: codes and the scales that are its own, or the compute type."""
    if not spec.quantized:
        return compute_bytes(recipe) * width
    return width + SCALE * {"1x128": ceil_div(width, 128), "row": 1, "tensor": 0, "128x128": ceil_div(width, 128)}[spec.tile]


def _travels(weight: Weight, plan: Planned) -> int:
    return weight.of_rank(plan.parallel) * weight.travel_bytes(plan.recipe)


def _ring(what: str, group: Group, payload: int) -> Transfer:
    """Each GPU passes on all parts but one; the rings of a node's GPUs share the payload among their adapters."""
    sent = payload * (group.size - 1) / group.size
    return Transfer(what, group, payload, sent, sent / group.local if group.size > group.local else 0.0)


def _all_to_all(what: str, group: Group, payload: int) -> Transfer:
    """Equal parts to every GPU of the group, itself among them; each copy is sent on its own."""
    outside = payload * (group.size - group.local) / group.size
    return Transfer(what, group, payload, payload * (group.size - 1) / group.size, outside)
