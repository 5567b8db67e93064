"""Ledgers of one block at a size that runs in milliseconds."""

from functools import lru_cache
from typing import Any

import torch
from support import nano, recipe

from dsv3fp8.observe.map.geometry import Drawing, arrange
from dsv3fp8.observe.map.observed import Observed
from dsv3fp8.observe.map.run import observe_block

TOKENS = 24
Records = list[dict[str, Any]]


@lru_cache
def _records(name: str, overrides: tuple[str, ...], layer: str, sizes: tuple[tuple[str, Any], ...]) -> Records:
    ledger = observe_block(nano(**dict(sizes)), recipe(name, *overrides), layer == "dense", TOKENS, 0, torch.device("cpu"))
    records: Records = ledger.to_dict()["records"]
    return records


def records_of(name: str, *overrides: str, layer: str = "moe", **sizes: Any) -> Records:
    """The ledger's records of a real forward and backward."""
    return _records(name, overrides, layer, tuple(sizes.items()))


def observed(name: str, *overrides: str, layer: str = "moe", **sizes: Any) -> Observed:
    return Observed.from_records(records_of(name, *overrides, layer=layer, **sizes), TOKENS, layer, name, "nano")


def drawing(name: str, *overrides: str, against: str = "", layer: str = "moe", **sizes: Any) -> Drawing:
    other = observed(against, layer=layer, **sizes) if against else None
    return arrange(observed(name, *overrides, layer=layer, **sizes), other)
