"""The baseline against a count by hand."""

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3fp8.data import TokenStore, bigram
from dsv3fp8.data.bigram import Bigram, fit_bigram


def store(ids: list[int], **facts: int) -> TokenStore:
    return TokenStore(np.array(ids, np.uint32), 0, **facts)


def by_hand(train: list[int], held_out: list[int], vocab: int, isolate: bool) -> float:
    """Mean negative log-likelihood, one pair at a time with dictionaries."""
    pairs = [(x, y) for x, y in pairwise(train) if not (isolate and x == 0)]
    counts, firsts, seconds = Counter(pairs), Counter(x for x, _ in pairs), Counter(y for _, y in pairs)
    once, twice = (sum(1 for count in counts.values() if count == n) for n in (1, 2))
    discount = min(max(once / (once + 2 * twice) if once else 0.5, 0.1), 0.9)

    def probability(x: int, y: int) -> float:
        unigram = (seconds[y] + 1) / (len(pairs) + vocab)
        if not firsts[x]:
            return unigram
        different = sum(1 for first, _ in counts if first == x)
        return (max(counts[x, y] - discount, 0) + discount * different * unigram) / firsts[x]

    scored = [(x, y) for x, y in pairwise(held_out) if not (isolate and x == 0)]
    return -sum(math.log(probability(x, y)) for x, y in scored) / max(len(scored), 1)


ids = st.lists(st.integers(0, 5), max_size=60)


@pytest.mark.parametrize("dense", [True, False])
@settings(derandomize=True, deadline=None, max_examples=80)
@given(train=ids, held_out=ids, isolate=st.booleans())
def test_the_loss_is_that_of_counting_by_hand(train: list[int], held_out: list[int], isolate: bool, dense: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bigram, "_DENSE", bigram._DENSE if dense else 0)
        patch.setattr(bigram, "_BLOCK", 7)
        loss = fit_bigram(store(train), store(held_out), 6, isolate).loss
    assert loss == pytest.approx(by_hand(train, held_out, 6, isolate), rel=1e-12)


@settings(derandomize=True, deadline=None)
@given(ids)
def test_probabilities_sum_to_one_and_none_is_zero(train: list[int]) -> None:
    model = Bigram(store(train), 6)
    first, second = np.divmod(np.arange(36), 6)
    table = model.probability(first, second).reshape(6, 6)
    assert (table > 0).all()
    np.testing.assert_allclose(table.sum(1), 1)


def test_bits_per_byte_count_every_token_over_the_bytes_of_the_text() -> None:
    held_out = store([1, 2, 1, 0] * 10, bytes=60)
    baseline = fit_bigram(store([1, 2, 1, 0] * 50), held_out, 3)
    assert baseline.bits_per_byte == pytest.approx(baseline.loss / math.log(2) * 40 / 60)
    assert fit_bigram(store([1, 2]), store([1, 2]), 3).bits_per_byte is None


def test_a_vocabulary_of_129280_needs_no_table_of_pairs() -> None:
    import tracemalloc

    random = np.random.default_rng(0)
    train = TokenStore(random.integers(0, 129280, 200_000).astype(np.uint32), 0)
    held_out = TokenStore(random.integers(0, 129280, 20_000).astype(np.uint32), 0)
    tracemalloc.start()
    loss = fit_bigram(train, held_out, 129280).loss
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert math.isfinite(loss)
    assert abs(loss - math.log(129280)) < 1, "nothing to learn in noise, and nothing lost by trying"
    assert peak < 50 << 20


def test_a_corpus_too_large_to_count_is_sampled_evenly() -> None:
    """The first and last block are among those taken, and the loss stays that of the source."""
    random = np.random.default_rng(0)
    chain = TokenStore(random.integers(0, 4, 50_000).astype(np.uint32), 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bigram, "_BLOCK", 100)
        blocks = list(Bigram(chain, 4).pairs(chain, 1000))
        patch.setattr(bigram, "FIT_TOKENS", 1000)
        patch.setattr(bigram, "SCORE_TOKENS", 1000)
        loss = fit_bigram(chain, chain, 4).loss
    assert len(blocks) == 10
    assert blocks[0][0].tolist() == chain.read(0, 100).tolist()
    assert blocks[-1][0].tolist() == chain.read(49_900, 50_000)[:-1].tolist()
    assert loss == pytest.approx(math.log(4), abs=0.05)
