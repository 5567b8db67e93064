"""The stream of windows: whole, disjoint, the same for any number of workers, and continued from any point."""

import os
import signal
import subprocess
import sys
import textwrap
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3fp8.data import Batch, TokenStore, TrainBatches, validation_batches
from dsv3fp8.errors import UserError

EOD = 99


def numbered(count: int) -> TokenStore:
    """A store whose ids are their own positions, so that a window shows where it is from."""
    return TokenStore(np.arange(100, 100 + count, dtype=np.uint32), EOD)


def starts(batch: Batch, context: int) -> list[int]:
    return [(int(first) - 100) // context for first in batch.tokens[:, 0]]


sizes = st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(30, 200), st.integers(0, 3))


@settings(derandomize=True, deadline=None, max_examples=60)
@given(sizes, st.integers(1, 3), st.integers(0, 40))
def test_each_epoch_has_every_window_once_and_ranks_share_it(size: tuple[int, int, int, int], world: int, seed: int) -> None:
    context, sequences, tokens, _ = size
    store = numbered(tokens)
    windows = (tokens - 1) // context
    ranks = [TrainBatches(store, sequences, context, seed, rank=rank, world=world) for rank in range(world)]
    stream: list[int] = []
    while len(stream) < 3 * windows:
        for rank in ranks:
            batch = next(rank)
            assert batch.tokens.dtype == torch.int64
            assert batch.tokens.shape == (sequences, context + 1)
            assert (batch.tokens.diff() == 1).all(), "a window is a stretch of the packed ids"
            stream += starts(batch, context)
    for epoch in range(3):
        assert sorted(stream[epoch * windows : (epoch + 1) * windows]) == list(range(windows))


def test_d09_d11_two_ranks_with_two_workers_are_disjoint_complete_and_in_step() -> None:
    """5 windows on one rank against 6 on the other in the first epoch: both go on together into the second."""
    store = numbered(11 * 8 + 1)
    taken: list[list[int]] = []
    for rank in range(2):
        with TrainBatches(store, 1, 8, 7, workers=2, rank=rank, world=2) as batches:
            taken.append([starts(batch, 8)[0] for batch in islice(batches, 6)])
    merged = [window for pair in zip(*taken, strict=True) for window in pair]
    assert sorted(merged[:11]) == list(range(11))


def test_epochs_and_seeds_differ_in_their_order() -> None:
    store = numbered(1001)
    first = [starts(batch, 10)[0] for batch in islice(TrainBatches(store, 1, 10, 0), 200)]
    assert first[:100] != first[100:]
    assert first[:100] != list(range(100))
    other = [starts(batch, 10)[0] for batch in islice(TrainBatches(store, 1, 10, 1), 100)]
    assert other != first[:100]
    assert first[:8] == [66, 0, 54, 43, 69, 38, 21, 91], "the order of a seed must never change: runs resume by it"


@settings(derandomize=True, deadline=None, max_examples=40)
@given(sizes, st.integers(0, 25), st.integers(0, 3))
def test_a_stream_goes_on_from_any_saved_point_with_any_number_of_workers(
    size: tuple[int, int, int, int], point: int, others: int
) -> None:
    context, sequences, tokens, workers = size
    store = numbered(tokens)
    with TrainBatches(store, sequences, context, 3) as whole:
        expected = [batch.tokens.tolist() for batch in islice(whole, point + 8)]
    with TrainBatches(store, sequences, context, 3, workers=workers) as before:
        assert [batch.tokens.tolist() for batch in islice(before, point)] == expected[:point]
        state = before.state()
        assert state["consumed"] == point * sequences, "counts what was handed out, not what was prefetched"
    with TrainBatches(store, sequences, context, 3, workers=others) as after:
        next(after)
        after.load_state(state)
        assert [batch.tokens.tolist() for batch in islice(after, 8)] == expected[point:]


def test_a_position_carries_over_to_another_batch_size_and_number_of_ranks() -> None:
    store = numbered(401)
    expected = [starts(batch, 10)[0] for batch in islice(TrainBatches(store, 1, 10, 0), 20)]
    before = TrainBatches(store, 4, 10, 0)
    next(before)
    ranks = [TrainBatches(store, 2, 10, 0, rank=rank, world=2) for rank in range(2)]
    for rank in ranks:
        rank.load_state(before.state())
    assert [window for rank in ranks for window in starts(next(rank), 10)] == expected[4:8]


