"""Writes checkpoints while training goes on.

Once, at the start, DCP's planner settles which rank writes which part of which tensor: a part that several ranks hold is
written by one of them, and the work is spread. A save copies this rank's share to host memory, which is all that training
waits for. A thread then writes it; the first rank, told that all files are on the disk, adds the index, renames the directory
and deletes the oldest. The thread talks to the other ranks' in a process group of its own.
"""

import json
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from dsv3fp8.errors import UserError
from dsv3fp8.parallel.ranks import ALONE, PATIENCE, Ranks
from dsv3fp8.training.checkpoint import (
    CHECKSUM,
    CHECKSUMS,
    FORMAT,
    INDEX,
    OFFSETS,
    RANDOM,
    SHARDING,
    file_name,
    index_checksum,
)
from dsv3fp8.training.checkpoint_directory import cannot_write, delete_old, places, publish
from dsv3fp8.training.checkpoint_file import DTYPE_NAMES, Layout, bytes_of, write_file


class Saver:
    """One for a run. Every method is called by all ranks, in one order.

    share_bytes: what this rank writes of each checkpoint, within some kilobytes.
    """

    def __init__(self, directory: Path, keep: int, tensors: Mapping[str, Tensor], ranks: Ranks = ALONE) -> None:
        """tensors: those that every checkpoint will have, plain where whole on every rank, else DTensors."""
        self._directory, self._keep, self._ranks = directory, keep, ranks
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE) if ranks.count > 1 else None
        self._whole: Layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        self._items = self._plan(tensors)
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    @property
    def share_bytes(self) -> int:
        return sum(_count(item) * self._whole[item.index.fqn][0].itemsize for item in self._items)

    def save(
        self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], random_states: Mapping[str, Any]
    ) -> None:
        """Begin a checkpoint of what there is now; what changes from here on is not in it.

        state: plain containers, the first rank's; random_states: this rank's own. UserError where the checkpoint before it
        could not be written, or where a tensor is not finite: no such state is ever saved.
        """
        self.wait()
        share = self._share(tensors)
        self._refuse_what_is_not_finite(share, step)
        # As text already: what hangs on the state must not change with it.
        snapshot = _host_copy(share), json.dumps(state), json.dumps(random_states)
        self._thread = threading.Thread(target=self._write, args=(step, *snapshot), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until the last checkpoint is on the disk; UserError if it could not be written."""
        self.close()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def close(self) -> None:
        """As `wait`, for the end of a run that fails anyway: raises nothing."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _plan(self, tensors: Mapping[str, Tensor]) -> list[WriteItem]:
        """The parts that this rank writes."""
        planner = _planner(tensors)
        given = planner.create_local_plan()
        if self._group is None:
            return _without_empty(planner.create_global_plan([given])[0][0])
        plans: list[Any] = [None] * self._ranks.count
        dist.gather_object(given, plans if self._ranks.first else None, group=self._group)
        if self._ranks.first:
            plans = planner.create_global_plan(plans)[0]
        received: list[Any] = [None]
        dist.scatter_object_list(received, plans if self._ranks.first else None, group=self._group)
        return _without_empty(received[0])

    def _share(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's parts, where they lie."""
        assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} == self._whole
        planner, share = _planner(tensors), {}
        for item in self._items:
            part = planner.resolve_data(item)
            assert isinstance(part, Tensor)
            share[item.index.fqn] = part.detach()
        return share

    def _refuse_what_is_not_finite(self, share: Mapping[str, Tensor], step: int) -> None:
        unsound = {name for name, finite in _finite(share).items() if not finite}
        names = list(self._whole)
        bad = min((place for place, name in enumerate(names) if name in unsound), default=len(names))
        bad = -self._ranks.largest(-bad)
        if bad < len(names):
            raise UserError(
                f"{names[bad]} is not finite after step {step}, so no checkpoint is written: start again from the last "
                "checkpoint with a lower optimizer.lr or training.clip (resume=fork)"
            )

    def _write(self, step: int, share: dict[str, Tensor], state: str, random_states: str) -> None:
        """In the thread: this rank's file, then, on the first rank, what makes a checkpoint of them all."""
        temporary, target = places(self._directory, step)
        try:
            written, complaint = self._write_share(temporary, target, share, random_states)
            reports: list[Any] = [(written, complaint)]
            if self._group is not None:
                reports = [None] * self._ranks.count
                dist.gather_object((written, complaint), reports if self._ranks.first else None, group=self._group)
            if self._ranks.first:
                complaint = self._finish(temporary, target, state, reports)
            if self._group is not None:
                outcome = [complaint]
                dist.broadcast_object_list(outcome, src=0, group=self._group)
                complaint = outcome[0]
            if complaint:
                self._failure = UserError(complaint)
        except Exception as error:  # another rank is gone, say: the main thread is to raise it
            self._failure = error

    def _write_share(
        self, temporary: Path, target: Path, share: dict[str, Tensor], random_states: str
    ) -> tuple[tuple[int, int], str | None]:
        """((size of the file, CRC-32 of its header), what went wrong)."""
        path = temporary / file_name(self._ranks.index)
        layout = {name: (part.dtype, tuple(part.shape)) for name, part in share.items()}
        offsets = {item.index.fqn: list(item.index.offset or ()) for item in self._items}
        try:
            temporary.mkdir(parents=True, exist_ok=True)
            return _write_parts(path, layout, offsets, random_states, share.__getitem__), None
        except OSError as error:
            return (0, 0), cannot_write(self._directory, f"{target.name}/{path.name}", error.strerror or str(error))

    def _finish(
        self, temporary: Path, target: Path, state: str, reports: list[tuple[tuple[int, int], str | None]]
    ) -> str | None:
        """On the first rank, once all have written or failed: make it a checkpoint; what went wrong."""
        complaint = next((text for _, text in reports if text), None)
        if complaint:
            shutil.rmtree(temporary, ignore_errors=True)
            return complaint
        files = {file_name(rank): written for rank, (written, _) in enumerate(reports)}
        doing = INDEX
        try:
            for doing, (size, _) in files.items():
                if not (temporary / doing).exists() or (temporary / doing).stat().st_size != size:
                    raise OSError("it is not as its rank wrote it: is run_dir= on a disk that all hosts share?")
            doing = INDEX
            _write_index(temporary / INDEX, state, self._whole, files)
            publish(temporary, target)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            return cannot_write(self._directory, f"{target.name}/{doing}", error.strerror or str(error))
        try:
            delete_old(self._directory, self._keep)
        except OSError as error:
            return f"cannot delete the old checkpoint {error.filename}: {error.strerror}; put that right and run again"
        return None


def write_checkpoint(
    directory: Path, step: int, layout: Layout, tensor_of: Callable[[str], Tensor], state: Mapping[str, Any]
) -> None:
    """A checkpoint of tensors that need not be in memory together, written by a process alone: what `Checkpoint` reads.

    tensor_of makes the contiguous CPU tensor of a name, twice: for its checksum, which comes first in the file, and for the
    file. OSError where the disk does not take it.
    """
    temporary, target = places(directory, step)
    temporary.mkdir(parents=True)
    path, offsets = temporary / file_name(0), {name: [0] * len(shape) for name, (_, shape) in layout.items()}
    written = _write_parts(path, layout, offsets, json.dumps({}), tensor_of)  # no generator has drawn anything yet
    _write_index(temporary / INDEX, json.dumps(state), layout, {path.name: written})
    publish(temporary, target)


def _write_parts(
    path: Path, layout: Layout, offsets: Mapping[str, list[int]], random_states: str, tensor_of: Callable[[str], Tensor]
) -> tuple[int, int]:
    """The file of a rank; (its size, CRC-32 of its header)."""
    metadata = {
        SHARDING: json.dumps({name: {OFFSETS: begins} for name, begins in offsets.items()}),
        CHECKSUMS: json.dumps({name: zlib.crc32(bytes_of(tensor_of(name))) for name in layout}),
        RANDOM: random_states,
    }
    header = write_file(path, layout, metadata, tensor_of)
    return path.stat().st_size, zlib.crc32(header)


def _planner(tensors: Mapping[str, Tensor]) -> DefaultSavePlanner:
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors))
    return planner


