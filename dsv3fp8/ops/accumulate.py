"""Weight gradients of several micro-batches, summed by the kernels that make them.

Autograd adds a finished gradient to the sum so far: twelve bytes a weight beside the four that the gradient itself took. A
wgrad that adds its products to the sum reads and writes it once. The bits are the same: one FP32 addition each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from dsv3fp8.precision import ledger

_adding = False  # of the process: autograd runs backward in a thread of its own


@contextmanager
def adding_up() -> Iterator[None]:
    """For `backward()` alone: what is differentiated inside may be added to `.grad` by ops, unseen by hooks on the weight."""
    global _adding
    outer, _adding = _adding, True
    try:
        yield
    finally:
        _adding = outer


def running_sum(weight: Tensor) -> Tensor | None:
    """The sum so far that an op may add this weight's gradient to, giving autograd None for it; None where there is none."""
    return weight.grad if _adding and ledger.active() is None else None
