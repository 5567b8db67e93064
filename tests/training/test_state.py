"""Counters, generators, and that a model takes over a checkpoint of its own and no other."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import save_checkpoint, save_tensors
from torch import nn

from dsv3fp8.errors import UserError
from dsv3fp8.training.checkpoint import Checkpoint
from dsv3fp8.training.config import OptimizerConfig
from dsv3fp8.training.optimizer import AdamW
from dsv3fp8.training.state import (
    TrainingState,
    canonical_name,
    checkpoint_bytes,
    load_state,
    load_weights,
    model_tensors,
    restore,
    restore_random_states,
)

CPU = torch.device("cpu")


def model_and_optimizer(moments: str = "bf16") -> tuple[nn.Module, AdamW]:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    config = OptimizerConfig(lr=1e-2, weight_decay=0.1, moments=moments)
    return model, AdamW({"decay": list(model.named_parameters()), "no_decay": []}, config)


def test_a_state_comes_back_from_plain_containers(tmp_path: Path) -> None:
    """K07, O02, W03: moments and W&B's id too."""
    model, optimizer = model_and_optimizer()
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step(1e-2)
    state = TrainingState(step=7, skipped=2, skipped_in_a_row=1, tokens=99, seconds=0.1, data={"epoch": 1}, wandb_id="abc")
    settings = {"training": {"steps": 9, "clip": 1e-30, "x": None}}
    checkpoint = Checkpoint(save_checkpoint(tmp_path, state, model, optimizer, settings))
    loaded, config = load_state(checkpoint)
    assert loaded == state
    assert loaded.updates == 5
    assert config == settings
    other, other_optimizer = model_and_optimizer()
    restore(checkpoint, other, other_optimizer)
    assert torch.equal(other.weight, model.weight)
    assert other_optimizer.steps == 1
    for name, moment in optimizer.second.items():
        assert torch.equal(other_optimizer.second[name], moment)
        assert moment.dtype is torch.bfloat16


def test_moments_may_be_taken_over_in_another_dtype(tmp_path: Path) -> None:
    """As resume=fork with another optimizer.moments asks."""
    model, optimizer = model_and_optimizer("bf16")
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step(1e-2)
    _, wider = model_and_optimizer("fp32")
    restore(Checkpoint(save_checkpoint(tmp_path, TrainingState(step=1), model, optimizer, {})), model, wider)
    assert all(torch.equal(wider.first[name], moment.float()) for name, moment in optimizer.first.items())
    assert wider.first["weight"].dtype is torch.float32


@pytest.mark.parametrize(("moments", "each"), [("bf16", 8), ("fp32", 12)])
def test_the_size_of_a_checkpoint_is_known_beforehand(tmp_path: Path, moments: str, each: int) -> None:
    model, optimizer = model_and_optimizer(moments)
    assert checkpoint_bytes(model, optimizer) == (6 * 3 + 3) * each
    target = save_checkpoint(tmp_path, TrainingState(), model, optimizer, {})
    assert 0 < sum(path.stat().st_size for path in target.iterdir()) - checkpoint_bytes(model, optimizer) < 60_000


def test_every_generator_continues_its_own_stream(tmp_path: Path) -> None:
    """K06: of Python, numpy (with half of a pair of normal draws left over) and torch."""
    model, optimizer = model_and_optimizer()

    def draw() -> list[float]:
        return [random.random(), random.gauss(), float(np.random.rand()), float(np.random.randn()), float(torch.rand(()))]

    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    draw()
    checkpoint = Checkpoint(save_checkpoint(tmp_path, TrainingState(), model, optimizer, {}))
    expected = draw()
    assert draw() != expected
    states = checkpoint.random_states(0)
    assert states is not None
    restore_random_states(states, CPU)
    assert draw() == expected
    assert checkpoint.random_states(1) is None


