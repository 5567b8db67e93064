"""Counters, generators and the refusal to save what is not finite."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dsv3fp8.errors import UserError
from dsv3fp8.training.checkpoint import save_checkpoint
from dsv3fp8.training.config import OptimizerConfig
from dsv3fp8.training.optimizer import AdamW
from dsv3fp8.training.state import (
    TrainingState,
    checkpoint_bytes,
    checkpoint_files,
    load_state,
    restore,
    restore_random_states,
)


def model_and_optimizer(moments: str = "bf16") -> tuple[nn.Module, AdamW]:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    config = OptimizerConfig(lr=1e-2, weight_decay=0.1, moments=moments)
    return model, AdamW({"decay": list(model.named_parameters()), "no_decay": []}, config)


def test_a_state_comes_back_from_plain_containers(tmp_path: Path) -> None:
    """K07, O02, W03: weights-only loading reads everything, moments and W&B's id too."""
    model, optimizer = model_and_optimizer()
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step(1e-2)
    state = TrainingState(step=7, skipped=2, skipped_in_a_row=1, tokens=99, data={"epoch": 1}, wandb_id="abc")
    files = checkpoint_files(state, model, optimizer, {"training": {"steps": 9}})
    target = save_checkpoint(tmp_path, 7, files, keep=1)
    loaded, config, _ = load_state(target)
    assert loaded == state
    assert loaded.updates == 5
    assert config == {"training": {"steps": 9}}
    other, other_optimizer = model_and_optimizer()
    restore(target, other, other_optimizer)
    assert torch.equal(other.weight, model.weight)
    assert other_optimizer.steps == 1
    for name, moment in optimizer.second.items():
        assert torch.equal(other_optimizer.second[name], moment)
        assert moment.dtype is torch.bfloat16


def test_every_generator_continues_its_own_stream(tmp_path: Path) -> None:
    """K06: numpy's state, which weights-only loading refuses as it is, comes back as well."""
    model, optimizer = model_and_optimizer()

    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    draw()
    target = save_checkpoint(tmp_path, 1, checkpoint_files(TrainingState(), model, optimizer, {}), keep=1)
    expected = draw()
    assert draw() != expected
    restore_random_states(load_state(target)[2])
    assert draw() == expected


@pytest.mark.parametrize("where", ["weight", "moment"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_state_that_is_not_finite_is_never_saved(where: str, bad: float) -> None:
    """O07."""
    model, optimizer = model_and_optimizer()
    with torch.no_grad():
        (model.weight if where == "weight" else optimizer.second["weight"])[1, 2] = bad
    with pytest.raises(UserError, match="weight is not finite after step 3"):
        checkpoint_files(TrainingState(step=3), model, optimizer, {})


def test_the_size_of_a_checkpoint_is_known_beforehand(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(500, 400)
    for moments in ("bf16", "fp32"):
        config = OptimizerConfig(lr=1e-2, weight_decay=0.1, moments=moments)
        optimizer = AdamW({"decay": list(model.named_parameters()), "no_decay": []}, config)
        files = checkpoint_files(TrainingState(), model, optimizer, {})
        target = save_checkpoint(tmp_path / moments, 1, files, keep=1)
        size = sum(path.stat().st_size for path in target.iterdir())
        assert 0 < size - checkpoint_bytes(model, optimizer) < 40_000
