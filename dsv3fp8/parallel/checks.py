"""Layouts that cannot work, for those who train and those who plan alike."""

from __future__ import annotations

from dsv3fp8.model.config import ModelConfig
from dsv3fp8.parallel.config import ParallelConfig, nearest_divisor
from dsv3fp8.parallel.experts import reason_against
from dsv3fp8.precision.recipe import Recipe


def layout_problems(parallel: ParallelConfig, ranks: int, model: ModelConfig, recipe: Recipe) -> list[str]:
    """Why so many ranks, this model's experts or this recipe cannot be laid out so: a line each, with key, value and remedy."""
    problems = []
    if parallel.ranks != ranks:
        replicas, rest = divmod(ranks, parallel.dp_shard)
        remedy = f"parallel.dp_replicate=1 parallel.dp_shard={ranks}" if rest else f"parallel.dp_replicate={replicas}"
        problems.append(
            f"parallel.dp_replicate={parallel.dp_replicate} times parallel.dp_shard={parallel.dp_shard} make "
            f"{parallel.ranks} ranks, not {ranks}: set {remedy}, or start {parallel.ranks} with torchrun (plan: "
            f"gpus={parallel.ranks})"
        )
    if parallel.dp_shard > 1 and recipe.linears == "te":
        problems.append(f"parallel.dp_shard={parallel.dp_shard}: Transformer Engine's linears read whole weights; set it to 1")
    return problems + _expert_problems(parallel.expert, model, recipe)


def _expert_problems(expert: int, model: ModelConfig, recipe: Recipe) -> list[str]:
    if expert == 1:
        return []
    if not model.has_experts:
        return [f"parallel.expert={expert}: model={model.name} has no routed experts; set it to 1"]
    problems = []
    if model.experts % expert:
        fits = nearest_divisor(model.experts, expert)
        problems.append(f"parallel.expert={expert} does not divide model.experts={model.experts}: set it to {fits}")
    if against := reason_against(recipe):
        problems.append(f"parallel.expert={expert}: {against}; set it to 1")
    return problems
