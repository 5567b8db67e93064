"""The keys `parallel.*`: how many GPUs share the work, and along what."""

from __future__ import annotations

from dataclasses import dataclass

from dsv3fp8.errors import UserError
from dsv3fp8.model.config import ModelConfig


@dataclass(frozen=True)
class ParallelConfig:
    """Ranks lie replica by replica, the ranks of one shard group side by side; experts have a mesh of their own over them.

    Every rank has its own tokens: `expert` deals out experts, not more ranks. Where a shard group holds several expert
    groups, each expert is cut over as many ranks as there are groups.
    """

    # Replicas that each hold all weights.
    dp_replicate: int = 1
    # GPUs that weights, gradients and optimizer state are cut over.
    dp_shard: int = 1
    # GPUs that the routed experts are dealt out to.
    expert: int = 1

    def validate(self) -> None:
        """Raise UserError for sizes that make no sense whatever the model is."""
        problems = [
            f"parallel.{name}={getattr(self, name)}: give a whole number of GPUs, 1 or more"
            for name in ("dp_replicate", "dp_shard", "expert")
            if getattr(self, name) < 1
        ] or self._expert_groups_that_do_not_fit()
        if problems:
            raise UserError("; ".join(problems))

    def check(self, ranks: int, model: ModelConfig) -> None:
        """Raise UserError where so many ranks, or this model's experts, cannot be laid out so."""
        problems = []
        if self.ranks != ranks:
            whole, rest = divmod(ranks, self.dp_replicate)
            remedy = f"parallel.dp_shard={whole}" if not rest else f"parallel.dp_replicate=1 parallel.dp_shard={ranks}"
            problems.append(
                f"parallel.dp_replicate={self.dp_replicate} times parallel.dp_shard={self.dp_shard} make {self.ranks} GPUs, "
                f"not {ranks}: set {remedy}, or start {self.ranks}"
            )
        if self.expert > 1 and not model.has_experts:
            problems.append(f"parallel.expert={self.expert}: model={model.name} has no routed experts; set it to 1")
        elif model.experts % self.expert and model.has_experts:
            problems.append(
                f"parallel.expert={self.expert} does not divide model.experts={model.experts}: "
                f"set it to {_nearest_divisor(model.experts, self.expert)}"
            )
        if problems:
            raise UserError("; ".join(problems))

    @property
    def ranks(self) -> int:
        """GPUs in all, each with tokens of its own."""
        return self.dp_replicate * self.dp_shard

    @property
    def expert_shard(self) -> int:
        """GPUs that each routed expert is cut over."""
        return max(1, self.dp_shard // self.expert)

    @property
    def expert_replicate(self) -> int:
        """Replicas of each routed expert."""
        return self.ranks // (self.expert * self.expert_shard)

    def _expert_groups_that_do_not_fit(self) -> list[str]:
        if self.expert > self.ranks:
            return [
                f"parallel.expert={self.expert} exceeds the {self.ranks} GPUs that parallel.dp_replicate and "
                f"parallel.dp_shard make: lower it to {self.ranks} or raise parallel.dp_shard"
            ]
        if self.ranks % self.expert:
            fits = _nearest_divisor(self.ranks, self.expert)
            return [f"parallel.expert={self.expert} does not divide {self.ranks} GPUs: set it to {fits}"]
        if self.dp_shard % self.expert and self.expert % self.dp_shard:
            fits = _nearest_divisor(self.dp_shard, self.expert)
            return [
                f"parallel.expert={self.expert} neither divides parallel.dp_shard={self.dp_shard} nor is a multiple of it: "
                f"set it to {fits}"
            ]
        return []


def _nearest_divisor(whole: int, wanted: int) -> int:
    """The largest divisor of `whole` that is not above `wanted`."""
    return next(n for n in range(min(whole, wanted), 0, -1) if whole % n == 0)
