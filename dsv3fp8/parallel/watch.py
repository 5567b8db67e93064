"""Whether the other ranks are still there: a thread of every rank, which ends the process soon after one of them is gone.

A collective can wait for a rank that will never answer, and no error comes of it: a kernel of NCCL spins, and gloo says nothing
to a send that is half written when its reader is killed. So the ranks also know of one another by what is in the store where
they met. Every rank looks once a second: at the processes of its own host, at the sign of life of the rank behind it (which may
be on any host), and at the note that whoever finds one missing leaves for all.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from torch.distributed.distributed_c10d import Store

# Seconds between two looks.
BEAT = 1.0
# After so many seconds without a sign of life a rank is taken for frozen, or its host for lost. Python cannot beat while a
# library holds its lock, in a compilation say, so this is long.
SILENCE = 60.0
# Seconds for its first one: all have met right before.
FIRST = 120.0
# Seconds for the main thread to come back by itself, as it does where the collective fails.
GRACE = 5.0

NOTE = "gone"
STORE_IS_GONE = "the store where ranks meet is gone (the launcher or the first rank kept it)"


class Watch:
    """Looks after the other ranks until it is closed.

    `leave` is called once, from the watching thread, with who is gone, unless the watch is closed within `grace` seconds: as it
    is where the main thread has come back with an error, or where all are done and the others have left a moment earlier.
    """

    def __init__(
        self,
        store: Store,
        index: int,
        count: int,
        neighbours: range,
        leave: Callable[[str], None],
        *,
        beat: float = BEAT,
        silence: float = SILENCE,
        first: float = FIRST,
        grace: float = GRACE,
    ) -> None:
        """store: a connection of its own, since a wait holds one up. neighbours: the ranks of this host, as far as is known."""
        self._store, self._index, self._next = store, index, (index + 1) % count
        self._leave, self._beat, self._grace = leave, beat, grace
        self._silence, self._allowed = silence, first
        self._unknown = [rank for rank in neighbours if rank != index]
        self._processes: dict[int, tuple[int, psutil.Process | None]] = {}
        self._beats, self._heard, self._since = 0, "", time.monotonic()
        self._found, self._closed = threading.Event(), threading.Event()
        self._gone: str | None = None
        store.set(_who(index), json.dumps({"process": os.getpid(), "host": _host()}))
        self._thread = threading.Thread(target=self._watch, name="watch over the other ranks", daemon=True)
        self._thread.start()

    def gone(self, patience: float = 0) -> str | None:
        """Who is gone, in words; None if nobody is known to be after so many seconds."""
        self._found.wait(patience)
        return self._gone

    def close(self, failed: str | None = None) -> None:
        """End the watch: all ranks are done, or this one has failed, which the others are told in these words."""
        self._closed.set()
        self._thread.join(self._grace)
        if failed is not None:
            with contextlib.suppress(RuntimeError):  # the store went first: the others see that as well
                note_down(self._store, failed)

    def _watch(self) -> None:
        while self._gone is None:
            if self._closed.wait(self._beat):
                return
            try:
                gone = self._look()
                self._gone = gone and note_down(self._store, gone)
            except RuntimeError:
                self._gone = STORE_IS_GONE
        self._found.set()
        if not self._closed.wait(self._grace):
            self._leave(self._gone)

    def _look(self) -> str | None:
        """One look at everybody this rank can see; who is gone."""
        store = self._store
        self._beats += 1
        store.set(_beat_of(self._index), str(self._beats))
        if store.check([NOTE]):
            return store.get(NOTE).decode()
        for rank in [rank for rank in self._unknown if store.check([_who(rank)])]:
            self._unknown.remove(rank)
            who = json.loads(store.get(_who(rank)))
            if who["host"] == _host():
                self._processes[rank] = who["process"], _find(who["process"])
        for rank, (number, process) in self._processes.items():
            if process is None or not _lives(process):
                return stopped(rank, number)
        return self._listen()

    def _listen(self) -> str | None:
        """The sign of life of the next rank."""
        now = time.monotonic()
        if self._store.check([_beat_of(self._next)]):
            heard = self._store.get(_beat_of(self._next)).decode()
            if heard != self._heard:
                self._heard, self._since, self._allowed = heard, now, self._silence
        if now - self._since <= self._allowed:
            return None
        return f"rank {self._next} has given no sign of life for {self._allowed:.0f} s"


def note_down(store: Store, gone: str) -> str:
    """Leave a note for all; the one that was there first holds, and is returned."""
    return store.compare_set(NOTE, "", gone).decode()


def stopped(rank: int, process: int) -> str:
    """That it is gone, in words."""
    return f"rank {rank} (process {process} on {os.uname().nodename}) has stopped"


def _who(rank: int) -> str:
    return f"who {rank}"


def _beat_of(rank: int) -> str:
    return f"beat {rank}"


def _host() -> str:
    """What two processes share that can see one another by their numbers."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no Linux
        return os.uname().nodename


def _find(number: int) -> psutil.Process | None:
    try:
        return psutil.Process(number)
    except psutil.NoSuchProcess:
        return None


def _lives(process: psutil.Process) -> bool:
    """Whether it runs, and is not another one that was given its number."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