layouts = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2), st.integers(1, 4))


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(layouts, min_size=2, max_size=5), st.integers(30, 120), st.integers(0, 5))
def test_a_position_re_splits_without_repeating_or_losing_a_window(layout: list[tuple], tokens: int, seed: int) -> None:
    """4 ranks, then 2, then 1, or any others, with batches of any size, even or not: together they are one stream."""
    store, state, stream = numbered(tokens), None, []
    for world, sequences, workers, steps in [(4, 3, 0, 2), (2, 5, 1, 1), (1, 1, 0, 3), *layout]:
        ranks = [TrainBatches(store, sequences, 7, seed, workers=workers, rank=rank, world=world) for rank in range(world)]
        for rank in ranks:
            if state is not None:
                rank.load_state(state)
        for _ in range(steps):
            stream += [window for rank in ranks for window in starts(next(rank), 7)]
        states = [rank.state() for rank in ranks]
        assert all(each == states[0] for each in states), "any rank's position is that of all"
        state = states[0]
        for rank in ranks:
            rank.close()
    expected = [starts(batch, 7)[0] for batch in islice(TrainBatches(store, 1, 7, seed), len(stream))]
    assert stream == expected


def test_a_position_is_plain_values() -> None:
    state = TrainBatches(numbered(50), 1, 4, 0).state()
    assert all(type(value) in (int, str) for value in state.values())


def test_a_position_of_another_stream_is_refused_by_key() -> None:
    state = TrainBatches(numbered(50), 1, 4, 0).state()
    for batches, complaint in (
        (TrainBatches(numbered(50), 1, 4, 1), "training.seed 0 (now 1)"),
        (TrainBatches(numbered(50), 1, 5, 0), "training.context 4 (now 5)"),
        (TrainBatches(numbered(51), 1, 4, 0), "a corpus of tokens 50 (now 51)"),
        (TrainBatches(TokenStore(np.arange(50, dtype=np.uint32), EOD), 1, 4, 0), "corpus "),
    ):
        with pytest.raises(UserError) as caught:
            batches.load_state(state)
        assert complaint in str(caught.value)
    with pytest.raises(UserError, match="has the keys"):
        TrainBatches(numbered(50), 1, 4, 0).load_state({"consumed": 3})


def test_ids_above_65535_pass_through_whole() -> None:
    """D01"""
    store = TokenStore(np.array([65536, 100015, 129279], np.uint32), EOD)
    assert next(TrainBatches(store, 1, 2, 0)).tokens.tolist() == [[65536, 100015, 129279]]


@pytest.mark.parametrize(("tokens", "enough"), [(0, False), (1, False), (32, False), (33, True), (34, True)])
def test_a_split_shorter_than_one_window_is_refused_at_once(tokens: int, enough: bool) -> None:
    for make in (lambda store: TrainBatches(store, 1, 32, 0), lambda store: validation_batches(store, 1, 32)):
        if enough:
            make(numbered(tokens))
        else:
            with pytest.raises(UserError, match=f"has {tokens} tokens"):
                make(numbered(tokens))


