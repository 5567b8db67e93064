"""`dsv3fp8 consolidate`: all weights of a checkpoint in one file, however many ranks wrote it.

Takes no model, no GPU, and the memory of the largest tensor.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from dsv3fp8.errors import UserError
from dsv3fp8.schema import build_words, key_values, leaves
from dsv3fp8.training.checkpoint import Checkpoint, open_checkpoint
from dsv3fp8.training.checkpoint_directory import flush, in_gb
from dsv3fp8.training.checkpoint_file import write_file
from dsv3fp8.training.state import weight_names

HELP = ("-h", "--help", "help")


@dataclass
class ConsolidateConfig:
    """The keys of the command."""

    # Run directory to take the checkpoint from.
    run: str
    # File to write, in the safetensors format.
    out: str
    # Checkpoint to take. null: the newest.
    step: int | None = None


def main(arguments: list[str]) -> int:
    """Write the file and say what is in it; the exit status."""
    if any(argument in HELP for argument in arguments):
        print(help_text())
        return 0
    config = build_words(ConsolidateConfig, key_values(arguments, "run=runs/tiny-dsv3 out=tiny.safetensors"))
    checkpoint = open_checkpoint(config.run, config.step)
    count, size = consolidate(checkpoint, Path(config.out))
    print(f"{config.out}: {count} tensors, {in_gb(size)}, of step {checkpoint.state['step']} of {config.run}")
    return 0


def help_text() -> str:
    """The keys with their comments."""
    keys = "\n".join(f"  {key:<14}{note}" for key, _, note in leaves(ConsolidateConfig))
    return f"Usage: dsv3fp8 consolidate run=RUN_DIR out=FILE.safetensors [step=N]\n\n{keys}"


def consolidate(checkpoint: Checkpoint, out: Path) -> tuple[int, int]:
    """Parameters and buffers, under the model's names, with step and settings in the header; (tensors, bytes of the file).

    The file is there whole or not at all. UserError where it is there already, or cannot be written.
    """
    checkpoint.require("step", "config")
    names = weight_names(checkpoint)
    layout = {short: checkpoint.tensors[name] for short, name in names.items()}
    metadata = {"step": str(checkpoint.state["step"]), "config": json.dumps(checkpoint.state["config"])}
    if out.exists():
        raise UserError(f"out={out} is there already: delete it or give another name")
    if not out.parent.is_dir():
        raise UserError(f"out={out}: there is no directory {out.parent}; make it or give another name")
    temporary = out.with_name(f".{out.name}.{os.getpid()}.writing")
    try:
        write_file(temporary, layout, metadata, lambda short: checkpoint.read(names[short]))
        temporary.rename(out)
        flush(out.parent)
    except OSError as error:
        raise UserError(f"out={out} cannot be written: {error.strerror}; free some space or give another name") from error
    finally:
        temporary.unlink(missing_ok=True)
    return len(names), out.stat().st_size
