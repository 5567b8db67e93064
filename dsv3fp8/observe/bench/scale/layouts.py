"""The layouts that are measured, the most telling ones first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

KINDS = ("data", "expert", "sharded", "exchange")
"""What `only` picks; one GPU, which all are compared with, is measured in any case."""
EXCHANGE = "exchange"


@dataclass(frozen=True)
class Layout:
    """The keys of `parallel`, and the kind that the layout is of."""

    kind: str
    dp_replicate: int = 1
    dp_shard: int = 1
    expert: int = 1

    @property
    def gpus(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def words(self) -> list[str]:
        """As a command line gives them."""
        return [f"parallel.{name}={getattr(self, name)}" for name in ("dp_replicate", "dp_shard", "expert")]

    def __str__(self) -> str:
        if self.gpus == 1:
            return "1 GPU"
        parts = [f"sharded over {self.dp_shard}"] if self.dp_shard > 1 else []
        parts += [f"{self.expert} expert ranks"] if self.expert > 1 else []
        return f"{self.gpus} GPUs, {', '.join(parts) or 'data parallel'}"


@dataclass(frozen=True)
class Row:
    """What is measured at a time. recipe: "" for the exchange, which moves rows in both forms."""

    layout: Layout
    recipe: str = ""


def rows(gpus: int, kinds: Sequence[str], recipes: Sequence[str]) -> list[Row]:
    """One GPU and all of them under the first recipe, the exchange, the other recipes; then fewer GPUs, then mixed layouts."""
    counts = _counts(gpus)
    first, others = list(recipes[:1]), list(recipes[1:])
    found = [Row(ONE, recipe) for recipe in first if kinds != [EXCHANGE]]
    for count in counts:
        found += [Row(layout, recipe) for recipe in first for layout in _of(count, kinds)]
        found += [Row(Layout(EXCHANGE, dp_replicate=count, expert=count))] if EXCHANGE in kinds else []
        known = [ONE] if count == gpus and kinds != [EXCHANGE] else []
        found += [Row(layout, recipe) for recipe in others for layout in (*known, *_of(count, kinds))]
    return found + [Row(layout, recipe) for recipe in recipes for layout in _mixed(gpus, counts, kinds)]


ONE = Layout("one")


def _counts(gpus: int) -> list[int]:
    """All of them, then powers of two below, the largest first."""
    return [gpus, *(2**n for n in reversed(range(1, gpus.bit_length())) if 2**n < gpus)] if gpus > 1 else []


def _of(count: int, kinds: Sequence[str]) -> Iterator[Layout]:
    if "data" in kinds:
        yield Layout("data", dp_replicate=count)
    if "expert" in kinds:
        yield Layout("expert", dp_replicate=count, expert=count)
    if "sharded" in kinds:
        yield Layout("sharded", dp_shard=count)


def _mixed(gpus: int, counts: Sequence[int], kinds: Sequence[str]) -> Iterator[Layout]:
    """On all GPUs: both ways of cutting at once, and smaller groups of experts, with replicas."""
    if gpus > 1 and {"expert", "sharded"} <= {*kinds}:
        yield Layout("sharded", dp_shard=gpus, expert=gpus)
    if "expert" in kinds:
        yield from (Layout("expert", dp_replicate=gpus, expert=count) for count in counts[1:] if gpus % count == 0)
