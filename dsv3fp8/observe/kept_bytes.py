"""The table of docs/kept_bytes.md: bytes that one MoE block keeps for backward, per token, observed and as they add up.

    python -m dsv3fp8.observe.kept_bytes [DEVICE]

The arithmetic adds up what the recipe allows to be kept, from sizes alone. The observation is the ledger's: every storage
that autograd holds, once, parameters apart.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv3fp8.config import load_config
from dsv3fp8.model.block import Block
from dsv3fp8.model.config import ModelConfig
from dsv3fp8.model.sequence import Sequences
from dsv3fp8.precision.ledger import observe_ops
from dsv3fp8.precision.recipe import Recipe
from dsv3fp8.precision.tiles import ceil_div

ROUTER_NUMBERS = ("scores", "ids", "chosen", "total", "shares", "frequency", "gate")
"""Numbers per expert and choice, which the contract lists and leaves out of its sum."""
SHARED_BY_LAYERS = ("rope_table",)

BLOCKS = ("tiny", "v2_lite_16b", "v3_671b")
RECIPES = (
    ("bf16", "swiglu_output=keep"), ("bf16",), ("dsv3", "swiglu_output=keep"), ("dsv3",), ("dsv3", "recompute=norms"),
    ("dsv3", "recompute=norms_and_up"), ("bf16_cache",),
)  # fmt: skip


@dataclass(frozen=True)
class Kept:
    """Bytes per token. tensors: what the contract's sum counts; router: its numbers per expert and choice.

    Apart from both: padding (inert rows between experts), plan (indices of the exchange) and the rope table of all layers.
    allocated: what is requested of the GPU's allocator between forward and backward, the block's output apart; 0 on a CPU.
    """

    tensors: float
    router: float
    padding: float
    plan: float
    rope_table: float
    allocated: float = 0.0

    @property
    def total(self) -> float:
        """Everything that one forward adds to memory; the rope table is there before."""
        return self.tensors + self.router + self.padding + self.plan


def contract_bytes(config: ModelConfig, recipe: Recipe) -> int:
    """What one MoE block keeps per token as the contract adds it up, in E4M3 with fp32 scales of 1x128 tiles or in BF16."""

    def stored(width: int, fp8: bool) -> int:
        return width + 4 * ceil_div(width, 128) if fp8 else 2 * width

    operands = recipe.linear("out").input.quantized
    heads, outputs = config.heads, config.heads * config.head_v
    latents = [width for width in (config.q_latent, config.kv_latent) if width]
    total = 2 * 2 * config.dim + 2 * sum(latents)  # inputs of the norms
    if recipe.recompute == "none":  # their outputs, for wgrad
        total += 2 * stored(config.dim, operands) + sum(stored(width, operands) for width in latents)
    up = recipe.recompute == "norms_and_up"
    total += 2 * config.head_rope if up else 2 * heads * (2 * config.head_qk + config.head_v)
    total += 4 * heads  # log-sum-exp
    total += outputs * 3 // 2 + 4 * ceil_div(outputs, 128) if recipe.attention_cache == "e5m6" else 2 * outputs
    total += config.top_k * stored(config.dim, operands)
    cache = recipe.swiglu_cache.format == "e4m3"
    for hidden in [config.expert_ffn] * config.top_k + [config.shared_experts * config.expert_ffn]:
        total += 2 * stored(hidden, cache)
        total += stored(hidden, operands) if recipe.swiglu_output == "keep" else 0
    return total


def observed_bytes(config: ModelConfig, recipe: Recipe, tokens: int, device: torch.device, dense: bool = False) -> Kept:
    """What one block, a MoE block unless `dense`, keeps after its forward on one sequence of random tokens."""
    with torch.device("meta"):
        block = Block(config, recipe, dense=dense)
    block.to_empty(device=device)
    _fill(block)
    compute = torch.bfloat16 if recipe.compute == "bf16" else torch.float32
    x = torch.randn(tokens, config.dim, device=device).to(compute).requires_grad_()
    sequences = Sequences.of(config, torch.zeros(1, tokens, dtype=torch.int64, device=device), None)
    allocated = _allocated(block, x, sequences) / tokens if device.type == "cuda" else 0.0
    with observe_ops() as ledger:
        block(x, sequences)
    assert not ledger.unreported, ledger.unreported
    assert not ledger.unsaved, ledger.unsaved
    kept = [t for record in ledger.records for t in record.kept if not t.again]

    def live(names: Iterable[str]) -> float:
        return sum(t.bytes - t.padding for t in kept if t.name in names) / tokens

    apart = (*ROUTER_NUMBERS, *SHARED_BY_LAYERS)
    return Kept(
        tensors=live({t.name for t in kept} - set(apart)),
        router=live(ROUTER_NUMBERS),
        padding=sum(t.padding for t in kept) / tokens,
        plan=sum(t.bytes for record in ledger.records for t in record.held) / tokens,
        rope_table=live(SHARED_BY_LAYERS),
        allocated=allocated,
    )


def _allocated(block: Block, x: Tensor, sequences: Sequences) -> int:
    """Bytes asked of the allocator after a forward and not before it, with the block's input and without its output.

    The norm keeps the input, which is there before. Requested bytes: blocks are up to 1 MB larger.
    """
    block(x, sequences)  # weight codes and the libraries' workspaces are there from now on
    before = torch.cuda.memory_stats(x.device)["requested_bytes.all.current"]
    out, balance = block(x, sequences)
    after = torch.cuda.memory_stats(x.device)["requested_bytes.all.current"]
    outputs = [t.untyped_storage().nbytes() for t in (out, balance) if t is not None]
    return after - before + x.nbytes - sum(outputs)


def _fill(block: Block) -> None:
    """Random weights of a usual size, cheaply: a period of a million values, for blocks of a billion."""
    values = torch.randn(2**20 - 3, generator=torch.Generator().manual_seed(0)) * 0.02
    with torch.no_grad():
        for parameter in block.parameters():
            flat, period = parameter.view(-1), values.to(parameter.device)
            for start in range(0, flat.numel(), period.numel()):
                part = flat[start : start + period.numel()]
                part.copy_(period[: part.numel()])
        for buffer in block.buffers():
            buffer.zero_()


def block_config(name: str) -> ModelConfig:
    """Sizes of a preset's layers, with 8 experts: how many there are does not change what a token keeps."""
    return dataclasses.replace(load_config([f"model={name}"]).model, experts=8, groups=1, kept_groups=1)


