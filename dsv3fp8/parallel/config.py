"""The keys `parallel.*`: how many GPUs share the work, and along what."""

from __future__ import annotations

from dataclasses import dataclass

from dsv3fp8.errors import UserError


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
            fits = nearest_divisor(self.ranks, self.expert)
            return [f"parallel.expert={self.expert} does not divide {self.ranks} GPUs: set it to {fits}"]
        if self.dp_shard % self.expert and self.expert % self.dp_shard:
            fits = nearest_divisor(self.dp_shard, self.expert)
            return [
                f"parallel.expert={self.expert} neither divides parallel.dp_shard={self.dp_shard} nor is a multiple of it: "
                f"set it to {fits}"
            ]
        return []


def nearest_divisor(whole: int, wanted: int) -> int:
    """The largest divisor of `whole` that is not above `wanted`."""
    return next(n for n in range(min(whole, wanted), 0, -1) if whole % n == 0)