@settings(derandomize=True, deadline=None, max_examples=60)
@given(sizes, st.integers(1, 3))
def test_validation_has_every_window_once_in_the_same_order_every_time(size: tuple[int, int, int, int], world: int) -> None:
    context, sequences, tokens, _ = size
    store, windows = numbered(tokens), (tokens - 1) // context
    if windows < world:
        return
    runs = [
        [
            [starts(batch, context) for batch in validation_batches(store, sequences, context, rank=rank, world=world)]
            for rank in range(world)
        ]
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    shapes = [[len(batch) for batch in rank] for rank in runs[0]]
    assert all(shape == shapes[0] for shape in shapes), "D11: all ranks stop at the same batch"
    seen = sorted(window for rank in runs[0] for batch in rank for window in batch)
    assert seen == list(range(windows // world * world))


def test_a_limited_validation_is_spread_over_the_whole_split() -> None:
    batches = list(validation_batches(numbered(1001), 2, 10, limit=3))
    assert [starts(batch, 10) for batch in batches] == [[0, 20], [40, 59], [79, 99]]
    assert len(list(validation_batches(numbered(1001), 2, 10, limit=1000))) == 50


def documents_by_hand(tokens: list[int], window: int, context: int) -> list[int]:
    """What each position of a window belongs to, walking the ids one by one."""
    found, document = [], 0
    for token in tokens[window * context : (window + 1) * context + 1]:
        found.append(document)
        document += token == EOD
    return found


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.sampled_from([1, 2, EOD]), min_size=6, max_size=60), st.integers(1, 5))
def test_isolated_documents_are_numbered_and_the_rest_is_padding(tokens: list[int], context: int) -> None:
    store = TokenStore(np.array(tokens, np.uint32), EOD)
    rows = 0
    for batch in validation_batches(store, 2, context, isolate=True):
        assert batch.documents is not None
        assert batch.documents.dtype == torch.int32
        for ids, documents in zip(batch.tokens.tolist(), batch.documents.tolist(), strict=True):
            expected = documents_by_hand(tokens, rows, context)
            assert documents == expected + [-1] * (context + 1 - len(expected))
            assert ids[: len(expected)] == tokens[rows * context : (rows + 1) * context + 1]
            rows += 1
    assert rows == -(-(len(tokens) - 1) // context), "every target is in one window"


def test_m03_a07_an_end_belongs_to_its_document_and_the_next_token_to_the_next() -> None:
    """Documents of 5, 4 and 3 tokens, ends included, and padding: targets across a change of number are not scored."""
    store = TokenStore(np.array([1, 2, 3, 4, EOD, 5, 6, 7, EOD, 8, 9, EOD], np.uint32), EOD)
    (batch,) = validation_batches(store, 1, 14, isolate=True)
    assert batch.documents is not None
    assert batch.documents.tolist() == [[0] * 5 + [1] * 4 + [2] * 3 + [-1] * 3]


def test_documents_are_given_only_when_they_are_isolated() -> None:
    assert next(TrainBatches(numbered(50), 2, 4, 0)).documents is None
    assert next(TrainBatches(numbered(50), 2, 4, 0, isolate=True)).documents.tolist() == [[0] * 5] * 2  # type: ignore[union-attr]


def test_training_windows_are_never_padded() -> None:
    store = TokenStore(np.full(23, EOD, np.uint32), EOD)
    for batch in islice(TrainBatches(store, 3, 5, 0, isolate=True), 10):
        assert batch.documents is not None
        assert (batch.documents >= 0).all()


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGTERM, -15), (None, 0)])
def test_k08_workers_end_with_the_process_however_it_ends(sent: signal.Signals | None, code: object) -> None:
    program = textwrap.dedent("""
        import signal, sys, time
        import numpy as np
        from dsv3fp8.data import TokenStore, TrainBatches
        # A shell's background jobs start with SIGINT ignored, and so would this process.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        batches = TrainBatches(TokenStore(np.arange(1000, dtype=np.uint32), 0), 2, 8, 0, workers=3)
        next(batches)
        print("ready", flush=True)
        while "wait" in sys.argv:
            next(batches)
            time.sleep(0.01)
    """)
    run = subprocess.Popen(
        [sys.executable, "-c", program, "wait" if sent else "go"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert run.stdout is not None
    assert run.stdout.readline() == "ready\n"
    if sent:
        run.send_signal(sent)
    _, errors = run.communicate(timeout=20)
    if code == "KeyboardInterrupt":
        assert errors.rstrip().endswith("KeyboardInterrupt")
    else:
        assert run.returncode == code
        assert errors == ""


def test_an_error_in_a_worker_reaches_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    with TrainBatches(numbered(100), 1, 4, 0, workers=2) as batches:
        monkeypatch.setattr(TokenStore, "read", lambda self, start, stop: (_ for _ in ()).throw(OSError("disk gone")))
        with pytest.raises(OSError, match="disk gone"):
            next(batches)
