"""Everything beside weights and moments that a run must take up again, and the three files it is saved in.

``model.pt``: parameters and buffers by name (FP32 masters, load-balance biases, amax histories, frozen scales).
``optimizer.pt``: the moments by parameter name. ``state.pt``: this module's TrainingState and the run's configuration.
"""

import random
import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsv3fp8.errors import UserError
from dsv3fp8.model.transformer import Transformer
from dsv3fp8.parallel.experts import expert_names, own, whole
from dsv3fp8.parallel.ranks import ALONE, Ranks
from dsv3fp8.training.checkpoint import load_file, load_model, model_tensors
from dsv3fp8.training.optimizer import AdamW

# Amax histories and frozen scales among a model's tensors: buffers of the quantizers of one linear.
SCALE_STATE = re.compile(r".*quantizers\.states\.\w+\.(history|steps)")


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


def random_states() -> dict[str, Any]:
    """State of every global generator, in plain containers (numpy's array as a list) and tensors."""
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random_states(states: dict[str, Any]) -> None:
    """Set every global generator. CUDA's are left alone where the saving machine had another number of GPUs."""
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


def checkpoint_files(
    state: TrainingState, model: Transformer, optimizer: AdamW, config: dict[str, Any], ranks: Ranks = ALONE
) -> dict[str, dict[str, Any]]:
    """What save_checkpoint writes, with the experts of all ranks; all of them call this.

    UserError if a weight or a moment is not finite: no such state is ever saved.
    """
    tensors = whole(model, model_tensors(model), ranks)
    moments = optimizer.state_dict()
    moments |= {kind: whole(model, moments[kind], ranks) for kind in ("first", "second")}
    for group in (tensors, moments["first"], moments["second"]):
        bad = _first_non_finite(group)
        if bad:
            raise UserError(
                f"{bad} is not finite after step {state.step}, so no checkpoint is written: start again from the last "
                "checkpoint with a lower optimizer.lr or training.clip (resume=fork)"
            )
    return {
        "model": tensors,
        "optimizer": moments,
        "state": {**asdict(state), "config": config, "random": random_states()},
    }


def _first_non_finite(tensors: dict[str, Tensor]) -> str | None:
    floating = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    if not floating:
        return None
    finite = torch.stack([torch.isfinite(tensor).all() for tensor in floating.values()])
    if bool(finite.all()):
        return None
    return list(floating)[finite.tolist().index(False)]


def checkpoint_bytes(model: Transformer, optimizer: AdamW, ranks: Ranks = ALONE) -> int:
    """Size of a checkpoint to come, within a few kilobytes."""
    moments, experts = optimizer.state_dict(), set(expert_names(model))
    parts = [pair for tensors in (model_tensors(model), moments["first"], moments["second"]) for pair in tensors.items()]
    return sum(tensor.nbytes * (ranks.expert if name in experts else 1) for name, tensor in parts)


def load_state(checkpoint: Path) -> tuple[TrainingState, dict[str, Any], dict[str, Any]]:
    """(state, configuration, random states) of a checkpoint."""
    saved = load_file(checkpoint, "state")
    known = {item.name for item in fields(TrainingState)}
    missing = {*known, "config", "random"} - saved.keys()
    if missing:
        raise UserError(
            f"checkpoint {checkpoint} lacks {', '.join(sorted(missing))}: it is of another version; train anew in another "
            "run_dir"
        )
    return TrainingState(**{name: saved[name] for name in known}), saved["config"], saved["random"]


def restore(checkpoint: Path, model: Transformer, optimizer: AdamW, ranks: Ranks = ALONE, *, new_scales: bool = False) -> None:
    """Load weights and moments of a checkpoint, of the experts those of this rank.

    `new_scales`: for a fork into another recipe. Amax histories and frozen scales begin anew, since which of them there
    are, and what they stand for, is the recipe's.
    """
    tensors = load_file(checkpoint, "model")
    if new_scales:
        fresh = {name: tensor for name, tensor in model_tensors(model).items() if SCALE_STATE.fullmatch(name)}
        tensors = {name: tensor for name, tensor in tensors.items() if not SCALE_STATE.fullmatch(name)} | fresh
    load_model(model, own(model, tensors, ranks), checkpoint)
    moments = load_file(checkpoint, "optimizer")
    optimizer.load_state_dict(moments | {kind: own(model, moments[kind], ranks) for kind in ("first", "second")})
