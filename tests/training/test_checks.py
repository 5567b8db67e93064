"""Settings that make no sense, alone or together, each in one line with its key."""

from dataclasses import replace
from typing import Any

import pytest

from dsv3fp8.data.tokenizer import ByteTokenizer, IdTokenizer
from dsv3fp8.errors import UserError
from dsv3fp8.parallel.config import ParallelConfig
from dsv3fp8.training.checks import fit_vocabulary, select_device, validate_run
from dsv3fp8.training.config import (
    LoggingConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainingConfig,
)

TRAINING = TrainingConfig(
    steps=10, batch=2, context=32, validate_every=5, validation_batches=2, checkpoint_every=5
)  # fmt: skip
OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1)
SCHEDULE = ScheduleConfig(name="v3", warmup=3, constant=0.5)


def test_sensible_settings_pass() -> None:
    for config in (TRAINING, OPTIMIZER, SCHEDULE, LoggingConfig(), ParallelConfig()):
        config.validate()


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (replace(TRAINING, steps=0, keep=0), "training.steps=0 must be at least 1; training.keep=0 must be at least 1"),
        (replace(TRAINING, clip=-1.0), "training.clip=-1.0 must be a norm above 0"),
        (replace(TRAINING, seed=2**64), "training.seed=18446744073709551616 must be below 2\\*\\*63"),
        (replace(TRAINING, clip=float("nan")), "training.clip=nan"),
        (replace(TRAINING, device="tpu"), "training.device=tpu must be one of auto, cpu, cuda"),
        (replace(OPTIMIZER, name="sgd"), "optimizer.name=sgd must be adamw"),
        (replace(OPTIMIZER, lr=float("inf")), "optimizer.lr=inf must be finite"),
        (replace(OPTIMIZER, eps=0.0), "optimizer.eps=0.0 must be above 0"),
        (replace(OPTIMIZER, betas=[0.9, 1.0]), r"optimizer.betas=\[0.9, 1.0\] must be two numbers"),
        (replace(OPTIMIZER, betas=[0.9]), r"optimizer.betas=\[0.9\] must be two numbers"),
        (replace(OPTIMIZER, moments="fp8"), "optimizer.moments=fp8 must be one of fp32, bf16"),
        (replace(SCHEDULE, name="linear"), "schedule.name=linear must be one of v3, cosine, constant"),
        (replace(SCHEDULE, name="cosine"), "schedule.constant=0.5 means nothing under schedule.name=cosine"),
        (replace(SCHEDULE, warmup=-1, final=2.0), "schedule.warmup=-1 must be at least 0 steps; schedule.final=2.0"),
        (LoggingConfig(wandb="yes", progress="fancy"), "logging.progress=fancy must be .*; logging.wandb=yes must be"),
        (LoggingConfig(project=""), "logging.project='' must not be empty"),
        (ParallelConfig(expert=2), "parallel.expert=2 exceeds the 1 GPUs"),
    ],
)
def test_what_makes_no_sense_is_named_with_key_and_value(config: Any, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        config.validate()


def test_bf16_moments_that_could_never_decay_are_refused() -> None:
    """Half a step of BF16 is 2^-9 to 2^-8 of a value: a decay of 0.001 is rounded away every time."""
    with pytest.raises(UserError, match=r"optimizer.moments=bf16 would never shrink a moment"):
        replace(OPTIMIZER, betas=[0.9, 0.999], moments="bf16").validate()
    replace(OPTIMIZER, betas=[0.9, 0.99], moments="bf16").validate()
    replace(OPTIMIZER, betas=[0.9, 0.999], moments="fp32").validate()


def test_a_cuda_graph_that_is_asked_for_needs_a_gpu(nano: Any) -> None:
    with pytest.raises(UserError, match=r"^training\.cuda_graph=true: there are CUDA graphs on a CUDA GPU .* set it to false"):
        validate_run(nano("training.cuda_graph=true", "training.device=cpu"))
    validate_run(nano("training.cuda_graph=null", "training.device=cpu"))


def test_a_context_beyond_the_rope_table_is_refused(nano: Any) -> None:
    """H11."""
    with pytest.raises(UserError, match=r"training.context=2048 is longer than model.context=1024"):
        validate_run(nano("training.context=2048"))


def test_a_context_too_short_for_every_mtp_depth_is_refused(nano: Any) -> None:
    with pytest.raises(UserError, match=r"training.context=2 leaves nothing to predict at model.mtp_depth=2"):
        validate_run(nano("training.context=2", "model.mtp_depth=2"))


def test_as_many_processes_as_the_layout_asks_for(nano: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"dp_replicate=2 .* make 2 ranks, not 1: .* or start 2 with torchrun"):
        validate_run(nano("parallel.dp_replicate=2"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"make 1 ranks, not 2: set parallel.dp_replicate=2, or start 1"):
        validate_run(nano())
    with pytest.raises(UserError, match=r"make 4 ranks, not 2: set parallel.dp_replicate=1, or start 4"):
        validate_run(nano("parallel.dp_replicate=2", "parallel.dp_shard=2"))
    with pytest.raises(UserError, match=r"make 4 ranks, not 2: set parallel.dp_replicate=1 parallel.dp_shard=2"):
        validate_run(nano("parallel.dp_shard=4"))
    with pytest.raises(UserError, match=r"parallel.dp_shard=2: Transformer Engine's linears read whole weights; set it to 1"):
        validate_run(nano("parallel.dp_shard=2", "recipe=te_blockwise"))
    for layout in (
        ["parallel.dp_shard=2"],
        ["parallel.dp_shard=2", "parallel.expert=2"],
        ["parallel.dp_shard=2", "recipe=delayed"],
    ):
        validate_run(nano(*layout))
    validate_run(nano("parallel.dp_replicate=2"))
    validate_run(nano("parallel.dp_replicate=2", "parallel.expert=2"))
    with pytest.raises(UserError, match=r"parallel.expert=2: recipe=delayed keeps one scale .*; set it to 1"):
        validate_run(nano("parallel.dp_replicate=2", "parallel.expert=2", "recipe=delayed"))


def test_cuda_without_a_gpu_is_refused(nano: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match=r"training\.device=cuda, but torch finds no CUDA GPU"):
        validate_run(nano("training.device=cuda"))
    assert select_device("auto").type == "cpu"


def test_a_vocabulary_follows_the_tokenizer_in_multiples_of_64(nano: Any) -> None:
    model = nano().model
    assert fit_vocabulary(model, ByteTokenizer()).vocab_size == 320
    assert fit_vocabulary(model, IdTokenizer(vocab_size=640, eod=0)).vocab_size == 640
    assert model.vocab_size is None
    own = replace(model, vocab_size=300)
    assert fit_vocabulary(own, ByteTokenizer()) is own


def test_an_id_beyond_the_vocabulary_is_refused(nano: Any) -> None:
    with pytest.raises(UserError, match=r"model.vocab_size=256 is below the 257 ids of the tokenizer bytes"):
        fit_vocabulary(replace(nano().model, vocab_size=256), ByteTokenizer())
