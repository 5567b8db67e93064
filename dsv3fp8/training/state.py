"""Everything a run must take up again: its tensors by name, and beside them counters, settings and generators.

Tensors of a checkpoint: ``model.NAME`` parameters and buffers (FP32 masters, load-balance biases, amax histories, frozen
scales), ``first.NAME`` and ``second.NAME`` the moments.
"""

import random
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dsv3fp8.errors import UserError
from dsv3fp8.parallel.placement import place
from dsv3fp8.parallel.ranks import ALONE, Ranks
from dsv3fp8.training.checkpoint import Checkpoint
from dsv3fp8.training.checkpoint_saver import Saver
from dsv3fp8.training.optimizer import AdamW

# Amax histories and frozen scales among a model's tensors: buffers of the quantizers of one linear.
SCALE_STATE = re.compile(r".*quantizers\.states\.\w+\.(history|steps)")
# What a checkpoint's names of parameters and buffers begin with.
MODEL = "model."
# Wrappers of torch that put themselves into parameter names.
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


@dataclass
class TrainingState:
    """Counters and identities. All plain values, so that they can be saved without pickling code."""

    # Optimizer steps done, skipped ones among them: the x axis of every curve.
    step: int = 0
    # Steps skipped for a non-finite loss or gradient, in all and in a row up to now.
    skipped: int = 0
    skipped_in_a_row: int = 0
    # Input tokens consumed by the steps done, and the time the steps took; validation and saving left out.
    tokens: int = 0
    seconds: float = 0.0
    # Position of the training data, as the data room gives it.
    data: dict[str, Any] = field(default_factory=dict)
    # What the run trains on: the corpus's hash.
    corpus: str | None = None
    # Weights & Biases' id of the run, which it keeps across restarts.
    wandb_id: str | None = None

    @property
    def updates(self) -> int:
        """Optimizer steps that moved the weights; the learning rate follows these."""
        return self.step - self.skipped


def random_states(device: torch.device) -> dict[str, Any]:
    """State of this rank's generators, in plain containers."""
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    states = {
        "python": [version, list(words), gauss],
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state().tolist(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device).tolist()
    return states


def restore_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Set them; a GPU's only where it was a GPU that was saved."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(torch.tensor(states["cuda"], dtype=torch.uint8), device)


def canonical_name(name: str) -> str:
    """A parameter's name without the parts that torch.compile and other wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def model_tensors(model: nn.Module, ranks: Ranks = ALONE) -> dict[str, Tensor]:
    """``model.NAME`` of a checkpoint, not copied: plain where every rank has them whole, else DTensors."""
    tensors = {canonical_name(name): tensor for name, tensor in model.state_dict().items()}
    return {f"{MODEL}{name}": tensor for name, tensor in place(model, tensors, ranks).items()}


def weight_names(checkpoint: Checkpoint) -> dict[str, str]:
    """{what the model calls it: what the checkpoint calls it} of parameters and buffers."""
    return {name.removeprefix(MODEL): name for name in checkpoint.tensors if name.startswith(MODEL)}


def run_tensors(model: nn.Module, optimizer: AdamW, ranks: Ranks = ALONE) -> dict[str, Tensor]:
    """All tensors of a checkpoint, as `model_tensors`."""
    tensors = model_tensors(model, ranks)
    for kind, moments in (("first", optimizer.first), ("second", optimizer.second)):
        tensors |= {f"{kind}.{canonical_name(name)}": each for name, each in place(model, moments, ranks).items()}
    return tensors


def begin_checkpoint(
    saver: Saver, state: TrainingState, model: nn.Module, optimizer: AdamW, config: Mapping[str, Any], ranks: Ranks = ALONE
) -> None:
    """Save what there is now, as `Saver.save`. All ranks call this."""
    content = {**asdict(state), "optimizer_steps": optimizer.steps, "config": config}
    generators = random_states(next(model.parameters()).device)
    saver.save(state.step, run_tensors(model, optimizer, ranks), content, generators)


def checkpoint_bytes(model: nn.Module, optimizer: AdamW, ranks: Ranks = ALONE) -> int:
    """Size of a checkpoint to come, of all ranks together, within some kilobytes for each."""
    return sum(tensor.numel() * tensor.element_size() for tensor in run_tensors(model, optimizer, ranks).values())


def load_state(checkpoint: Checkpoint) -> tuple[TrainingState, dict[str, Any]]:
    """(state, configuration) of a checkpoint."""
    known = {item.name for item in fields(TrainingState)}
    checkpoint.require(*known, "config", "optimizer_steps")
    return TrainingState(**{name: checkpoint.state[name] for name in known}), checkpoint.state["config"]


def load_weights(checkpoint: Checkpoint, model: nn.Module, ranks: Ranks = ALONE, *, new_scales: bool = False) -> None:
    """Load parameters and buffers, of the experts those of this rank.

    UserError unless names, shapes and dtypes all agree: a name that does not fit would leave random weights behind, and a
    cast would lose bits of a buffer. `new_scales`: another recipe than the one that was trained under. Amax histories and
    frozen scales stay as they are, since which of them there are, and what they stand for, is the recipe's.
    """
    _read(checkpoint, model_tensors(model, ranks), new_scales)
    _take_over(model)


def restore(
    checkpoint: Checkpoint, model: nn.Module, optimizer: AdamW, ranks: Ranks = ALONE, *, new_scales: bool = False
) -> None:
    """As `load_weights`, with the moments. A fork may change optimizer.moments: they are rounded to BF16, or widened."""
    _read(checkpoint, run_tensors(model, optimizer, ranks), new_scales)
    _take_over(model)
    optimizer.load_state_dict({**optimizer.state_dict(), "steps": checkpoint.state["optimizer_steps"]})


def _read(checkpoint: Checkpoint, tensors: Mapping[str, Tensor], new_scales: bool) -> None:
    """Fill tensors in place; nothing is read unless all of them fit."""
    kinds = {name.partition(".")[0] for name in tensors}

    def counts(name: str) -> bool:
        return name.partition(".")[0] in kinds and not (new_scales and SCALE_STATE.fullmatch(name))

    saved = {name: each for name, each in checkpoint.tensors.items() if counts(name)}
    own = {name: tensor for name, tensor in tensors.items() if counts(name)}
    differences = [f"it lacks {_shown(name)}" for name in own if name not in saved]
    differences += [f"it has {_shown(name)}, which this model has not" for name in saved if name not in own]
    for name in (name for name in own if name in saved):
        there, here = saved[name], (own[name].dtype, tuple(own[name].shape))
        if there[1] != here[1] or (there[0] != here[0] and name.startswith(MODEL)):
            said = (f"{shape} {str(dtype).removeprefix('torch.')}" for dtype, shape in (there, here))
            differences.append(f"{_shown(name)} is {next(said)} there and {next(said)} here")
    if differences:
        more = f" (and {len(differences) - 1} more differences)" if len(differences) > 1 else ""
        raise UserError(
            f"checkpoint {checkpoint.path} is of another model: {differences[0]}{more}; start in another run_dir or give "
            "the model it was trained with"
        )
    checkpoint.read_into(own)


def _shown(name: str) -> str:
    """As the model calls it."""
    return name.removeprefix(MODEL)


def _take_over(model: nn.Module) -> None:
    """The model checks what was read into it, and drops what it made of what was there before."""
    model.load_state_dict(model.state_dict())
