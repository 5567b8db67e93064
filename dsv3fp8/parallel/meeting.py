"""How ranks find those who were started with them, in a store that may hold what earlier starts have left there.

torchrun keeps one store over restarts, and nothing that it tells a rank says which start this is: each node counts its own
failures, so that after one on node 0 its ranks are told "1" and those of node 1 "0". torchrun ends all ranks before it starts
any again. So a rank that answers lives, and the first one gives all who call the name of this start.
"""

from __future__ import annotations

import secrets
import time

from torch.distributed.distributed_c10d import Store

from dsv3fp8.errors import LostRank

# Seconds for all ranks to come: they are started together.
PATIENCE = 600.0
PAUSE = 0.05


def meet(store: Store, index: int, count: int, patience: float = PATIENCE) -> str:
    """A name for this start, the same on all its ranks and on no earlier one's. LostRank if one of them does not come."""
    deadline = time.monotonic() + patience
    if index:
        call = secrets.token_hex(8)
        store.set(_calls(index), call)
        while not store.check([_answers(call)]):
            _wait(deadline, patience, [0])
        name = store.get(_answers(call)).decode()
        store.set(_heard(name, index), "")
        return name

    name, answered = secrets.token_hex(8), set[str]()
    missing = list(range(1, count))
    while missing:
        for rank in missing:
            if store.check([_calls(rank)]):
                call = store.get(_calls(rank)).decode()
                if call not in answered:  # it may be one of an earlier start, which nobody waits for
                    store.set(_answers(call), name)
                    answered.add(call)
        missing = [rank for rank in missing if not store.check([_heard(name, rank)])]
        if missing:
            _wait(deadline, patience, missing)
    return name


def _wait(deadline: float, patience: float, missing: list[int]) -> None:
    if time.monotonic() > deadline:
        raise LostRank(f"rank {missing[0]} has not come within {patience:.0f} s")
    time.sleep(PAUSE)


def _calls(rank: int) -> str:
    return f"rank {rank} calls"


def _answers(call: str) -> str:
    return f"answer to {call}"


def _heard(name: str, rank: int) -> str:
    return f"{name} heard by {rank}"
