"""Weight gradients of several micro-batches, summed by the kernels that make them.

Autograd adds a finished gradient to the sum so far: twelve bytes a weight beside the four that the gradient itself took. A
wgrad that adds its products to the sum reads and writes it once. The bits are the same: one FP32 addition each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from dsv3fp8.precision import ledger

Listener = Callable[[Tensor], None]

# Of the process: autograd runs backward in a thread of its own.
_adding = False
_listener: Listener | None = None


@contextmanager
def adding_up(listener: Listener | None = None) -> Iterator[None]:
    """For `backward()` alone: what is differentiated inside may be added to `.grad` by ops, unseen by hooks on the weight.

    listener: called with each weight that an op has done so for.
    """
    global _adding, _listener
    outer, (_adding, _listener) = (_adding, _listener), (True, listener)
    try:
        yield
    finally:
        _adding, _listener = outer


def running_sum(weight: Tensor) -> Tensor | None:
    """The sum so far that an op may add this weight's gradient to, giving autograd None for it; None where there is none.

    Whoever adds to it calls `added`.
    """
    return weight.grad if _adding and ledger.active() is None else None


def added(weight: Tensor) -> None:
    """This backward's gradient of the weight is in its running sum."""
    if _listener is not None:
        _listener(weight)
