"""The processes that train together: which one this is, and what they tell one another.

torchrun starts them and says in the environment who they are and where they meet. Tensors of a CPU travel by gloo and those
of a GPU by NCCL, in the same groups: what the hosts agree on (counts of targets, a signal) waits for no GPU.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from dsv3fp8 import __version__
from dsv3fp8.errors import LostRank, UserError
from dsv3fp8.last_words import error_line, say_at_once, show_cursor
from dsv3fp8.parallel.meeting import meet
from dsv3fp8.parallel.watch import Watch, note_down, stopped

T = TypeVar("T")
Some = TypeVar("Some", bound=Tensor)

# How long a rank waits for another one: the first to read a corpus may tokenize it meanwhile.
PATIENCE = timedelta(hours=2)
# How long a collective of GPUs may take before NCCL's own watchdog ends the process. Hosts have met right before them.
GPU_PATIENCE = timedelta(minutes=10)
# What errors say where the way to another rank is broken.
BROKEN = ("gloo/transport/", "connectFullMesh failed", "ncclRemoteError")
# Seconds after such an error in which the watch finds out who is gone, on whatever host.
CONFIRMED_WITHIN = 4.0
FAILED = 1  # exit status
# Of what has to be the same on all ranks.
VERSIONS = {"dsv3fp8": __version__, "torch": str(torch.__version__)}
ABSENT = "(absent)"
WHO = r"^rank \d+ on \S+ "  # begins a line about one rank of several that may say the same

_met: tuple[str, Store] | None = None  # the name of this start and its place in the store, once this process has met the others


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together, every one with tokens of its own.

    index: 0 .. count - 1. local: among those of this host. Every method but `first` is called by all ranks, in one order.
    expert: ranks in a row that the experts are dealt out to, None as their group where each rank has all of them.
    replicas: the ranks that hold the same experts as this one. expert_mesh: [replicas, expert], of all ranks, and behind these
    the ranks that an expert is cut over, if it is.
    shard: ranks in a row that weights are cut over. shard_mesh: [shard], or [replicate, shard] where there are replicas of
    these; expert_shard_mesh: the same of the experts, None where each rank has its experts whole.
    """

    index: int = 0
    count: int = 1
    local: int = 0
    expert: int = 1
    expert_group: dist.ProcessGroup | None = None
    replicas: dist.ProcessGroup | None = None
    expert_mesh: DeviceMesh | None = None
    shard: int = 1
    shard_mesh: DeviceMesh | None = None
    expert_shard_mesh: DeviceMesh | None = None

    @property
    def first(self) -> bool:
        """Whether this is the one that writes and speaks."""
        return self.index == 0

    @property
    def expert_parts(self) -> int:
        """Ranks in a row that hold all experts between them, each once."""
        return max(self.expert, self.shard)

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

    def require_equal(self, given: Mapping[str, Any], remedy: str) -> None:
        """Raise UserError on a rank that has other values than the first one, naming them all.

        Ranks that were started by hand on several nodes may have been told other things, and a file of one name may be
        another on each of them.
        """
        wanted = self.from_first(dict(given))
        keys = [*wanted, *(key for key in given if key not in wanted)]
        pairs = [(key, given.get(key, ABSENT), wanted.get(key, ABSENT)) for key in keys]
        differing = [f"{key} {ours} instead of {theirs}" for key, ours, theirs in pairs if ours != theirs]
        if differing:
            raise UserError(f"rank {self.index} on {os.uname().nodename} has {', '.join(differing)} as rank 0: {remedy}")

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


def _require_environment() -> None:
    """Raise UserError unless the environment says who this process is and where it meets the others."""
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        given = os.environ.get(name, "")
        if not given or (name != "MASTER_ADDR" and not given.isdecimal()):
            what = f"{name}={given} is no number" if given else f"{name} is missing"
            raise UserError(f"WORLD_SIZE={rank_count()} is set, but {what}: start it with torchrun, or unset WORLD_SIZE")


