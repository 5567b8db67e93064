"""What a step puts on the wire, collective by collective, counted where torch dispatches them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsv3fp8.precision.tiles import ceil_div

DISPATCH, COMBINE = "dispatch", "combine"
COMBINE_BACKWARD, DISPATCH_BACKWARD = "combine's backward", "dispatch's backward"
ROWS = (DISPATCH, COMBINE, COMBINE_BACKWARD, DISPATCH_BACKWARD)
"""What moves rows between tokens and experts, in the order in which a layer does it."""
GATHER, SCATTER, REDUCE = "gather weights", "reduce-scatter gradients", "all-reduce gradients"
GATES, COUNTS, OTHER = "gate weights", "counts", "other"
KERNELS = {"alltoall_base_": "SendRecv", "allreduce_": "AllReduce"}
KERNELS |= {"_allgather_base_": "AllGather", "_reduce_scatter_base_": "ReduceScatter"}
"""What NCCL calls the kernel of a collective."""


@dataclass(frozen=True)
class Call:
    """One collective of this rank.

    payload: bytes handed over, this rank's own share among them; of a sum over ranks twice its bytes, as it goes round twice.
    sent: what of it leaves the rank. rows: rows that an exchange brings here. kernel: NCCL's, "" on a CPU.
    """

    what: str
    payload: int
    sent: float
    rows: int = 0
    kernel: str = ""


class Traffic(TorchDispatchMode):
    """Counts the collectives that run inside, forward and backward. It sees every op, so nothing is to be timed meanwhile.

    dim, carried: the width of the residual stream and the bytes of a value, by which rows are told apart.
    """

    def __init__(self, dim: int, carried: int) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._naming = _Naming(dim, carried)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func._schema.name.split("::")[1], args)
        return result

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        group = next((found for arg in args if (found := _group_of(arg)) is not None), None)
        tensors = list(_tensors(args))
        if not tensors or (group is not None and group.size() == 1):
            return
        size = group.size() if group is not None else 0
        given = tensors[1] if name in ("alltoall_base_", "_allgather_base_", "_reduce_scatter_base_") else tensors[0]
        kernel = KERNELS.get(name, "") if given.is_cuda else ""
        if name == "alltoall_base_" and group is not None:
            arriving, leaving = args[3], args[4]
            call = self._naming.exchange(given, arriving, leaving, group.rank(), size)
        elif name == "_allgather_base_":
            call = _ring(GATHER, _bytes(tensors[0]), size)
        elif name == "_reduce_scatter_base_":
            call = _ring(SCATTER, _bytes(given), size)
        elif name == "allreduce_":
            what = REDUCE if all(tensor.dtype is torch.float32 for tensor in tensors) else OTHER
            call = _ring(what, 2 * sum(map(_bytes, tensors)), size)
        else:
            if name in ("wait_tensor", "barrier"):
                return
            call = Call(OTHER, sum(map(_bytes, tensors)), 0.0)
        self.calls.append(replace(call, kernel=kernel))


class _Naming:
    """Says what an exchange carries, from the bytes of its rows and what went before it in the same direction.

    A dispatch is rows of codes and, on their own or with them, scales; in the compute type it is told from a combine by turns:
    whatever was dispatched is combined next.
    """

    def __init__(self, dim: int, carried: int) -> None:
        self._plain, self._codes, self._scales = carried * dim, dim, 4 * ceil_div(dim, 128)
        self._last = {False: "", True: ""}  # forward and backward: what moved rows last
        self._codes_before = False

    def exchange(self, given: Tensor, arriving: Sequence[int], leaving: Sequence[int], index: int, size: int) -> Call:
        total = _bytes(given)
        if not leaving:
            return Call(COUNTS, total, total * (size - 1) / size)
        width = given.shape[1]  # not from the total: a rank whose experts nobody chose sends home no rows, and says so
        call = Call("", total, float(total - leaving[index] * width), sum(arriving))
        backward = torch._C._current_graph_task_id() != -1
        out, home = (COMBINE_BACKWARD, DISPATCH_BACKWARD) if backward else (DISPATCH, COMBINE)
        after_codes, self._codes_before = self._codes_before, width == self._codes
        if width == self._scales and after_codes:
            return replace(call, what=out, rows=0)  # of the rows whose codes were just sent
        if width == 4:
            return replace(call, what=GATES, rows=0)
        what = home if width == self._plain and self._last[backward] == out else out
        self._last[backward] = what
        return replace(call, what=what)


def summary(calls: Iterable[Call]) -> dict[str, dict[str, float]]:
    """By what is carried: calls, payload and bytes sent."""
    found: dict[str, dict[str, float]] = {}
    for call in calls:
        entry = found.setdefault(call.what, {"calls": 0, "payload": 0, "sent": 0.0})
        entry["calls"] += 1
        entry["payload"] += call.payload
        entry["sent"] += call.sent
    return found


def _ring(what: str, payload: int, size: int) -> Call:
    return Call(what, payload, payload * (size - 1) / size if size else 0.0)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _group_of(value: Any) -> dist.ProcessGroup | None:
    if not isinstance(value, torch.ScriptObject):
        return None
    try:
        return dist.ProcessGroup.unbox(value)
    except RuntimeError:  # what is to be done, not with whom
        return None
