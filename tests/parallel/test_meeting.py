"""Ranks that meet in a store with what earlier starts have left there; the ranks are threads."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from dsv3fp8.errors import LostRank
from dsv3fp8.parallel.meeting import meet


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def names(server: TCPStore, count: int, absent: tuple[int, ...] = (), patience: float = 20.0) -> list[str]:
    """What each rank that comes is given, or what it is told."""

    def come(index: int) -> str:
        store = TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=20), wait_for_workers=False)
        try:
            return meet(store, index, count, patience)
        except LostRank as error:
            return str(error)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(come, [index for index in reversed(range(count)) if index not in absent]))


def test_every_start_has_a_name_of_its_own_and_all_its_ranks_know_it(server: TCPStore) -> None:
    starts = [names(server, 4) for _ in range(3)]
    assert all(len(set(each)) == 1 for each in starts)
    assert len({each[0] for each in starts}) == 3


def test_what_ranks_of_a_start_left_that_never_met_misleads_nobody(server: TCPStore) -> None:
    """Killed before all had come: their calls are still there, and the numbers of calls differ."""
    assert names(server, 4, absent=(0, 2), patience=0.3) == ["rank 0 has not come within 0 s"] * 2
    assert names(server, 4, absent=(3,), patience=0.3)[-1] == "rank 3 has not come within 0 s"
    assert len(set(names(server, 4))) == 1


def test_the_first_rank_says_who_does_not_come(server: TCPStore) -> None:
    assert names(server, 3, absent=(1,), patience=0.5)[-1] == "rank 1 has not come within 0 s"
