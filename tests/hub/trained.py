"""Run directories made in milliseconds: a checkpoint of random weights, under the settings that a run would have."""

from pathlib import Path

import torch
from checkpoints import save_checkpoint
from support import build
from torch import Tensor

from dsv3fp8.config import load_config
from dsv3fp8.data.tokenizer import ByteTokenizer, Tokenizer
from dsv3fp8.model.transformer import Transformer
from dsv3fp8.training.optimizer import AdamW
from dsv3fp8.training.run_directory import RunDirectory
from dsv3fp8.training.state import TrainingState

NANO = (
    "data=synthetic", "model.vocab_size=320", "model.dim=48", "model.layers=2", "model.heads=2", "model.q_latent=24",
    "model.kv_latent=16", "model.head_nope=16", "model.head_rope=8", "model.head_v=16", "model.ffn=72", "model.expert_ffn=40",
    "model.experts=8", "model.context=64", "model.init_std=0.15", "training.context=32", "optimizer.moments=bf16",
)  # fmt: skip
V2 = (
    "model.score=softmax",
    "model.normalize=false",
    "model.q_latent=null",
    "model.groups=1",
    "model.kept_groups=1",
    "model.mtp_depth=0",
)


def make_run(path: Path, *words: str, tokenizer: Tokenizer | None = None, biased: bool | None = None) -> Transformer:
    """A run directory with a checkpoint of step 5; the model that is in it.

    biased: whether load-balance biases have moved; None: where the published layout has a place for them.
    """
    config = load_config([*NANO, *words, f"run_dir={path}"])
    model = build(config.model, config.recipe)
    generator = torch.Generator().manual_seed(7)
    for name, buffer in model.named_buffers():
        if name.endswith("router.bias") and (config.model.score == "sigmoid" if biased is None else biased):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    optimizer = AdamW(model.parameter_groups(), config.optimizer)
    state = TrainingState(step=5, tokens=5 * 8 * 32, corpus="0" * 64)
    save_checkpoint(RunDirectory(path).checkpoints, state, model, optimizer, config.to_dict())
    (tokenizer or ByteTokenizer()).save(RunDirectory(path).tokenizer)
    return model.eval()


def tensors_in(directory: Path) -> dict[str, Tensor]:
    """Every tensor of a directory's safetensors files."""
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors = load_file(file)
        assert not found.keys() & tensors.keys()
        found |= tensors
    return found
