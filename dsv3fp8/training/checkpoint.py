"""Checkpoints that are either whole or not there.

A checkpoint is a directory ``step-00001000`` of a few files written by ``torch.save``. It is written under a temporary
name, flushed to the disk and renamed, and only then is an older one deleted: a kill, a full disk or a lost machine
leaves the previous checkpoint as it was. The files hold plain containers and tensors alone, so that ``weights_only``
loading reads them and no version of a configuration library is needed to open an old one.
"""

import os
import re
import resource
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dsv3fp8.errors import UserError

NAME = re.compile(r"step-(\d+)")
TEMPORARY = ".writing-"
# Room kept for the logs beside the checkpoints.
SPARE_BYTES = 16 << 20
# Wrappers of torch that put themselves into parameter names.
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def canonical_name(name: str) -> str:
    """A parameter's name without the parts that torch.compile and other wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def list_checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """(step, path) of every whole checkpoint, oldest first by step number; whatever else is there is ignored."""
    if not directory.is_dir():
        return []
    found = ((NAME.fullmatch(path.name), path) for path in directory.iterdir() if path.is_dir())
    return sorted((int(match[1]), path) for match, path in found if match)


def remove_unfinished(directory: Path) -> None:
    """Delete what a killed process was writing or deleting. Call it only under the run directory's lock."""
    for path in directory.glob(f"{TEMPORARY}*"):
        shutil.rmtree(path)


def save_checkpoint(directory: Path, step: int, files: Mapping[str, Any], keep: int) -> Path:
    """Write ``directory/step-NNNNNNNN/<name>.pt`` for each of `files`, then delete all but the newest `keep`.

    On failure (a full disk, a file size limit) nothing of it stays, older checkpoints are untouched and UserError names
    the file.
    """
    target = directory / f"step-{step:08d}"
    temporary = directory / f"{TEMPORARY}{target.name}"
    assert not target.exists(), f"{target} is already there"
    path = temporary
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for name, content in files.items():
            path = temporary / f"{name}.pt"
            with path.open("wb") as file:
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())
        _flush_directory(temporary)
        temporary.rename(target)
        _flush_directory(directory)
    # torch's writer turns an OSError of the file below it into a RuntimeError of its own.
    except (OSError, RuntimeError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(_cannot_write(path, directory, error)) from error
    for _, old in list_checkpoints(directory)[:-keep]:
        # Renamed first: a kill halfway must not leave half a checkpoint under a good name.
        shutil.rmtree(old.rename(directory / f"{TEMPORARY}{old.name}"))
    return target


def _flush_directory(directory: Path) -> None:
    """Make names, not only contents, survive a lost machine."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cannot_write(path: Path, directory: Path, error: Exception) -> str:
    kept = list_checkpoints(directory)
    previous = f"the checkpoint of step {kept[-1][0]} is kept" if kept else "no earlier checkpoint exists"
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
    free = shutil.disk_usage(directory).free if directory.is_dir() else 0
    return (
        f"cannot write checkpoint {path.parent.name.removeprefix(TEMPORARY)}/{path.name} in {directory}: {reason} "
        f"({_gb(free)} free); {previous}: free some space or set run_dir= or training.keep= and run again"
    )


def check_space(directory: Path, needed: int, keep: int) -> None:
    """Raise UserError unless the file system has room for the checkpoints to come, each of about `needed` bytes.

    One more than `keep` exist for a moment, since an old one goes only after the new one is safe.
    """
    missing = max(1, keep + 1 - len(list_checkpoints(directory))) * needed + SPARE_BYTES
    free = shutil.disk_usage(directory).free
    if free < missing:
        raise UserError(
            f"run_dir={directory.parent} has {_gb(free)} free, but its checkpoints need {_gb(missing)} more: free some "
            f"space, set run_dir= to another disk, training.keep={keep} to fewer or optimizer.moments=bf16"
        )
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise UserError(
            f"run_dir={directory.parent}: this process may write files of at most {_gb(limit)} (ulimit -f), but a "
            f"checkpoint needs {_gb(needed)}: raise the limit"
        )


def _gb(size: int) -> str:
    return f"{size / 1e9:.3g} GB"


def load_file(checkpoint: Path, name: str) -> Any:
    """Content of one file of a checkpoint, on the CPU; UserError if it is missing, truncated or holds code."""
    path = checkpoint / f"{name}.pt"
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"checkpoint {checkpoint} has no file {path.name}: delete that directory to go back") from None
    except Exception as error:  # torch raises RuntimeError, EOFError, UnpicklingError and others for broken files
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            raise  # nothing is wrong with the file
        # Its first sentence alone: torch goes on to recommend loading without weights_only, which runs what the file holds.
        reason = str(error).splitlines()[0].split(". ")[0] if str(error) else type(error).__name__
        raise UserError(
            f"checkpoint file {path} is damaged ({reason}): delete {checkpoint} to go back to the checkpoint before it"
        ) from error


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters and buffers by canonical name; not copied."""
    return {canonical_name(name): tensor for name, tensor in model.state_dict().items()}


def load_model(model: nn.Module, saved: Mapping[str, Tensor], checkpoint: Path) -> None:
    """Load saved tensors into the model; UserError unless names, shapes and dtypes all agree.

    Nothing is loaded partly or cast: a name that does not fit would leave random weights behind, and a cast would lose
    bits of a buffer.
    """
    wrapped = {canonical_name(name): name for name in model.state_dict()}
    own = model_tensors(model)
    differences = [f"it lacks {name}" for name in own if name not in saved]
    differences += [f"it has {name}, which this model has not" for name in saved if name not in own]
    for name in own:
        if name in saved and (saved[name].shape != own[name].shape or saved[name].dtype != own[name].dtype):
            there, here = (f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in (saved[name], own[name]))
            differences.append(f"{name} is {there} there and {here} here")
    if differences:
        more = f" (and {len(differences) - 1} more differences)" if len(differences) > 1 else ""
        raise UserError(
            f"checkpoint {checkpoint} is of another model: {differences[0]}{more}; start in another run_dir or give "
            "the model it was trained with"
        )
    try:
        model.load_state_dict({wrapped[name]: tensor for name, tensor in saved.items()})
    except ValueError as error:
        raise UserError(f"checkpoint {checkpoint} cannot be used: {error}") from error