def _finite(share: Mapping[str, Tensor]) -> dict[str, bool]:
    """Whether all values of a tensor are finite, of those that could be anything else. One number of each is read back."""
    found: dict[str, bool] = {}
    for dtype in {part.dtype for part in share.values() if part.is_floating_point()}:
        names = [name for name, part in share.items() if part.dtype == dtype]
        extremes = torch.stack([extreme for name in names for extreme in share[name].aminmax()])  # NaN passes through
        found |= dict(zip(names, torch.isfinite(extremes).view(-1, 2).all(1).tolist(), strict=True))
    return found


def _host_copy(share: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Pinned where the tensors lie on a GPU: torch keeps such memory from save to save."""
    copies = {name: torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda) for name, part in share.items()}
    for name, part in share.items():
        copies[name].copy_(part, non_blocking=True)
    if any(part.is_cuda for part in share.values()):
        torch.cuda.synchronize()
    return copies


def _without_empty(plan: SavePlan) -> list[WriteItem]:
    """A tensor that is cut over more ranks than it has rows leaves some of them with nothing."""
    return [item for item in plan.items if _count(item)]


def _count(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return prod(item.tensor_data.chunk.sizes)


def _write_index(path: Path, state: str, whole: Layout, files: Mapping[str, tuple[int, int]]) -> None:
    index: dict[str, Any] = {
        "format": FORMAT,
        "state": json.loads(state),
        "files": files,
        "tensors": {name: (DTYPE_NAMES[dtype], shape) for name, (dtype, shape) in whole.items()},
    }
    index[CHECKSUM] = index_checksum(index)
    with path.open("x", encoding="utf-8") as file:
        json.dump(index, file)
        file.flush()
        os.fsync(file.fileno())
