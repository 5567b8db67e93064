"""Windows of packed ids in a shuffled order that never depends on who prepares them, and a position in that order.

The training stream is one sequence of windows without end: every window once, shuffled, then every window again in
another order. Step t takes the next `sequences × world` of them, and each rank its own share, so that ranks are
disjoint, together complete, and never out of step. The position is the number of windows *consumed*.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dsv3fp8.data.store import TokenStore
from dsv3fp8.errors import UserError

AHEAD = 2  # batches that each worker prepares in advance
PADDING = -1  # the document of positions behind the end of the text


@dataclass
class Batch:
    """Windows of S + 1 tokens: positions 0 … S-1 are inputs, 1 … S their targets."""

    tokens: torch.Tensor  # int64 [B, S+1]
    # int32 [B, S+1]: equal numbers in a row are one document, -1 is padding. None where documents are not kept apart.
    documents: torch.Tensor | None


class TrainBatches:
    """An endless iterator of batches, reshuffled each epoch. Close it, or use it as a context, to stop its workers."""

    def __init__(
        self,
        store: TokenStore,
        sequences: int,
        context: int,
        seed: int,
        workers: int = 0,
        rank: int = 0,
        world: int = 1,
        isolate: bool = False,
    ) -> None:
        """`sequences` windows of `context` + 1 tokens a batch on each of `world` ranks; `workers` threads prepare them.

        Raises UserError if the split is shorter than one window.
        """
        assert min(sequences, context) >= 1, (sequences, context)
        assert min(seed, workers) >= 0, (seed, workers)
        assert 0 <= rank < world, (rank, world)
        self.windows = _windows(store, context)
        if not self.windows:
            raise UserError(
                f"data: the training split has {len(store)} tokens, fewer than training.context={context} and one more"
            )
        self._store, self._sequences, self._context, self._isolate = store, sequences, context, isolate
        self._seed, self._rank, self._world = seed, rank, world
        self._consumed = 0  # windows, of all ranks together
        self._order = _Order(self.windows, seed)
        self._depth = workers * AHEAD
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="batches") if workers else None
        self._coming: deque[Future[Batch]] = deque()

    @property
    def epoch(self) -> float:
        """Passes over the split so far."""
        return self._consumed / self.windows

    def __iter__(self) -> "TrainBatches":
        return self

    def __next__(self) -> Batch:
        step = self._sequences * self._world
        if self._pool is None:
            batch = self._make(self._order.take(self._mine(self._consumed)))
        else:
            while len(self._coming) < self._depth:
                # The order is drawn here, in sequence; a worker only copies.
                mine = self._order.take(self._mine(self._consumed + len(self._coming) * step))
                self._coming.append(self._pool.submit(self._make, mine))
            batch = self._coming[0].result()  # an interrupt while waiting leaves everything as it was
            self._coming.popleft()
        self._consumed += step
        return batch

    def _mine(self, consumed: int) -> range:
        first = consumed + self._rank * self._sequences
        return range(first, first + self._sequences)

    def _make(self, windows: list[int]) -> Batch:
        rows = [self._store.read(window * self._context, (window + 1) * self._context + 1) for window in windows]
        return _batch(np.stack(rows), self._store.eod if self._isolate else None)

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint: how far the batches handed out have come, and what they were drawn from."""
        return {
            "consumed": self._consumed,
            "seed": self._seed,
            "context": self._context,
            "tokens": len(self._store),
            "corpus": self._store.fingerprint,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; the batch size, ranks and workers may be others.

        Raises UserError if it is of another corpus, context or seed: the same number would be another place.
        """
        own = self.state()
        if own.keys() != state.keys():
            raise UserError(f"data: the saved position has the keys {sorted(state)}, not {sorted(own)}; start a new run_dir")
        differ = [f"{_KEYS[key]} {state[key]} (now {own[key]})" for key in _KEYS if state[key] != own[key]]
        if differ:
            raise UserError(f"data: the saved position is of {', '.join(differ)}; put that back or start a new run_dir")
        self._drop()
        self._consumed = int(state["consumed"])

    def close(self) -> None:
        """Stop the workers and wait for them."""
        self._drop()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _drop(self) -> None:
        while self._coming:
            self._coming.pop().cancel()

    def __enter__(self) -> "TrainBatches":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


_KEYS = {"seed": "training.seed", "context": "training.context", "tokens": "a corpus of tokens", "corpus": "corpus"}


def validation_batches(
    store: TokenStore,
    sequences: int,
    context: int,
    limit: int | None = None,
    isolate: bool = False,
    rank: int = 0,
    world: int = 1,
) -> Iterator[Batch]:
    """The same batches every time: all windows in order, or `limit` batches of windows spaced evenly over the split.

    The last batch may have fewer sequences. With `isolate` the tokens behind the last whole window make one more,
    padded with document -1; without, where nothing could mark padding, they are left out. Ranks get equally many
    batches of equal shapes (at most `world` - 1 windows are left out for that).

    Raises UserError, at once, for a split that is too short.
    """
    whole = _windows(store, context)
    rest = isolate and len(store) - whole * context > 1
    count = whole + rest
    if count < world:
        raise UserError(
            f"data: the validation split has {len(store)} tokens, too short for a window of training.context={context} "
            f"on each of {world} ranks; give more text, a larger data.validation_fraction or a smaller training.context"
        )
    chosen = np.arange(count)
    if limit is not None and limit * sequences * world < count:
        chosen = np.linspace(0, count - 1, limit * sequences * world).round().astype(int)
    mine = chosen[: len(chosen) // world * world][rank::world]

    def batches() -> Iterator[Batch]:
        for start in range(0, len(mine), sequences):
            begins = [int(window) * context for window in mine[start : start + sequences]]
            rows = [store.read(begin, min(begin + context + 1, len(store))) for begin in begins]
            yield _batch(_padded(rows, context + 1), store.eod if isolate else None, [len(row) for row in rows])

    return batches()


def _padded(rows: list[npt.NDArray[np.int64]], width: int) -> npt.NDArray[np.int64]:
    return np.stack([np.pad(row, (0, width - len(row))) for row in rows])


def _windows(store: TokenStore, context: int) -> int:
    """Windows overlap by one token: the last target of one is the first input of the next."""
    return max(0, (len(store) - 1) // context)


def _batch(tokens: npt.NDArray[np.int64], eod: int | None, lengths: list[int] | None = None) -> Batch:
    """`eod` given: with the documents, numbered from 0 in each window; an end belongs to the document it ends."""
    documents = None
    if eod is not None:
        ends = np.cumsum(tokens == eod, axis=1, dtype=np.int32)
        numbered = np.concatenate([np.zeros_like(ends[:, :1]), ends[:, :-1]], axis=1)
        for row, length in enumerate(lengths or []):
            numbered[row, length:] = PADDING
        documents = torch.from_numpy(numbered)
    return Batch(torch.from_numpy(tokens), documents)


class _Order:
    """The endless sequence of window numbers. Keeps the epochs in use, no more than two."""

    def __init__(self, windows: int, seed: int) -> None:
        self._windows, self._seed = windows, seed
        self._epochs: dict[int, npt.NDArray[np.int64]] = {}

    def take(self, positions: range) -> list[int]:
        """The window numbers at some positions of the sequence."""
        found = [int(self._epoch(at // self._windows)[at % self._windows]) for at in positions]
        oldest = positions[0] // self._windows
        self._epochs = {epoch: order for epoch, order in self._epochs.items() if epoch >= oldest}
        return found

    def _epoch(self, epoch: int) -> npt.NDArray[np.int64]:
        if epoch not in self._epochs:
            # Sorting raw draws, because numpy keeps those the same from version to version, and its shuffles not.
            draws = np.random.Philox(key=np.array([self._seed, epoch], np.uint64)).random_raw(self._windows)
            self._epochs[epoch] = np.argsort(draws, kind="stable")
        return self._epochs[epoch]
