"""A run that goes on with fewer ranks."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsv3fp8.errors import UserError
from dsv3fp8.training.loop import train

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4", "--standalone"]


def test_four_ranks_then_one_train_the_curve_of_one(nano: Any, data_words: list[str], tmp_path: Path, curve: Any) -> None:
    """K13: with experts dealt out to two; the same sequences in every step, none twice, none left out."""
    words = ["recipe=fp32", "schedule=constant", "training.checkpoint_every=0"]
    whole = nano(*words, "training.batch=4", run="whole")
    assert train(whole) == 0

    four = [*data_words, *words, "training.batch=1", "parallel.dp_replicate=4", "parallel.expert=2", "training.steps=5"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*TORCHRUN, "-m", "dsv3fp8", "train", *four, f"run_dir={tmp_path}/cut"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr

    one = [*words, "training.batch=4"]
    with pytest.raises(UserError, match=r"holds step 5 of a run with other settings \(.*parallel\.dp_replicate 4 → 1"):
        train(nano(*one, run="cut"))
    assert train(nano(*one, "resume=fork", run="cut")) == 0
    found, expected = curve(f"{tmp_path}/cut"), curve(whole.run_dir)
    assert [record["step"] for record in found] == list(range(1, 11))
    for a, b in zip(found, expected, strict=True):
        for name in ("loss", "mtp_loss_1", "balance_loss", "grad_norm", "tokens", "lr", "expert_load_max"):
            assert a[name] == pytest.approx(b[name], rel=1e-4), name
    # Before, the four read other windows of the validation split than one does.
    assert found[-1]["validation_loss"] == pytest.approx(expected[-1]["validation_loss"], rel=1e-4)