@contextmanager
def join(device: torch.device, expert: int = 1, shard: int = 1) -> Iterator[Ranks]:
    """Meet the other ranks, and leave with them: nobody leaves before all have finished what is inside.

    expert: so many ranks in a row hold all experts between them. shard: so many hold the parts of all else. Raises LostRank if
    one of the others is gone; where this one is held up in a collective then, the process ends (see `watch`).
    """
    if rank_count() == 1:
        yield ALONE
        return
    _require_environment()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    place, index, count = next(rendezvous("env://", timeout=PATIENCE))
    start, beside = _meet(index, count)
    first = index - local_rank()
    with _watched(Watch(beside, index, count, range(first, first + _ranks_of_this_host(count)), _leave), index):
        # "cpu:gloo" would leave the group without a default backend where another module has registered one with torch, as
        # torch's own fake one is, and torch warns of that when the group ends.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        store = PrefixStore(start, place)
        dist.init_process_group(backend, store=store, rank=index, world_size=count, timeout=PATIENCE)
        if device.type == "cuda":
            group = dist.group.WORLD
            assert group is not None
            group._get_backend(device)._set_default_timeout(GPU_PATIENCE)
        ranks = Ranks(index, count, local_rank())
        ranks.require_equal({"parallel.expert": expert, "parallel.dp_shard": shard, **VERSIONS}, "start all ranks alike")
        if expert > 1:
            mesh = init_device_mesh(device.type, (count // expert, expert), mesh_dim_names=("replica", "expert"))
            expert_group, replicas = mesh.get_group("expert"), mesh.get_group("replica")
            ranks = replace(ranks, expert=expert, expert_group=expert_group, replicas=replicas, expert_mesh=mesh)
        if shard > 1:
            ranks = _with_shards(ranks, device.type, shard)
        yield ranks
        # Not after an error: the others may wait for this rank in another place.
        ranks.wait()
    dist.destroy_process_group()


@contextmanager
def _watched(watch: Watch, index: int) -> Iterator[None]:
    """What is inside ends with LostRank where a collective fails because a rank is gone."""
    try:
        yield
    except BaseException as error:
        gone = _who_is_gone(error, watch)
        watch.close(failed=stopped(index, os.getpid()))
        if gone is None:
            raise
        raise LostRank(gone) from error
    watch.close()


def _who_is_gone(error: BaseException, watch: Watch) -> str | None:
    """In words; None where the error is this rank's own."""
    broken = isinstance(error, dist.DistNetworkError) or any(words in str(error) for words in BROKEN)
    if not broken and not isinstance(error, dist.DistError):
        return None
    return watch.gone(CONFIRMED_WITHIN) or ("another rank has stopped" if broken else None)


def _leave(gone: str) -> None:
    """End this process, whose main thread waits for a rank that is gone."""
    show_cursor()
    if speaks():
        say_at_once(error_line(left_alone(gone)))
    os._exit(FAILED)


def left_alone(gone: str) -> str:
    """What a run says that ends because a rank is gone."""
    return f"{gone}, so the others stop too; start again to go on from the checkpoint"


def _with_shards(ranks: Ranks, device: str, shard: int) -> Ranks:
    """With the meshes that weights are cut over. Ranks lie replica by replica, the expert groups inside them."""
    count = ranks.count // shard
    mesh = init_device_mesh(device, (count, shard), mesh_dim_names=("replicate", "shard"))
    of_weights = mesh if count > 1 else mesh["shard"]
    ranks = replace(ranks, shard=shard, shard_mesh=of_weights)
    if ranks.expert == 1:
        return replace(ranks, expert_shard_mesh=of_weights)
    if shard <= ranks.expert:  # an expert group takes up a shard group, or several
        return ranks
    # The ranks of a shard group that have the same experts cut them; between two of these lies an expert group.
    numbers = torch.arange(ranks.count).view(count, shard // ranks.expert, ranks.expert).transpose(1, 2)
    whole = DeviceMesh(device, numbers, mesh_dim_names=("replica", "expert", "expert_shard"))
    cut = whole["replica", "expert_shard"] if count > 1 else whole["expert_shard"]
    return replace(ranks, expert_mesh=whole, expert_shard_mesh=cut)


def speaks(once: str | None = None) -> bool:
    """Whether this rank, which ends, is to say why the run fails: the first of all that asks. The others learn that it ends.

    once: a line that is said no second time, where torchrun starts all again and they fail alike, whichever rank is the first.
    """
    if rank_count() == 1:
        return True
    given = os.environ.get("RANK", "")
    index = int(given) if given.isdecimal() else 0
    if _met is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return index == 0  # they have no place yet where one could ask
    try:
        _, store = _meet(index, rank_count())
        note_down(store, stopped(index, os.getpid()))
        if store.add("failed", 1) != 1:
            return False
        said = once and f"said: {re.sub(WHO, '', once)}"
        return said is None or store.underlying_store.add(said, 1) == 1  # type: ignore[attr-defined]
    except (LostRank, RuntimeError, ValueError, KeyError):
        return True  # the place went down with the rank that kept it


def has_met() -> bool:
    """Whether this process has met others."""
    return _met is not None


def _meet(index: int, count: int) -> tuple[str, Store]:
    """(the name of this start, what the ranks have in common beside their groups). Waits for all ranks the first time."""
    global _met
    if _met is None:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # A connection of its own, which no wait of a group holds up.
        place = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=False, timeout=PATIENCE, wait_for_workers=False
        )
        start = meet(place, index, count)
        _met = start, PrefixStore(f"{start}, beside the groups", place)
    return _met


def _ranks_of_this_host(count: int) -> int:
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(given) if given.isdecimal() else count


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
