"""Checks between the rooms: what one of them is told must fit what the others are told, and this machine."""

import dataclasses

import torch

from dsv3fp8.config import RunConfig
from dsv3fp8.data.tokenizer import Tokenizer
from dsv3fp8.kernels import te
from dsv3fp8.model.config import ModelConfig
from dsv3fp8.parallel.checks import layout_problems
from dsv3fp8.parallel.ranks import local_rank, rank_count
from dsv3fp8.training.config import DEVICES, raise_problems
from dsv3fp8.training.graph import reasons_to_launch

# A vocabulary taken from the tokenizer is rounded up to a multiple of this, for the sake of the GEMM of the head.
VOCABULARY_MULTIPLE = 64


def validate_run(config: RunConfig) -> None:
    """Raise UserError with every setting that does not fit another one or this machine. Looks at no file."""
    training = config.training
    problems = layout_problems(config.parallel, rank_count(), config.model, config.recipe) + context_problems(config)
    problems += device_problems("training.device", training.device)
    if config.recipe.linears == "te" and not problems:
        against = te.reason_against(select_device(training.device))
        problems += [] if against is None else [f"recipe.linears=te: {against}"]
    if training.cuda_graph and not problems and (reasons := reasons_to_launch(config, select_device(training.device))):
        problems.append(f"training.cuda_graph=true: {'; '.join(reasons)}: set it to false, or to null for where it can be")
    raise_problems(problems)


def context_problems(config: RunConfig) -> list[str]:
    """What is wrong with the length of the windows, for this model."""
    training, model = config.training, config.model
    problems = []
    if training.context > model.context:
        problems.append(
            f"training.context={training.context} is longer than model.context={model.context}, the end of the rope "
            "table: lower the one or raise the other"
        )
    if training.context <= model.mtp_depth:
        problems.append(
            f"training.context={training.context} leaves nothing to predict at model.mtp_depth={model.mtp_depth}: raise it"
        )
    return problems


def fit_vocabulary(model: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    """The model with the tokenizer's vocabulary, if it has none of its own; UserError if its own is too small."""
    if model.vocab_size is None:
        rounded = -(-tokenizer.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        return dataclasses.replace(model, vocab_size=rounded)
    if tokenizer.vocab_size > model.vocab_size:
        raise_problems(
            [
                f"model.vocab_size={model.vocab_size} is below the {tokenizer.vocab_size} ids of the tokenizer "
                f"{tokenizer.name}: raise it, or set it to null to follow the tokenizer"
            ]
        )
    return model


def device_problems(key: str, name: str) -> list[str]:
    """What is wrong with a choice of device, on this machine."""
    if name not in DEVICES:
        return [f"{key}={name} must be one of {', '.join(DEVICES)}"]
    if name == "cuda" and not torch.cuda.is_available():
        return [f"{key}=cuda, but torch finds no CUDA GPU: take cpu, or see what `dsv3fp8 doctor` says"]
    if select_device(name).type == "cuda" and local_rank() >= torch.cuda.device_count():
        return [f"LOCAL_RANK={local_rank()}, but this host has {torch.cuda.device_count()} GPUs: start as many processes on it"]
    return []


def select_device(name: str) -> torch.device:
    """The device of training.device; ``auto`` is cuda where there is one. Each rank of a host has a GPU of its own."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name, local_rank()) if name == "cuda" else torch.device(name)