def table(device: torch.device, tokens: int = 128) -> Iterator[str]:
    """The table in Markdown, line by line; on a GPU with the allocator's count beside the sum of what was observed."""
    gpu = device.type == "cuda"
    more = " sum of these | allocator | ratio |" if gpu else ""
    yield f"| layer of | recipe | contract | observed | ratio to BF16 | router's numbers | padding | exchange plan |{more}"
    yield "|---|---|--:|--:|--:|--:|--:|--:|" + ("--:|--:|--:|" if gpu else "")
    for name in BLOCKS:
        config, baseline = block_config(name), None
        for words in RECIPES:
            recipe = load_config([f"recipe={words[0]}", *(f"recipe.{word}" for word in words[1:])]).recipe
            kept = observed_bytes(config, recipe, tokens, device)
            baseline = baseline or kept.tensors
            more = f" {kept.total:,.0f} | {kept.allocated:,.0f} | {kept.allocated / kept.total:.3f} |" if gpu else ""
            yield (
                f"| {name} | {' '.join(words)} | {contract_bytes(config, recipe):,} | {kept.tensors:,.0f} "
                f"| {kept.tensors / baseline:.3f} | {kept.router:,.0f} | {kept.padding:,.0f} | {kept.plan:,.0f} |{more}"
            )


if __name__ == "__main__":
    for line in table(torch.device(sys.argv[1] if len(sys.argv) > 1 else "cpu")):
        print(line, flush=True)
