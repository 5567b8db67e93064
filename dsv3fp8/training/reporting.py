"""What a run says about itself: the files and lines it opens with, those who follow its curve, and its last lines."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch

import dsv3fp8
from dsv3fp8.model.manifest import format_manifest
from dsv3fp8.training.loggers import Logger
from dsv3fp8.training.loggers.plot import LossPlot
from dsv3fp8.training.loggers.progress import Progress
from dsv3fp8.training.loggers.weights_and_biases import WeightsAndBiases, new_run_id
from dsv3fp8.training.run_directory import device_name
from dsv3fp8.training.setup import Run
from dsv3fp8.yaml_text import dump_yaml


class Reporters:
    """The loggers of a run, as one."""

    def __init__(self, run: Run, history: list[dict[str, Any]]) -> None:
        """`history`: the records of the run from before a restart."""
        config = run.config
        self._progress = Progress(config.logging.progress, config.training.steps, run.state.step)
        self._loggers: list[Logger] = []
        try:
            if config.logging.plot:
                title = f"{config.model.name} · {config.recipe.name}"
                bigram = run.corpus.bigram().loss
                self._loggers.append(LossPlot(run.directory.plot, title, bigram, history, self._progress.say))
            if config.logging.wandb != "disabled":
                self._open_wandb(run)
        except BaseException:
            self.close()
            raise

    def _open_wandb(self, run: Run) -> None:
        logging = run.config.logging
        run.state.wandb_id = run.state.wandb_id or new_run_id()
        try:
            logger = WeightsAndBiases(logging, run.directory.path, run.config.to_dict(), run.state.wandb_id, self._progress.say)
        except ImportError:
            self.say("W&B is not installed, so the run is logged here alone (`pip install wandb`; logging.wandb=disabled)")
            return
        self._loggers.append(logger)
        where = f"{run.directory.path}/wandb" if logging.wandb == "offline" else f"project {logging.project}"
        self.say(f"W&B {logging.wandb}: run {run.state.wandb_id} in {where}")

    def say(self, message: str) -> None:
        """Show a line on the terminal."""
        self._progress.say(message)

    def conclude(self, message: str) -> None:
        """End the live display and print the run's last words below it."""
        self._progress.close()
        self._progress.say(message)

    def advance(self, step: int) -> None:
        """A step without figures is done."""
        self._progress.advance(step)

    def log(self, record: dict[str, Any]) -> None:
        """Hand a record to all of them."""
        self._progress.log(record)
        for logger in self._loggers:
            logger.log(record)

    def close(self) -> None:
        """Close all of them, the terminal first."""
        self._progress.close()
        for logger in self._loggers:
            logger.close()


def record_start(run: Run) -> None:
    """Write what the run is made of into its directory, and print the header."""
    directory, config, corpus = run.directory, run.config, run.corpus
    bigram = corpus.bigram()
    kept = directory.path / f"config-until-step-{run.state.step:08d}.yaml"
    # A fork that ended before its first checkpoint forks again from there: what lies here by then are its own settings.
    if run.forked and directory.config.exists() and not kept.exists():
        directory.config.replace(kept)
    directory.write_text(directory.config.name, dump_yaml(config.to_dict()))
    directory.write_json(
        "corpus.json",
        {**corpus.describe(), "bigram": {"loss": bigram.loss, "bits_per_byte": bigram.bits_per_byte}},
    )
    manifest = record_manifest(run)
    directory.record_environment(run.device)
    corpus.tokenizer.save(directory.tokenizer)

    counts = run.model.parameter_counts()
    training = config.training
    threads = f", {torch.get_num_threads()} threads" if run.device.type == "cpu" else ""
    sequences = " × ".join(str(n) for n in (training.batch, training.accumulate, run.ranks.count) if n > 1) or "1"
    processes = f", {run.ranks.count} processes" if run.ranks.count > 1 else ""
    lines = [
        f"dsv3fp8 {dsv3fp8.__version__} on {device_name(run.device)}{threads}{processes}",
        f"model {config.model.name}: {_count(counts['total'])} parameters, {_count(counts['active'])} active a token",
        format_manifest(manifest),
        f"data: {corpus.summary()}",
        f"bigram model on the validation split: {_losses(bigram.loss, bigram.bits_per_byte)}",
        f"{training.steps} steps of {sequences} sequences of {training.context} tokens; run directory {directory.path}",
        *run.notes,
    ]
    print("\n".join(lines), flush=True)


def record_manifest(run: Run) -> dict[str, Any]:
    """Write the precision manifest, how steps are taken among its backends, into the run's directory; the manifest."""
    manifest = run.model.manifest(run.config.data.isolate_documents)
    manifest["backends"].append({"op": "step", **dataclasses.asdict(run.steps)})
    run.directory.write_json("precision.json", manifest)
    return manifest


def summary(run: Run, record: dict[str, Any]) -> str:
    """The result next to the bigram model's, from the last step's record."""
    bigram = run.corpus.bigram()
    ours = _losses(record["validation_loss"], record["validation_bits_per_byte"])
    skipped = f"; {run.state.skipped} steps skipped" if run.state.skipped else ""
    return (
        f"done: {run.state.step} steps, {_count(run.state.tokens)} tokens{skipped}\n"
        f"validation loss {ours}\n"
        f"bigram model    {_losses(bigram.loss, bigram.bits_per_byte)}\n"
        f"see {_shown(run.directory.plot) if run.config.logging.plot else _shown(run.directory.metrics)}"
    )


def _losses(nats: float, bits: float | None) -> str:
    text = f"{nats:.4f} nats a token"
    return text if bits is None or not math.isfinite(bits) else f"{text}, {bits:.4f} bits a byte"


def _count(number: int) -> str:
    for size, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {name}"
    return str(number)


def _shown(path: Path) -> str:
    """Relative to the working directory where that is shorter."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
