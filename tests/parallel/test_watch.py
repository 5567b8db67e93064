"""The watch over other ranks, played by one process: the store is real, the ranks are threads or keys in it."""

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from dsv3fp8.parallel import watch
from dsv3fp8.parallel.watch import Watch

ALONE_HERE = range(0)


class Place:
    """A store, and watches that are closed when the test is over."""

    def __init__(self) -> None:
        self.server: TCPStore | None = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self.port, self.opened, self.left = self.server.port, list[Watch](), queue.Queue[tuple[int, str]]()

    def connect(self) -> TCPStore:
        return TCPStore("127.0.0.1", self.port, None, False, timedelta(seconds=20), wait_for_workers=False)

    def watch(self, index: int, count: int, neighbours: range = ALONE_HERE, **limits: float) -> Watch:
        limits = {"beat": 0.02, "silence": 20, "first": 20, "grace": 0.1, **limits}
        made = Watch(self.connect(), index, count, neighbours, lambda gone: self.left.put((index, gone)), **limits)
        self.opened.append(made)
        return made


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place()
    yield made
    for each in made.opened:
        each.close()


def test_nobody_leaves_while_all_are_there(place: Place) -> None:
    for index in range(3):
        place.watch(index, 3, silence=5)
    with pytest.raises(queue.Empty):
        place.left.get(timeout=1)


def test_a_rank_that_falls_silent_ends_all_with_one_note(place: Place) -> None:
    """On any host: rank 1 hears nothing of rank 2, and rank 0 reads so."""
    place.watch(0, 3, silence=15)
    place.watch(1, 3, silence=0.6)
    frozen, beats = place.connect(), 0
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        beats += 1
        frozen.set("beat 2", str(beats))
        time.sleep(0.05)
    assert place.left.empty()
    assert dict([place.left.get(timeout=10), place.left.get(timeout=10)]) == {
        0: "rank 2 has given no sign of life for 1 s",
        1: "rank 2 has given no sign of life for 1 s",
    }


def test_a_rank_that_never_gives_a_sign_is_missed_as_well(place: Place) -> None:
    place.watch(0, 2, silence=0.1, first=1)
    assert place.left.get(timeout=10) == (0, "rank 1 has given no sign of life for 1 s")


def test_a_killed_process_of_this_host_is_found_at_the_next_look(place: Place) -> None:
    neighbour = subprocess.Popen(["sleep", "60"])
    host = watch._host()
    place.connect().set("who 1", f'{{"process": {neighbour.pid}, "host": "{host}"}}')
    place.watch(0, 2, range(2))
    with pytest.raises(queue.Empty):
        place.left.get(timeout=0.5)
    neighbour.kill()  # and nobody waits for it: a zombie is no rank
    assert place.left.get(timeout=10) == (0, watch.stopped(1, neighbour.pid))
    neighbour.wait()


def test_a_process_of_another_host_is_not_looked_for_here(place: Place) -> None:
    place.connect().set("who 1", '{"process": 4194303, "host": "elsewhere"}')
    place.watch(0, 2, range(2))
    with pytest.raises(queue.Empty):
        place.left.get(timeout=0.5)


def test_a_rank_that_fails_tells_the_others(place: Place) -> None:
    other, failing = place.watch(0, 2), place.watch(1, 2)
    failing.close(failed="rank 1 has failed")
    assert other.gone(10) == "rank 1 has failed"
    assert place.left.get(timeout=10) == (0, "rank 1 has failed")


def test_a_main_thread_that_comes_back_in_time_is_left_alone(place: Place) -> None:
    other, failing = place.watch(0, 2, grace=2), place.watch(1, 2)
    failing.close(failed="rank 1 has failed")
    assert other.gone(10)
    other.close()
    with pytest.raises(queue.Empty):
        place.left.get(timeout=2.5)


def test_a_watch_ends_when_it_is_closed(place: Place) -> None:
    before = threading.active_count()
    place.watch(0, 2).close()
    assert threading.active_count() == before
    assert place.opened[0].gone() is None


def test_a_store_that_goes_ends_those_who_meet_there(place: Place) -> None:
    keeper = subprocess.Popen(
        [sys.executable, "-c", KEEPER], stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert keeper.stdout is not None
    place.port = int(keeper.stdout.readline())
    place.watch(0, 2)
    keeper.kill()
    assert place.left.get(timeout=10) == (0, watch.STORE_IS_GONE)
    keeper.wait()


KEEPER = """
import time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(60)
"""
