"""The processes that train together: which one this is, and what they tell one another.

torchrun starts them and says in the environment who they are and where they meet. Tensors of a CPU travel by gloo and those
of a GPU by NCCL, in the same groups: what the hosts agree on (counts of targets, a signal) waits for no GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

T = TypeVar("T")
Some = TypeVar("Some", bound=Tensor)

# How long a rank waits for another one: the first to read a corpus may tokenize it meanwhile.
PATIENCE = timedelta(hours=2)
# What errors say where the rank at the other end is gone.
LOST = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "Timed out waiting",
    "connectFullMesh failed",
)  # fmt: skip

_meeting: Store | None = None  # where this process met the others


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together, every one with tokens of its own.

    index: 0 .. count - 1. local: among those of this host. Every method but `first` is called by all ranks, in one order.
    expert: ranks in a row that the experts are dealt out to, None as their group where each rank has all of them.
    replicas: the ranks that hold the same experts as this one. expert_mesh: [replicas, expert], of all ranks.
    """

    index: int = 0
    count: int = 1
    local: int = 0
    expert: int = 1
    expert_group: dist.ProcessGroup | None = None
    replicas: dist.ProcessGroup | None = None
    expert_mesh: DeviceMesh | None = None

    @property
    def first(self) -> bool:
        """Whether this is the one that writes and speaks."""
        return self.index == 0

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Each tensor becomes its sum over the ranks, the same bits on all of them."""
        if self.count > 1:
            combine_over(list(tensors), dist.ReduceOp.SUM, None)

    def take_largest(self, tensors: Iterable[Tensor]) -> None:
        """Each tensor becomes its largest over the ranks, element by element."""
        if self.count > 1:
            combine_over(list(tensors), dist.ReduceOp.MAX, None)

    def sum_counts(self, counts: Sequence[int]) -> list[int]:
        """The sums of whole numbers over the ranks. Waits for the hosts alone."""
        given = torch.tensor(counts, dtype=torch.int64)
        self.add_up([given])
        return given.tolist()

    def largest(self, number: int) -> int:
        """The largest of the ranks' numbers. Waits for the hosts alone."""
        given = torch.tensor([number], dtype=torch.int64)
        self.take_largest([given])
        return int(given)

    def from_first(self, value: T) -> T:
        """What the first rank has given."""
        box = [value]
        if self.count > 1:
            dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def wait(self) -> None:
        """Until all ranks are here."""
        self.largest(0)

    @contextmanager
    def host_by_host(self) -> Iterator[None]:
        """One rank of each host goes first, the others follow: for what the first may leave in a cache."""
        if self.local:
            self.wait()
        yield
        if not self.local:
            self.wait()


ALONE = Ranks()


def rank_count() -> int:
    """Processes of this run, from the environment."""
    given = os.environ.get("WORLD_SIZE", "")
    return int(given) if given.isdecimal() else 1


def local_rank() -> int:
    """This process among those of its host, from the environment: the number of its GPU."""
    given = os.environ.get("LOCAL_RANK", "")
    return int(given) if given.isdecimal() else 0


@contextmanager
def join(device: torch.device, expert: int = 1) -> Iterator[Ranks]:
    """Meet the other ranks, and leave with them: nobody leaves before all have finished what is inside.

    expert: so many ranks in a row hold all experts between them.
    """
    if rank_count() == 1:
        yield ALONE
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store, index, count = _meet()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "cpu:gloo"
    dist.init_process_group(backend, store=store, rank=index, world_size=count, timeout=PATIENCE)
    ranks = Ranks(index, count, local_rank())
    if expert > 1:
        mesh = init_device_mesh(device.type, (count // expert, expert), mesh_dim_names=("replica", "expert"))
        expert_group, replicas = mesh.get_group("expert"), mesh.get_group("replica")
        ranks = replace(ranks, expert=expert, expert_group=expert_group, replicas=replicas, expert_mesh=mesh)
    yield ranks
    # Not after an error: the others may wait for this rank in another place.
    ranks.wait()
    dist.destroy_process_group()


def speaks() -> bool:
    """Whether this rank is to say why the run fails: the first of all that asks."""
    if rank_count() == 1:
        return True
    if _meeting is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return os.environ.get("RANK", "0") == "0"  # they have no place yet where one could ask
    try:
        store = _meeting or _meet()[0]
        return store.add("failed", 1) == 1
    except (RuntimeError, ValueError):
        return True  # the place went down with the rank that kept it


def has_met() -> bool:
    """Whether this process has met others."""
    return _meeting is not None


def lost(error: BaseException) -> bool:
    """Whether an error says that another rank is gone."""
    return rank_count() > 1 and any(words in str(error) for words in LOST)


def _meet() -> tuple[Store, int, int]:
    global _meeting
    store, index, count = next(rendezvous("env://", timeout=PATIENCE))
    # torchrun keeps the place over restarts, with all that those who are gone have left there.
    _meeting = PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return _meeting, index, count


# Elements that travel at once: 64 MiB of FP32.
BUCKET_ELEMENTS = 1 << 24


def combine_over(tensors: list[Tensor], operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> None:
    """Replaces each tensor by the sum or maximum over the ranks of a group; None is all of them. One dtype and device.

    Small ones share a buffer. The cuts hang on the sizes alone, so that a run adds in the same order every time.
    """
    for bucket in buckets(tensors):
        start_combining(bucket, operation, group)()


def start_combining(
    bucket: list[Tensor], operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None
) -> Callable[[], None]:
    """`combine_over` of one bucket, on its way when this returns; its tensors are to be left alone until one has called what
    is returned, which on a GPU lets the stream wait and not the host.
    """
    flat = torch.cat([tensor.flatten() for tensor in bucket]) if len(bucket) > 1 or not bucket[0].is_contiguous() else bucket[0]
    work = dist.all_reduce(flat, operation, group, async_op=True)

    def wait() -> None:
        work.wait()
        if flat is not bucket[0]:
            parts = flat.split([tensor.numel() for tensor in bucket])
            torch._foreach_copy_(bucket, [part.view_as(tensor) for part, tensor in zip(parts, bucket, strict=True)])

    return wait


def buckets(tensors: Iterable[Some]) -> Iterator[list[Some]]:
    """Tensors that travel together, in their order."""
    bucket: list[Some] = []
    for tensor in tensors:
        if bucket and sum(each.numel() for each in bucket) + tensor.numel() > BUCKET_ELEMENTS:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
