"""Where the exchange puts copies, and what travels, in plain numpy: the oracle of its plans, reference and kernels."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

TILE = 128


def place(ids: np.ndarray, experts: int, real: np.ndarray | None) -> tuple[np.ndarray, list[int]]:
    """(the copy, token * K + choice, in each row or -1; rows of each expert) of expert ids [T, K]."""
    rows: list[int] = []
    counts = []
    for expert in range(experts):
        mine = [t * ids.shape[1] + k for t, k in np.argwhere(ids == expert) if real is None or real[t]]
        rows += mine + [-1] * (-len(mine) % TILE)
        counts.append(len(mine))
    return np.array(rows, dtype=np.int64), counts


def slots(copy: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """The row of each copy, [T, K]; -1 for copies that have none."""
    slot = np.full(shape[0] * shape[1], -1)
    for row, held in enumerate(copy):
        if held >= 0:
            slot[held] = row
    return slot.reshape(shape)


def departing(made: Any) -> Any:
    """A layout without its inert rows: as copies leave for the experts of other ranks."""
    live = made.copy >= 0
    row = live.cumsum(0) - 1  # of each live row among the live ones
    slot = row[made.slot.clamp(min=0).long()].where(made.slot >= 0, -1) if len(row) else made.slot
    return made._replace(copy=made.copy[live], slot=slot.int())


def gathered(x: np.ndarray, index: np.ndarray, fill: float) -> np.ndarray:
    """x [N, ...] at each index, `fill` where it is -1."""
    return np.stack([x[i] if i >= 0 else np.full_like(x[0], fill) for i in index]) if len(index) else x[:0]


def summed(rows: np.ndarray, slot: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    """fp32 sums of each token's rows [rows, D] in order of choice."""
    out = np.zeros((len(slot), rows.shape[1]), np.float32)
    for t, of_token in enumerate(slot):
        for k, row in enumerate(of_token):
            if row >= 0:
                out[t] += rows[row] * (np.float32(1) if weights is None else weights[t, k])
    return out


@st.composite
def routings(draw: Any, most: int = 300) -> tuple[np.ndarray, int, np.ndarray | None]:
    """(ids int64 [T, K], experts, real bool [T] or None), sizes at every border, loads from level to one expert for all."""
    experts = draw(st.sampled_from([1, 2, 5, 8, 33]))
    top_k = min(experts, draw(st.sampled_from([1, 2, 3, 8])))
    tokens = draw(st.sampled_from([n for n in (0, 1, 16, 17, 127, 128, 129, 300) if n <= most]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    liked = draw(st.sampled_from([0.0, 1.0, 100.0])) * generator.random(experts)
    order = np.argsort(-(generator.random((tokens, experts)) + liked), axis=1)
    real = draw(st.sampled_from([None, 0.0, 0.7]))
    mask = None if real is None else generator.random(tokens) < real
    return np.ascontiguousarray(order[:, :top_k]), experts, mask
