"""Whole runs on several ranks, as torchrun starts them and starts them again."""

import random
from pathlib import Path
from typing import Any

import pytest
from kill_ranks import TorchRun, kill_at_random
from processes import Command

from dsv3fp8.training.loop import train


def close(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert a.keys() == b.keys()
        assert [each for each in a.values() if each is not None] == pytest.approx(
            [each for each in b.values() if each is not None], rel=1e-4
        )


@pytest.mark.parametrize("layout", [["parallel.dp_replicate=2"], ["parallel.dp_shard=2", "parallel.expert=2"]])
def test_two_ranks_train_the_curve_of_one(
    nano: Any, data_words: list[str], tmp_path: Path, curve: Any, layout: list[str]
) -> None:
    """The same sequences in every step: half of them on each rank."""
    words = ["recipe=fp32", "data.isolate_documents=true", "training.accumulate=2"]
    one = nano(*words, "training.batch=4", "training.validation_batches=1", run="one")
    assert train(one) == 0
    two = [*data_words, *words, *layout, "training.validation_batches=1", f"run_dir={tmp_path}/two"]
    run = TorchRun(two)
    output, errors = run.finish()
    assert run.process.returncode == 0, errors
    assert not errors
    assert output.count("data: ") == 1  # rank 0 alone speaks
    assert ", 2 processes" in output
    assert "10 steps of 2 × 2 × 2 sequences" in output
    close(curve(tmp_path / "two"), curve(one.run_dir))


def test_what_is_for_the_user_to_put_right_is_said_once_over_all_starts(data_words: list[str], tmp_path: Path) -> None:
    run = TorchRun([*data_words, "optimizer.learning=1", f"run_dir={tmp_path}/run"], "--max-restarts=2")
    _, errors = run.finish()
    assert run.process.returncode == 1  # torchrun's, whatever the ranks ended with
    (line,) = errors
    assert "optimizer.learning: no such key" in line


def test_kill_9_at_random_moments_leaves_the_curve_of_an_undisturbed_run(
    data_words: list[str], tmp_path: Path, curve: Any
) -> None:
    """torchrun starts all again, and they go on from the newest checkpoint: every number is that of the run nobody killed.

    One kill in the start, one between any two instructions of a step, one in the middle of a checkpoint.
    """
    words = ["recipe=dsv3", "parallel.dp_replicate=2", "parallel.expert=2", "training.steps=60", "training.checkpoint_every=4"]
    whole = Command([["train", *data_words, *words, f"run_dir={tmp_path}/whole"]] * 2, tmp_path / "said")
    assert whole.wait() == [0, 0]
    moments = ["start", "steps", "checkpoint"]
    run = TorchRun([*data_words, *words, f"run_dir={tmp_path}/killed"], f"--max-restarts={len(moments)}")
    killed = kill_at_random(run, 2, moments, random.Random(3))
    _, errors = run.finish()
    assert run.process.returncode == 0, (killed, errors)
    assert "after 60 lines" not in killed[-1], "the last kill came too late to show anything"
    assert all("so the others stop too; start again to go on from the checkpoint" in line for line in errors)
    assert len(errors) in (2, 3)  # who is killed before the first step has nobody to speak for it but torchrun
    assert curve(tmp_path / "killed") == curve(tmp_path / "whole")