class Layered(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.block = nn.Linear(width, width)
        self.register_buffer("bias", torch.full((3,), 0.51))


def test_wrappers_leave_no_trace_in_the_names_and_fp32_buffers_stay_fp32(tmp_path: Path) -> None:
    """K03: torch.compile on when saving, off when loading, and the other way round."""
    plain, wrapped = Layered(), Layered()
    wrapped.block = torch.compile(wrapped.block)  # type: ignore[assignment]
    assert "block._orig_mod.weight" in wrapped.state_dict()
    checkpoint = Checkpoint(save_tensors(tmp_path, 1, model_tensors(wrapped)))
    assert list(checkpoint.tensors) == ["model.bias", "model.block.weight", "model.block.bias"]
    assert checkpoint.tensors["model.bias"][0] is torch.float32
    load_weights(checkpoint, plain)
    assert torch.equal(plain.block.weight, wrapped.block.weight)
    with torch.no_grad():
        plain.block.weight.fill_(7.0)
    load_weights(Checkpoint(save_tensors(tmp_path, 2, model_tensors(plain))), wrapped)
    assert torch.equal(wrapped.block.weight, plain.block.weight)


def test_recomputation_wrappers_leave_no_trace_in_the_names() -> None:
    """K03: what torch.compile and activation checkpointing put into a name, alone and one inside the other."""
    assert canonical_name("blocks.0._checkpoint_wrapped_module._orig_mod.weight") == "blocks.0.weight"
    assert canonical_name("_orig_mod.blocks.0.attention.weight") == "blocks.0.attention.weight"
    assert canonical_name("blocks.0.module_list.weight") == "blocks.0.module_list.weight"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda saved: saved.pop("model.block.bias"), r"it lacks block\.bias"),
        (lambda saved: saved.update({"model.extra": torch.zeros(1)}), r"it has extra, which this model has not"),
        (lambda saved: saved.update({"model.bias": torch.zeros(5)}), r"bias is \(5,\) float32 there and \(3,\) float32 here"),
        (lambda saved: saved.update({"model.bias": torch.zeros(3).bfloat16()}), r"bias is \(3,\) bfloat16 there"),
    ],
)  # fmt: skip
def test_a_checkpoint_of_another_model_loads_nothing(tmp_path: Path, change: Callable, complaint: str) -> None:
    """K04: no random weight may be left behind without a word."""
    model = Layered()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    saved = {name: torch.zeros_like(tensor) for name, tensor in model_tensors(model).items()}
    change(saved)
    with pytest.raises(UserError, match=f"another model: {complaint}"):
        load_weights(Checkpoint(save_tensors(tmp_path, 1, saved)), model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_checkpoint_of_other_moments_loads_nothing(tmp_path: Path) -> None:
    """K04: the weights fit, the moments do not."""
    model, optimizer = model_and_optimizer()
    checkpoint = Checkpoint(save_tensors(tmp_path, 1, model_tensors(model)))
    with pytest.raises(UserError, match=r"another model: it lacks first\.weight \(and 3 more differences\)"):
        restore(checkpoint, model, optimizer)


def test_every_tensor_of_a_loaded_model_is_the_saved_one(tmp_path: Path) -> None:
    """K04, O01: all of them, in the memory that an optimizer holds on to; a step with learning rate 0 leaves them."""
    torch.manual_seed(0)
    model, optimizer = model_and_optimizer()
    saved = {name: torch.rand_like(tensor) for name, tensor in model_tensors(model).items()}
    load_weights(Checkpoint(save_tensors(tmp_path, 1, saved)), model)
    assert all(torch.equal(tensor, saved[f"model.{name}"]) for name, tensor in model.state_dict().items())
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step(0.0)
    assert all(torch.equal(tensor, saved[f"model.{name}"]) for name, tensor in model.state_dict().items())


def test_a_checkpoint_without_a_runs_state_is_of_another_version(tmp_path: Path) -> None:
    checkpoint = Checkpoint(save_tensors(tmp_path, 1, {"model.w": torch.zeros(1)}))
    with pytest.raises(UserError, match=r"lacks config, corpus, data, optimizer_steps, seconds.*of another version"):
        load_state(checkpoint)
