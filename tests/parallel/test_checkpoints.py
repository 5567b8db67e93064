"""Checkpoints of several ranks: who writes what, who reads what, and what happens when one of them fails."""

import errno
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import save_checkpoint, save_tensors
from one_step import made, sequences, share
from processes import Ranks, on_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dsv3fp8.errors import UserError
from dsv3fp8.parallel.placement import local_part
from dsv3fp8.parallel.ranks import ALONE
from dsv3fp8.training import checkpoint_saver
from dsv3fp8.training.checkpoint import Checkpoint
from dsv3fp8.training.checkpoint_directory import list_checkpoints
from dsv3fp8.training.checkpoint_file import read_header
from dsv3fp8.training.checkpoint_saver import Saver
from dsv3fp8.training.state import (
    TrainingState,
    begin_checkpoint,
    load_state,
    model_tensors,
    restore,
    restore_random_states,
    run_tensors,
)
from dsv3fp8.training.step import train_step, validate

CPU = torch.device("cpu")


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def train_and_save(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Two steps and a checkpoint, every rank with random numbers of its own."""
    model, optimizer = made("dsv3", ranks=ranks)
    for seed in range(2):
        train_step(model, optimizer, share(sequences(seed), ranks.index, ranks.count), 1e-2, 1.0, ranks)
    random.seed(ranks.index), np.random.seed(ranks.index), torch.manual_seed(ranks.index)
    state = TrainingState(step=2, wandb_id="first" if ranks.first else None)
    save_checkpoint(folder, state, model, optimizer, {}, ranks)
    drawn = draws()
    loss = validate(model, share(sequences(9), ranks.index, ranks.count), CPU, ranks)
    return {"loss": loss, "drawn": drawn, "saver": Saver(folder, 1, run_tensors(model, optimizer, ranks), ranks).share_bytes}


def load_and_validate(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Its loss on the same batch, its generators, and how far its parts are from those of the whole checkpoint."""
    model, optimizer = made("dsv3", ranks=ranks)
    checkpoint = Checkpoint(folder / "step-00000002")
    restore(checkpoint, model, optimizer, ranks)
    states = checkpoint.random_states(ranks.index)
    if states:
        restore_random_states(states, CPU)
    drawn = draws()
    wrong = [
        name
        for name, tensor in run_tensors(model, optimizer, ranks).items()
        if not torch.equal(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor, checkpoint.read(name))
    ]
    loss = validate(model, share(sequences(9), ranks.index, ranks.count), CPU, ranks)
    return {"loss": loss, "drawn": drawn if states else None, "wrong": wrong, "steps": optimizer.steps}


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A checkpoint of four ranks, experts dealt out to two, and what they found."""
    folder = tmp_path_factory.mktemp("four")
    return folder, on_ranks(4, train_and_save, folder, expert=2)


def test_every_part_is_written_once_and_the_work_is_spread(four: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, found = four
    written: dict[str, list[tuple[int, ...]]] = {}
    sizes = []
    for rank in range(4):
        entries, _ = read_header(folder / "step-00000002" / f"{rank:05d}.safetensors")
        sizes.append(sum(entry.size for entry in entries.values()))
        for name, entry in entries.items():
            written.setdefault(name, []).append(entry.shape)
    whole = Checkpoint(folder / "step-00000002").tensors
    experts = {name for name in whole if name.endswith(("experts.gate_up", "experts.down"))}
    assert len(experts) == 3 * 2 * 3  # two layers and a module that predicts ahead, two stacks, with two moments
    for name, (_, shape) in whole.items():
        assert written[name] == [(shape[0] // 2, *shape[1:])] * 2 if name in experts else [shape]
    assert sizes == [each["saver"] for each in found]
    assert max(sizes) < 1.3 * sum(sizes) / 4


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_pytorch_puts_the_parts_together_as_well(four: tuple[Path, list[dict[str, Any]]]) -> None:
    checkpoint = Checkpoint(four[0] / "step-00000002")
    theirs = {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in checkpoint.tensors.items()}
    dcp.load(theirs, storage_reader=dcp.HuggingFaceStorageReader(str(checkpoint.path)))
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize(("count", "expert"), [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)])
def test_it_loads_onto_another_number_of_ranks_and_another_split_of_experts(
    four: tuple[Path, list[dict[str, Any]]], count: int, expert: int
) -> None:
    """K01, K06, K13: every rank has its parts of every tensor, bit for bit, and goes on with its own random numbers."""
    folder, saved = four
    loaded = on_ranks(count, load_and_validate, folder, expert=expert) if count > 1 else [load_and_validate(ALONE, folder)]
    assert len({each["loss"] for each in saved}) == 1
    for rank, found in enumerate(loaded):
        assert found["wrong"] == []
        assert found["steps"] == 2
        assert found["drawn"] == saved[rank]["drawn"]
        assert found["loss"] == pytest.approx(saved[0]["loss"], rel=1e-6)
        if (count, expert) == (4, 2):
            assert found["loss"] == saved[0]["loss"]
    assert len({tuple(each["drawn"]) for each in loaded}) == count


def test_the_state_is_the_first_ranks_and_a_rank_more_than_there_were_has_no_random_numbers_to_go_on_with(
    four: tuple[Path, list[dict[str, Any]]],
) -> None:
    checkpoint = Checkpoint(four[0] / "step-00000002")
    assert load_state(checkpoint)[0].wandb_id == "first"
    assert checkpoint.random_states(4) is None


def test_the_file_of_a_rank_that_is_missing_is_named(four: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    for path in (four[0] / "step-00000002").iterdir():
        if path.name != "00002.safetensors":
            (tmp_path / path.name).symlink_to(path)
    model, optimizer = made("dsv3")
    before = {name: tensor.clone() for name, tensor in model_tensors(model).items()}
    with pytest.raises(UserError, match=r"has no file 00002\.safetensors"):
        restore(Checkpoint(tmp_path), model, optimizer)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model_tensors(model).items())


def one_fails(ranks: Ranks, folder: Path, culprit: int) -> list[str]:
    """What every rank is told when the disk of one of them fills up at step 2, and when a weight of one is not finite."""
    model, optimizer = made("fp32", ranks=ranks)
    saver, told = Saver(folder, 1, run_tensors(model, optimizer, ranks), ranks), []
    begin_checkpoint(saver, TrainingState(step=1), model, optimizer, {}, ranks)
    saver.wait()
    real = checkpoint_saver.write_file

    def write_file(path: Path, *rest: Any) -> bytes:
        real(path, *rest)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if ranks.index == culprit:
        checkpoint_saver.write_file = write_file
    begin_checkpoint(saver, TrainingState(step=2), model, optimizer, {}, ranks)
    try:
        begin_checkpoint(saver, TrainingState(step=3), model, optimizer, {}, ranks)
    except UserError as error:
        told.append(str(error))
    checkpoint_saver.write_file = real
    if ranks.index == culprit:
        (name,) = (name for name, _ in model.named_parameters() if name.endswith("layers.1.feed_forward.experts.down"))
        with torch.no_grad():
            model.get_parameter(name)[0, 1, 2] = float("nan")
    try:
        begin_checkpoint(saver, TrainingState(step=4), model, optimizer, {}, ranks)
    except UserError as error:
        told.append(str(error))
    return told


@pytest.mark.parametrize("culprit", [0, 1])
def test_what_goes_wrong_on_one_rank_is_told_on_all_and_leaves_the_checkpoint_before(tmp_path: Path, culprit: int) -> None:
    """K10, O07, X04."""
    told = on_ranks(2, one_fails, tmp_path, culprit, expert=2)
    assert told[0] == told[1]
    full, not_finite = told[0]
    assert full.startswith(f"cannot write checkpoint step-00000002/{culprit:05d}.safetensors")
    assert "No space left on device" in full
    assert "the checkpoint of step 1 is kept" in full
    assert "layers.1.feed_forward.experts.down is not finite after step 4" in not_finite
    assert [step for step, _ in list_checkpoints(tmp_path)] == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


ROWS = torch.arange(15.0).view(5, 3)
STACK = torch.arange(24.0).view(6, 4)


def save_uneven(ranks: Ranks, folder: Path) -> None:
    """Rows that four ranks cannot share evenly, the last has none; a stack dealt out to two, each part cut over two again."""
    rows = distribute_tensor(ROWS, init_device_mesh("cpu", (4,)), (Shard(0),))
    assert len(rows.to_local()) == (2, 2, 1, 0)[ranks.index]
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2).T, mesh_dim_names=("expert", "shard"))
    own = STACK[3 * (ranks.index % 2) :][:3]
    local = own[:2] if ranks.index < 2 else own[2:]
    stack = DTensor.from_local(local, mesh, (Shard(0), Shard(0)), shape=STACK.shape, stride=STACK.stride())
    save_tensors(folder, 1, {"model.rows": rows, "model.stack": stack, "model.both": torch.ones(2)}, ranks=ranks)


def load_uneven(ranks: Ranks, folder: Path) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2,))
    tensors = {
        "model.rows": distribute_tensor(torch.zeros(5, 3), mesh, (Shard(0),)),
        "model.stack": distribute_tensor(torch.zeros(6, 4), mesh, (Shard(1),)),
        "model.both": torch.zeros(2),
    }
    Checkpoint(folder / "step-00000001").read_into(tensors)
    return {name: local_part(tensor) for name, tensor in tensors.items()}


def test_parts_may_be_uneven_empty_or_cut_twice_and_are_read_along_another_dimension(tmp_path: Path) -> None:
    on_ranks(4, save_uneven, tmp_path)
    checkpoint = Checkpoint(tmp_path / "step-00000001")
    assert torch.equal(checkpoint.read("model.rows"), ROWS)
    assert torch.equal(checkpoint.read("model.stack"), STACK)
    for rank, found in enumerate(on_ranks(2, load_uneven, tmp_path)):
        assert np.array_equal(found["model.rows"], ROWS[:3] if rank == 0 else ROWS[3:])
        assert np.array_equal(found["model.stack"], STACK[:, 2 * rank : 2 * rank + 2])
        assert found["model.both"].tolist() == [1, 1]
