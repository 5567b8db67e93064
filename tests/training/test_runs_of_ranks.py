"""Runs of two ranks: signals, what is wrong, full disks, two launches at once. What must come out the same on both does."""

import functools
import json
import os
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import Command

from dsv3fp8.data.batches import TrainBatches
from dsv3fp8.training import loop, setup
from dsv3fp8.training.checkpoint_directory import list_checkpoints
from dsv3fp8.training.checkpoint_file import read_header

Launch = Callable[..., Command]


@pytest.fixture
def launch(data_words: list[str], tmp_path: Path) -> Iterator[Launch]:
    """launch("key=value", …, other=["key=value", …]): a run of two ranks, rank 1 with other settings on top."""
    started: list[Command] = []

    def start(*words: str, other: tuple[str, ...] = (), first: Callable[[int], None] | None = None) -> Command:
        common = ["train", *data_words, "parallel.dp_replicate=2", f"run_dir={tmp_path}/run", *words]
        started.append(Command([common, [*common, *other]], tmp_path / f"said-{len(started)}", first))
        return started[-1]

    yield start
    for each in started:
        each.end()


def saved(tmp_path: Path) -> list[int]:
    return [step for step, _ in list_checkpoints(tmp_path / "run" / "checkpoints")]


def lines(tmp_path: Path) -> int:
    return (tmp_path / "run" / "metrics.jsonl").read_bytes().count(b"\n")


def terminate_at(moment: str, index: int) -> None:
    """Rank 1 gets SIGTERM in the third step, while the run does what `moment` says."""
    if index == 0:
        return
    owner, name = {"step": (loop, "train_step"), "validation": (loop, "validate"), "save": (loop.Loop, "_save")}.get(
        moment, (TrainBatches, "__next__")
    )
    real, calls = getattr(owner, name), []

    def interrupted(*given: Any, **named: Any) -> Any:
        calls.append(moment)
        if len(calls) == (1 if moment in ("validation", "save") else 3):
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*given, **named)

    setattr(owner, name, interrupted)


@pytest.mark.parametrize("moment", ["step", "validation", "save", "data"])
def test_a_signal_to_one_rank_stops_all_after_the_same_step(launch: Launch, tmp_path: Path, moment: str) -> None:
    """K08: with workers at work, and 143 on all of them."""
    words = ["training.validate_every=3", f"training.checkpoint_every={3 if moment == 'save' else 0}", "data.workers=2"]
    run = launch("recipe=bf16", "training.steps=1000", *words, first=functools.partial(terminate_at, moment))
    assert run.wait() == [143, 143]
    assert not run.said()
    assert saved(tmp_path) == [3]
    assert lines(tmp_path) == 3
    assert "SIGTERM: saved after step 3; run again to go on from there" in run.output(0)


def test_a_second_signal_to_a_rank_ends_it_at_once_and_the_others_soon(launch: Launch, tmp_path: Path) -> None:
    """K08: in the middle of a step that takes a minute."""
    run = launch("recipe=bf16", "training.steps=1000", first=slow_third_step)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not metrics.exists() or lines(tmp_path) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.2)
    run.signal(1, signal.SIGTERM)
    time.sleep(0.2)
    assert run.processes[1].is_alive()
    run.signal(1, signal.SIGTERM)
    assert run.wait(30) == [1, -signal.SIGTERM]
    (line,) = run.said()
    assert re.match(r"dsv3fp8: error: rank 1 \(process \d+ on .*\) has stopped", line)
    assert not saved(tmp_path)


def slow_third_step(index: int) -> None:
    real = loop.Loop._step

    def step(self: loop.Loop) -> dict[str, Any]:
        if self.state.step == 2 and index == 1:
            time.sleep(60)
        return real(self)

    loop.Loop._step = step  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["parallel.dp_replicate=3"], "make 3 ranks, not 2: set parallel.dp_replicate=2"),
        (["run_dir=/proc/nowhere"], "run_dir=/proc/nowhere cannot be written"),
        (["training.context=2000"], "training.context=2000 is longer than model.context"),
    ],
    ids=["layout", "one rank alone finds it", "every rank finds it"],
)
def test_what_is_wrong_is_one_line(launch: Launch, words: list[str], line: str) -> None:
    """H11."""
    run = launch(*words)
    assert set(run.wait(60)) <= {1, 2}
    (said,) = run.said()
    assert line in said


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["optimizer.lr=0.01", "training.seed=3"],
            "optimizer.lr 0.01 instead of 0.002, training.seed 3 instead of 0 as rank 0: give",
        ),
        (["parallel.expert=2"], "parallel.expert 2 instead of 1 as rank 0: start all ranks alike"),
    ],
    ids=["settings", "layout"],
)
def test_ranks_that_were_told_other_things_do_not_train_together(launch: Launch, words: list[str], line: str) -> None:
    run = launch(other=tuple(words))
    assert run.wait(60) == [1, 2]
    (said,) = run.said()
    assert said.startswith("dsv3fp8: error: rank 1 on ")
    assert line in said


