"""`dsv3fp8 import`: a Hugging Face directory of a DeepSeek model becomes a run directory that `train` goes on with.

Weights and load-balance biases are carried over. Moments, the position in the data and whatever else training keeps begin anew:
the run stands at step 0.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv3fp8.config import RunConfig, load_config
from dsv3fp8.data import DataConfig
from dsv3fp8.data.tokenizer import ByteTokenizer, Tokenizer, read_tokenizer_json
from dsv3fp8.errors import UserError
from dsv3fp8.hub.files import Checkpoint, bytes_in
from dsv3fp8.hub.loading import Imported, check_names
from dsv3fp8.hub.settings import FILE, Published, read_config, to_model
from dsv3fp8.hub.tokenizer import FILE as TOKENIZER
from dsv3fp8.hub.tokenizer import is_byte_tokenizer
from dsv3fp8.hub.whole import check_new, new_directory
from dsv3fp8.model.config import ModelConfig
from dsv3fp8.model.rope import uses_yarn
from dsv3fp8.model.transformer import Transformer
from dsv3fp8.training.checkpoint_saver import write_checkpoint
from dsv3fp8.training.checks import context_problems, fit_vocabulary
from dsv3fp8.training.config import raise_problems
from dsv3fp8.training.optimizer import MOMENT_DTYPES
from dsv3fp8.training.run_directory import RunDirectory
from dsv3fp8.training.state import TrainingState
from dsv3fp8.yaml_text import dump_yaml

HELP = ("-h", "--help", "help")
EXAMPLE = "import DeepSeek-V2-Lite run_dir=runs/v2-lite data=files data.paths='[corpus/*.jsonl]'"
KEPT_TOKENIZER = "imported_tokenizer.json"
# Sources that are ids already: they were made with the tokenizer of the weights, or with none.
IDS = ("memmap", "synthetic")
# Keys of the model that a file of weights does not decide.
FREE_KEYS = ("name", "bias_update_speed", "balance_loss", "mtp_weight", "init_std", "context", "mtp_depth")


def main(arguments: list[str]) -> int:
    """Write the run directory; the exit status."""
    if not arguments or any(argument in HELP for argument in arguments):
        print(help_text())
        return 0 if arguments else 2
    first, *words = arguments
    if "=" in first:
        raise UserError(f"{first}: the first word is the directory to import, as in {EXAMPLE}")
    import_directory(Path(first).expanduser(), words)
    return 0


def help_text() -> str:
    """How it is called, and which keys it takes."""
    return (
        f"Usage: dsv3fp8 import DIR run_dir=RUN_DIR [group=choice …] [key=value …]\n\n"
        "DIR holds config.json and safetensors files of DeepseekV2ForCausalLM or DeepseekV3ForCausalLM, BF16, FP32 or FP8.\n"
        "Groups and keys are those of `dsv3fp8 train`: recipe, data, optimizer, schedule and training are the new run's. The\n"
        f"model is config.json's; of its keys these may be given: {', '.join(f'model.{key}' for key in FREE_KEYS)}.\n"
        "The tokenizer is DIR's unless data.tokenizer names another. Then: dsv3fp8 train config=RUN_DIR/config.yaml"
    )


def import_directory(source: Path, words: list[str]) -> None:
    """Write the run directory, whole or not at all. Raises UserError before any work where it cannot be done."""
    published, data = read_config(source)
    config, notes = settings(source, published, data, words)
    run_dir = Path(config.run_dir)
    check_new("run_dir", run_dir, 0)
    checkpoint = Checkpoint(source)
    left_out = check_names(checkpoint, config.model, published, source)
    tensors = RunTensors(Imported(checkpoint, config.model, config.recipe, published, source), config)
    check_new("run_dir", run_dir, bytes_in(tensors.layout))
    tokenizer = kept_tokenizer(source, config)
    with new_directory("run_dir", run_dir) as directory:
        (directory / "config.yaml").write_text(dump_yaml(config.to_dict()), encoding="utf-8")
        if config.data.tokenizer == str(run_dir / KEPT_TOKENIZER):
            (directory / KEPT_TOKENIZER).write_bytes((source / TOKENIZER).read_bytes())
        if tokenizer is not None:
            tokenizer.save(RunDirectory(directory).tokenizer)
        origin = {"from": str(source.absolute()), "config": data}
        (directory / "imported.json").write_text(json.dumps(origin, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        tensors.imported.check_copies()
        state = {**dataclasses.asdict(TrainingState()), "optimizer_steps": 0, "config": config.to_dict()}
        write_checkpoint(RunDirectory(directory).checkpoints, 0, tensors.layout, tensors.tensor, state)
    if left_out:
        notes.append(f"left out: {left_out[0]}" + (f" and {len(left_out) - 1} more" if len(left_out) > 1 else ""))
    print(f"{source}: {tensors.weights:,} weights are in {run_dir} as its step 0")
    print("moments, amax histories and the position in the data begin anew")
    for note in notes:
        print(note)
    command = ["dsv3fp8", "train", f"config={run_dir / 'config.yaml'}"]
    print(f"train it with: {shlex.join(command)}")


class RunTensors:
    """All tensors of the checkpoint to write, by its names: the imported ones, and moments of zero."""

    def __init__(self, imported: Imported, config: RunConfig) -> None:
        self.imported = imported
        with torch.device("meta"):
            parameters = dict(Transformer(config.model, config.recipe).named_parameters())
        self.weights = sum(parameter.numel() for parameter in parameters.values())
        moment = MOMENT_DTYPES[config.optimizer.moments]
        self.layout = {f"model.{name}": each for name, each in imported.layout.items()}
        for kind in ("first", "second"):
            self.layout |= {f"{kind}.{name}": (moment, tuple(each.shape)) for name, each in parameters.items()}

    def tensor(self, name: str) -> Tensor:
        """The tensor of a name."""
        kind, _, inner = name.partition(".")
        dtype, shape = self.layout[name]
        return self.imported.tensor(inner) if kind == "model" else torch.zeros(shape, dtype=dtype)


def settings(source: Path, published: Published, data: dict[str, Any], words: list[str]) -> tuple[RunConfig, list[str]]:
    """(the settings of the new run, what the user has to know of them)."""
    keys = [word.lstrip("+").partition("=")[0] for word in words]
    if "model" in keys:
        raise UserError(f"model=: the model is that of {source / FILE}; leave it out")
    if "run_dir" not in keys:
        raise UserError("run_dir: no value given; add run_dir=… for the new run")
    own = [word for word, key in zip(words, keys, strict=True) if key.startswith("model.")]
    read = to_model(published, source.absolute().name, str(source / FILE))
    config = load_config([word for word in words if word not in own])
    config.model = with_keys(read, own, source)
    if "data.tokenizer" not in keys and config.data.source not in IDS:
        config.data = with_tokenizer(config, source, data)
    raise_problems(context_problems(config))
    notes = []
    if uses_yarn(read) and not uses_yarn(config.model):
        notes.append(f"model.context={config.model.context} is within the original context, so YaRN stays off")
    return config, notes


def with_keys(model: ModelConfig, words: list[str], source: Path) -> ModelConfig:
    """The model of config.json under the `model.` words of the command line, of which few can differ from it."""
    if not words:
        return model
    asked = load_config(words).model
    names = [word.lstrip("+").partition("=")[0].removeprefix("model.") for word in words]
    for name in names:
        top = name.partition(".")[0]
        if name in FREE_KEYS and not (name == "mtp_depth" and asked.mtp_depth not in (0, model.mtp_depth)):
            continue
        there, here = getattr(model, top), getattr(asked, top)
        if there != here:
            raise UserError(f"model.{name}: {source / FILE} has the weights of {top}={there}; leave model.{name} out")
    changed = dataclasses.replace(model, **{name: getattr(asked, name) for name in names if name in FREE_KEYS})
    changed.validate()
    return changed


def with_tokenizer(config: RunConfig, source: Path, data: dict[str, Any]) -> DataConfig:
    """The run's data with the tokenizer of the directory, of which the run keeps a copy."""
    path = source / TOKENIZER
    if not path.is_file():
        raise UserError(f"{source} has no {TOKENIZER}: name the tokenizer of these weights with data.tokenizer=")
    try:
        definition = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); get the file again or name another with data.tokenizer=") from error
    if isinstance(definition, dict) and is_byte_tokenizer(definition):
        taken = dataclasses.replace(config.data, tokenizer="bytes", vocab_size=None, eod=None)
    else:
        end = data.get("eos_token_id")
        eod = config.data.eod if config.data.eod is not None or not isinstance(end, int) else end
        kept = str(Path(config.run_dir) / KEPT_TOKENIZER)
        taken = dataclasses.replace(config.data, tokenizer=kept, vocab_size=None, eod=eod)
    taken.validate()
    return taken


def kept_tokenizer(source: Path, config: RunConfig) -> Tokenizer | None:
    """The tokenizer for `generate`, where it is known before a corpus is read; UserError if the model has too few ids."""
    if config.data.tokenizer == "bytes":
        tokenizer: Tokenizer = ByteTokenizer()
    elif config.data.tokenizer.endswith(".json"):
        path = Path(config.data.tokenizer)
        tokenizer = read_tokenizer_json(source / TOKENIZER if path.name == KEPT_TOKENIZER else path, config.data.eod)
    else:
        return None
    fit_vocabulary(config.model, tokenizer)
    return tokenizer
