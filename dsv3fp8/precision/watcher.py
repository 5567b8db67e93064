"""The place of whoever watches what runs, a ledger or a meter: at most one of a kind, for the whole process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class Watcher(Generic[T]):
    """current: who watches now, None for nobody. Backward's threads see the same one."""

    def __init__(self) -> None:
        self.current: T | None = None

    @contextmanager
    def be(self, watcher: T | None) -> Iterator[None]:
        """While open, it is this one, or nobody; behind it, whoever it was before."""
        outer, self.current = self.current, watcher
        try:
            yield
        finally:
            self.current = outer