def test_nodes_whose_files_differ_do_not_train_together(launch: Launch, tmp_path: Path) -> None:
    """The same words on both ranks, which find other things there."""
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        for file in range(8):
            text = "".join(f"line {line} of file {file} on {rank}\n" for line in range(400))
            (tmp_path / str(rank) / f"{file}.txt").write_text(text)
    run = launch("data.paths=[/proc/self/cwd/*.txt]", first=functools.partial(enter, tmp_path))
    assert run.wait(60) == [1, 2]
    (said,) = run.said()
    assert re.search(r"rank 1 on .* has a corpus of hash \w+ instead of \w+ as rank 0: let the data keys name", said)


def enter(folder: Path, index: int) -> None:
    """Each rank on a disk of its own."""
    os.chdir(folder / str(index))


def test_a_second_launch_into_the_same_directory_is_told_who_is_there(launch: Launch, tmp_path: Path) -> None:
    """H08: the first one goes on undisturbed, and rank 0 alone has written."""
    first = launch("recipe=bf16", "training.steps=1000", "training.checkpoint_every=0")
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "metrics.jsonl").exists() or lines(tmp_path) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    second = launch("recipe=bf16", "training.steps=1000")
    assert second.wait(60) == [2, 1]
    (said,) = second.said()
    holder = first.processes[0].pid
    assert re.search(rf"run_dir={tmp_path}/run is in use by process {holder} on .*: wait for it to end or choose another", said)
    before = lines(tmp_path)
    while lines(tmp_path) < before + 2:
        assert first.processes[0].is_alive()
        time.sleep(0.01)
    first.signal(1, signal.SIGTERM)
    assert first.wait(60) == [143, 143]
    assert saved(tmp_path) == [lines(tmp_path)]


def fill_the_disk(culprit: int, index: int) -> None:
    """After the first checkpoint a rank may write small files alone."""
    real = loop.Loop._save

    def save(self: loop.Loop) -> None:
        real(self)
        self.run.saver.wait()
        if index == culprit:
            resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))

    loop.Loop._save = save  # type: ignore[method-assign]


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_full_disk_of_one_rank_ends_all_and_leaves_the_last_checkpoint(launch: Launch, tmp_path: Path, culprit: int) -> None:
    """K10: the limit stands for a disk; half a checkpoint is not left either."""
    run = launch("training.steps=1000", "training.checkpoint_every=3", first=functools.partial(fill_the_disk, culprit))
    assert set(run.wait(60)) <= {1, 2}
    (said,) = run.said()
    assert f"cannot write checkpoint step-00000006/0000{culprit}.safetensors in " in said
    assert "; the checkpoint of step 3 is kept" in said
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000003"]


def damage_an_expert_of(file: Path) -> None:
    """One bit of a part that the other rank does not read."""
    entries, metadata = read_header(file)
    begins = json.loads(metadata["DCP_SHARDING_INFO"])
    name = next(name for name, each in begins.items() if any(each["saved_offsets"]))
    data = bytearray(file.read_bytes())
    data[entries[name].begin] ^= 1
    file.write_bytes(bytes(data))


def restore_late(index: int) -> None:
    """Rank 1 reads when the first could have gone on long since."""
    real = setup.restore

    def restore(*given: Any, **named: Any) -> None:
        time.sleep(index)
        real(*given, **named)

    setup.restore = restore


def test_damage_that_one_rank_finds_leaves_the_run_as_it_was(launch: Launch, tmp_path: Path) -> None:
    """K07: what the other reads is sound."""
    layout = "parallel.expert=2"
    assert launch("training.steps=2", layout).wait(60) == [0, 0]
    damage_an_expert_of(tmp_path / "run" / "checkpoints" / "step-00000002" / "00001.safetensors")
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and path.name != "lock"]
    before = {path: path.read_bytes() for path in files}
    run = launch("training.steps=4", layout, "resume=fork", first=restore_late)
    assert set(run.wait(60)) <= {1, 2}
    (said,) = run.said()
    assert "00001.safetensors is damaged" in said
    assert "going on after step" not in run.output(0)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and path.name != "lock"]
    assert {path: path.read_bytes() for path in files} == before


def test_ranks_whose_windows_do_not_come_out_even_go_on_together(launch: Launch, tmp_path: Path) -> None:
    """D11: 3 windows a rank and step, of a text that has no multiple of 6; through its end more than once, validation too."""
    (tmp_path / "text").mkdir()
    for file in range(8):
        (tmp_path / "text" / f"{file}.txt").write_text("".join(f"{line} {file}\n" for line in range(24 + file)))
    words = ["training.batch=3", "training.steps=24", "training.validation_batches=100", "data.workers=2"]
    run = launch(f"data.paths=[{tmp_path}/text/*.txt]", *words)
    assert run.wait(60) == [0, 0]
    assert not run.said()
    tokens = int(re.search(r"files: ([\d,]+) train tokens", run.output(0))[1].replace(",", ""))  # type: ignore[index]
    assert 2 * tokens < 6 * 24 * 32
    assert (tokens - 1) // 32 % 6
    assert lines(tmp_path) == 24
