"""What counting pairs of tokens can do: the baseline that says whether a model has learnt anything beyond them.

Interpolated absolute discounting: every pair seen gives up a part d of one count, and what a token's pairs give up
goes to the tokens in proportion to their own frequency,

    p(y|x) = max(c(x,y) - d, 0) / c(x) + d · n(x) / c(x) · u(y),      u(y) = (c(y) + 1) / (N + V)

with n(x) the number of different tokens seen after x and d = n₁ / (n₁ + 2n₂) from the pairs seen once and twice
(Ney, Essen and Kneser 1994). Each p(·|x) sums to one and none is zero, so the loss is finite whatever turns up.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dsv3fp8.data.store import TokenStore

Counts = npt.NDArray[np.int64]

# Corpora beyond so many tokens are sampled, in evenly spaced blocks: more pairs no longer move the loss.
FIT_TOKENS = 1 << 25
SCORE_TOKENS = 1 << 23
_BLOCK = 1 << 20
_DENSE = 1 << 22  # a table of all pairs is counted directly up to so many


@dataclass(frozen=True)
class BigramBaseline:
    """The loss of the fitted model on the validation split."""

    loss: float  # nats a token
    bits_per_byte: float | None  # None where the text is not known


class Bigram:
    """Smoothed probabilities of the next token given this one. Memory grows with the pairs seen, not with V²."""

    def __init__(self, store: TokenStore, vocab_size: int, isolate: bool = False) -> None:
        """Count the pairs of `store`; with `isolate` none that crosses the end of a document."""
        self._vocab_size, self._eod = vocab_size, store.eod if isolate else None
        self._pairs, self._counts = self._count(store)
        first, second = np.divmod(self._pairs, vocab_size)
        self._total = np.bincount(first, self._counts, vocab_size)
        self._different = np.bincount(first, minlength=vocab_size)
        own = np.bincount(second, self._counts, vocab_size)
        self._unigram = (own + 1) / (own.sum() + vocab_size)
        once, twice = (int((self._counts == times).sum()) for times in (1, 2))
        # Within (0, 1) whatever the corpus: at 0 an unseen pair would cost infinitely much.
        self.discount = float(np.clip(once / (once + 2 * twice) if once else 0.5, 0.1, 0.9))

    def _count(self, store: TokenStore) -> tuple[Counts, Counts]:
        """Codes x·V + y of the pairs seen, ascending, and how often."""
        size = self._vocab_size
        if size * size <= _DENSE:
            table = np.zeros(size * size, np.int64)
            for first, second in self.pairs(store, FIT_TOKENS):
                table += np.bincount(first * size + second, minlength=size * size)
            seen = np.flatnonzero(table)
            return seen, table[seen]
        codes, filled = np.empty(min(len(store), FIT_TOKENS), np.int64), 0
        for first, second in self.pairs(store, FIT_TOKENS):
            codes[filled : filled + len(first)] = first * size + second
            filled += len(first)
        codes = codes[:filled]
        codes.sort()
        starts = np.flatnonzero(np.concatenate([[True], codes[1:] != codes[:-1]])[:filled])
        return codes[starts], np.diff(starts, append=filled)

    def pairs(self, store: TokenStore, most: int) -> Iterator[tuple[Counts, Counts]]:
        """(token, next token) in blocks; about `most` of them."""
        blocks = max(1, -(-(len(store) - 1) // _BLOCK))
        taken = range(blocks) if blocks * _BLOCK <= most else np.linspace(0, blocks - 1, most // _BLOCK).astype(int)
        for block in taken:
            ids = store.read(int(block) * _BLOCK, min((int(block) + 1) * _BLOCK + 1, len(store)))
            inside = ids[:-1] != self._eod if self._eod is not None else slice(None)
            yield ids[:-1][inside], ids[1:][inside]

    def probability(self, first: Counts, second: Counts) -> npt.NDArray[np.float64]:
        """p(second | first), element by element."""
        codes = first * self._vocab_size + second
        at = np.minimum(np.searchsorted(self._pairs, codes), max(len(self._pairs) - 1, 0))
        known = self._pairs[at] == codes if len(self._pairs) else np.zeros(len(codes), bool)
        count = np.where(known, self._counts[at] if len(self._pairs) else 0, 0)
        total = self._total[first]
        spread = self._unigram[second]
        kept = np.maximum(count - self.discount, 0)
        seen = (kept + self.discount * self._different[first] * spread) / np.maximum(total, 1)
        return np.where(total > 0, seen, spread)


def fit_bigram(train: TokenStore, validation: TokenStore, vocab_size: int, isolate: bool = False) -> BigramBaseline:
    """Fit on one split, score the other: every target of it, as the model's own validation does."""
    model = Bigram(train, vocab_size, isolate)
    total, targets = 0.0, 0
    for first, second in model.pairs(validation, SCORE_TOKENS):
        total -= float(np.log(model.probability(first, second)).sum())
        targets += len(first)
    loss = total / max(targets, 1)
    return BigramBaseline(loss, validation.bits_per_byte(loss))
