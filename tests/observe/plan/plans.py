"""Plans for the tests: presets and a small model whose weights are counted by hand."""

import dataclasses
from typing import Any

from support import nano

from dsv3fp8.config import load_config
from dsv3fp8.model.config import ModelConfig
from dsv3fp8.observe.plan.memory import Planned
from dsv3fp8.observe.plan.stash import load_of
from dsv3fp8.observe.plan.weights import units
from dsv3fp8.parallel.config import ParallelConfig
from dsv3fp8.precision.recipe import Recipe

# One dense layer, D = 256, two heads of 128 + 64 and 128, no query latent, FFN 512, vocabulary 1000:
# norms 2·256 + 128 and a last one of 256, q 384·256, kv_a 192·256, kv_b 512·128, out 256·256, gate_up 1024·256, down 256·512,
# embedding and head 1000·256.
DENSE = nano(
    vocab_size=1000, dim=256, layers=1, dense_layers=1, heads=2, q_latent=None, kv_latent=128, head_nope=128, head_rope=64,
    head_v=128, ffn=512, mtp_depth=0, context=128,
)  # fmt: skip
QUANTIZED = 98_304 + 49_152 + 65_536 + 65_536 + 262_144 + 131_072
# Blocks of 128×128: q 3·2, kv_a 2·2, kv_b 4·1, out 2·2, gate_up 8·2, down 2·4.
SCALES = 6 + 4 + 4 + 4 + 16 + 8
# Rows and columns: q, kv_a, kv_b, out, gate_up, down.
ROWS = 384 + 256 + 192 + 256 + 512 + 128 + 256 + 256 + 1024 + 256 + 256 + 512
PARAMETERS = QUANTIZED + 640 + 256 + 512_000


def plan_of(
    config: ModelConfig, given: Recipe, sizes: tuple[int, int, int] = (1, 1, 1), tokens: int = 128, **changes: Any
) -> Planned:
    parallel = ParallelConfig(*sizes)
    load = load_of(config, parallel, tokens, 1.0)
    plan = Planned(config, given, parallel, units(config), load, accumulate=1, moment_bytes=4)
    return dataclasses.replace(plan, **changes)


def preset(name: str) -> ModelConfig:
    config = load_config([f"model={name}"]).model
    return dataclasses.replace(config, vocab_size=config.vocab_size or 32_000)
