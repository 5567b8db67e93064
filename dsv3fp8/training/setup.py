"""Everything that happens before the first step: corpus, model and optimizer, and the state they go on from.

Whatever a user can have got wrong is found here, so that a run that starts is a run that can end.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dsv3fp8.config import RunConfig
from dsv3fp8.data import Batch, Corpus, TrainBatches, open_corpus, validation_batches
from dsv3fp8.errors import UserError
from dsv3fp8.kernels.backend import Choice
from dsv3fp8.model.transformer import Transformer
from dsv3fp8.parallel.build import draw_parts, empty_parts
from dsv3fp8.parallel.experts import deal_out
from dsv3fp8.parallel.ranks import ALONE, Ranks
from dsv3fp8.training.checkpoint import Checkpoint
from dsv3fp8.training.checkpoint_directory import check_file_size, check_space, list_checkpoints, remove_unfinished
from dsv3fp8.training.checkpoint_saver import Saver
from dsv3fp8.training.checks import fit_vocabulary
from dsv3fp8.training.graph import choose_steps
from dsv3fp8.training.host import keep_freed_memory, limit_memory
from dsv3fp8.training.optimizer import AdamW
from dsv3fp8.training.resume import changed_keys, flatten, refuse_changes, refuse_other_corpus
from dsv3fp8.training.run_directory import RunDirectory
from dsv3fp8.training.state import TrainingState, checkpoint_bytes, load_state, restore, restore_random_states, run_tensors


@dataclass
class Run:
    """A run that is ready for its next step."""

    # Resolved: the vocabulary is known.
    config: RunConfig
    directory: RunDirectory
    device: torch.device
    ranks: Ranks
    corpus: Corpus
    batches: TrainBatches
    model: Transformer
    optimizer: AdamW
    saver: Saver
    state: TrainingState
    # Whether it goes on with other settings than those its checkpoint was made under.
    forked: bool
    # Lines that tell what was taken over from a checkpoint.
    notes: list[str]
    # How steps are taken, as the manifest tells it.
    steps: Choice


def repeat_bits(wanted: bool) -> None:
    """Whether kernels that may add in another order in the next run are refused, or replaced; before CUDA starts."""
    if wanted:
        # cuBLAS is deterministic only with a workspace of its own, which it reads when CUDA starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # torch would also fill all memory that a step asks for, for programs that read it before they write it.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(wanted)


def prepare(config: RunConfig, directory: RunDirectory, device: torch.device, ranks: Ranks) -> Run | None:
    """Build the run in its directory, or go on with the one that is there; None if that is finished.

    The first rank holds the directory's lock and says what is there; all read it.
    """
    ranks.require_equal(_told(config), "give all of them the same settings")
    if ranks.first:
        remove_unfinished(directory.checkpoints)
    found = ranks.from_first(list_checkpoints(directory.checkpoints))
    saved = Checkpoint(found[-1][1]) if found else None
    state = TrainingState()
    changed: dict[str, tuple[Any, Any]] = {}
    if saved:
        state, saved_config = load_state(saved)
        changed = changed_keys(saved_config, config.to_dict())
        if config.resume != "fork":
            refuse_changes(config.run_dir, state.step, changed)
        if state.step >= config.training.steps:
            return None

    if device.type == "cpu":
        keep_freed_memory()
        limit_memory()
    torch.manual_seed(config.training.seed)
    repeat_bits(config.training.deterministic)
    with ranks.host_by_host():
        corpus = open_corpus(config.data, report=lambda line: print(line, flush=True) if not ranks.local else None)
    ranks.require_equal(_content(corpus), "let the data keys name the same files on every node")
    corpus.check_context(config.training.context)
    validation(config, corpus, ranks)
    # Weights that were imported have seen no corpus.
    if saved and state.corpus is not None and config.resume != "fork":
        refuse_other_corpus(config.run_dir, state.step, state.corpus, corpus.describe()["sha256"])
    state.corpus = corpus.describe()["sha256"]
    config = dataclasses.replace(config, model=fit_vocabulary(config.model, corpus.tokenizer))

    model, optimizer = build(config, device, ranks)
    saver = Saver(directory.checkpoints, config.training.keep, run_tensors(model, optimizer, ranks), ranks)
    _check_room(directory, saver, checkpoint_bytes(model, optimizer, ranks), config.training.keep, ranks)
    training = config.training
    batches = TrainBatches(
        corpus.train,
        sequences=training.batch,
        context=training.context,
        seed=training.seed,
        workers=config.data.workers,
        rank=ranks.index,
        world=ranks.count,
        isolate=config.data.isolate_documents,
    )
    notes = []
    if saved:
        restore(saved, model, optimizer, ranks, new_scales=any(key.startswith("recipe.") for key in changed))
        notes.append(f"going on after step {state.step}, from {saved.path}")
        notes += _take_position(batches, state, config.resume)
        if changed:
            state.wandb_id = None  # another curve is another run there
            notes.append(f"forked with other settings: {', '.join(changed)}")
        random_states = saved.random_states(ranks.index)
        if random_states:
            restore_random_states(random_states, device)
    steps = choose_steps(config, device)
    ranks.wait()  # before the first writes or says anything: what is wrong may be wrong for another alone
    return Run(config, directory, device, ranks, corpus, batches, model, optimizer, saver, state, bool(changed), notes, steps)


def validation(config: RunConfig, corpus: Corpus, ranks: Ranks) -> Iterator[Batch]:
    """What this rank reads in every validation; UserError, at once, where the split is too short for so many ranks."""
    return validation_batches(
        corpus.validation,
        sequences=config.training.batch,
        context=config.training.context,
        limit=config.training.validation_batches,
        isolate=config.data.isolate_documents,
        rank=ranks.index,
        world=ranks.count,
    )


def _told(config: RunConfig) -> dict[str, Any]:
    """The settings that have to be the same on all ranks: all but where a node keeps its cache."""
    return {key: value for key, value in flatten(config.to_dict()).items() if key != "data.cache_dir"}


def _content(corpus: Corpus) -> dict[str, Any]:
    """What a rank reads, by hashes and sizes."""
    told = corpus.describe()
    sizes = {f"{half} tokens": told[half]["tokens"] for half in ("train", "validation")}
    return {"a corpus of hash": told["sha256"], "a tokenizer of hash": told["tokenizer"]["sha256"], **sizes}


def build(
    config: RunConfig, device: torch.device, ranks: Ranks = ALONE, draw: Callable[[Transformer], None] | None = None
) -> tuple[Transformer, AdamW]:
    """The model with its initial weights, this rank's experts and parts alone, and its optimizer.

    draw: gives other weights than `initialize`, to what this rank has of each parameter.
    """
    seed = config.training.seed
    if ranks.count > 1 and config.recipe.linears == "ours":
        model = empty_parts(config.model, config.recipe, device, ranks)
        (draw or partial(draw_parts, ranks=ranks, seed=seed))(model)
    else:  # Transformer Engine's modules want their device at once
        with device:
            model = Transformer(config.model, config.recipe)
        (draw or partial(Transformer.initialize, seed=seed))(model)
        deal_out(model, ranks)
    return model, AdamW(model.parameter_groups(), config.optimizer)


def _check_room(directory: RunDirectory, saver: Saver, needed: int, keep: int, ranks: Ranks) -> None:
    """Make the directory of the checkpoints; UserError where there is no room for them."""
    if ranks.first:
        try:
            directory.checkpoints.mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(f"{directory.checkpoints} cannot be made: {error.strerror}; choose another run_dir=") from error
        check_space(directory.checkpoints, needed, keep)
    check_file_size(directory.checkpoints, saver.share_bytes)


def _take_position(batches: TrainBatches, state: TrainingState, resume: str) -> list[str]:
    """Set the data to the saved position; begin them, and say so, where there is none or a fork changed the stream."""
    if not state.data:
        return ["the data begin anew: these weights were imported"]
    fresh: dict[str, Any] = batches.state()
    if resume == "fork" and {**fresh, "consumed": 0} != {**state.data, "consumed": 0}:
        state.data = fresh
        return ["the training data begin anew, since they are others than before"]
    batches.load_state(state.data)
    return []


def finished_line(config: RunConfig) -> str:
    """What a run says that has nothing left to do."""
    return (
        f"run_dir={config.run_dir} is finished ({config.training.steps} steps): choose another run_dir=, or set "
        "training.steps higher with resume=fork"
    )
