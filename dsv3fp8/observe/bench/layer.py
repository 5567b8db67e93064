"""One MoE layer of DeepSeek-V3's size with eight experts, forward and backward, under several recipes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from dsv3fp8.model.block import Block
from dsv3fp8.model.config import ModelConfig
from dsv3fp8.model.sequence import Sequences
from dsv3fp8.observe.bench.breakdown import breakdown
from dsv3fp8.observe.bench.casts import COPY, copy_way
from dsv3fp8.observe.bench.operands import Setting, random
from dsv3fp8.observe.bench.plain import PlainSubject
from dsv3fp8.observe.bench.rates import Call, Case, Table, Way
from dsv3fp8.observe.bench.timing import one_line
from dsv3fp8.observe.kept_bytes import block_config
from dsv3fp8.ops.weights import WeightCodes
from dsv3fp8.precision.recipe import Recipe

PLAIN, COMPILED = "torch BF16", "torch.compile BF16"
PARTS = ("recipes", "eager", "compiled", "weights", "roofline", "breakdown")
NEEDS = {"weights": ("recipes",), "breakdown": ("recipes", "eager", "compiled")}
"""Parts that look at layers which other parts run: one of these has to be picked too."""
BOTH_WAYS = "forward + backward"


class Running(Protocol):
    """A layer that can run, and its input [T, D]."""

    x: Tensor

    def forward(self) -> tuple[Tensor, ...]: ...

    def forward_backward(self) -> object: ...


@dataclass
class Subject:
    """A block with its input [T, D] and the gradients that come in."""

    block: Block
    x: Tensor
    sequences: Sequences
    dy: Tensor

    @staticmethod
    def of(config: ModelConfig, recipe: Recipe, setting: Setting, tokens: int) -> Subject:
        with torch.device("meta"):
            block = Block(config, recipe, dense=False)
        block.to_empty(device=setting.device)
        with torch.no_grad():
            for parameter in block.parameters():
                _ = parameter.fill_(1.0) if parameter.dim() == 1 else parameter.normal_(std=0.02)
            for buffer in block.buffers():
                buffer.zero_()
        compute = torch.bfloat16 if recipe.compute == "bf16" else torch.float32
        x, dy = (random(setting, tokens, config.dim, dtype=compute) for _ in range(2))
        sequences = Sequences.of(config, torch.zeros(1, tokens, dtype=torch.int64, device=setting.device), None)
        return Subject(block, x.requires_grad_(), sequences, dy / tokens)

    def forward(self) -> tuple[Tensor, ...]:
        out, balance = self.block(self.x, self.sequences)
        return (out,) if balance is None else (out, balance)

    def forward_backward(self) -> object:
        """As in a step with one micro-batch: gradients are handed over, not added to others."""
        out = self.forward()
        grads = [self.dy, *(torch.full_like(t, 1e-4) for t in out[1:])]
        return torch.autograd.grad(out, [self.x, *self.block.parameters()], grads, allow_unused=True)

    def cast_weights(self) -> object:
        """Every weight's codes, for fprop and dgrad, as the first forward and backward of a step make them."""
        for codes, weight in self.weights():
            codes.invalidate()
            codes.fprop(weight)
            codes.dgrad(weight)
        return None

    def weights(self) -> list[tuple[WeightCodes, Tensor]]:
        """What casts each weight, and the weight's master."""
        found = []
        for module in self.block.modules():
            for name, codes in vars(module).items():
                if isinstance(codes, WeightCodes):
                    master = getattr(module, "weight" if name == "codes" else name.removesuffix("_codes"))
                    found.append((codes, master))
        return found


def layer_subjects(setting: Setting, recipes: Sequence[Recipe], parts: Collection[str], notes: list[str]) -> dict[str, Running]:
    """The same layer under each recipe, and as plain PyTorch has it, eager and under torch.compile, as far as `parts` asks.

    One that cannot be built costs no other: why goes to `notes`.
    """
    name, tokens = setting.sizes.layer
    config = block_config(name)
    makers: dict[str, Callable[[], Running]] = {
        recipe.name: partial(Subject.of, config, recipe, setting, tokens) for recipe in recipes if "recipes" in parts
    }
    if "eager" in parts:
        makers[PLAIN] = partial(PlainSubject, config, tokens, setting.device, False)
    if "compiled" in parts:
        makers[COMPILED] = partial(PlainSubject, config, tokens, setting.device, True)
    made: dict[str, Running] = {}
    for subject, make in makers.items():
        try:
            made[subject] = make()
        except Exception as error:
            notes.append(f"{subject} is left out: {one_line(error)}")
    return made


def layer_table(setting: Setting, subjects: dict[str, Running]) -> Table:
    """Forward, and forward with backward; the last subject is the peer."""
    name, tokens = setting.sizes.layer

    def ways(call: str) -> list[Way]:
        # torch.compile makes graphs of its own accord or not at all: what is timed is what it launches.
        return [Way(n, partial(_calls, getattr(subject, call))) for n, subject in subjects.items()]

    cases = [Case("forward", 1.0, partial(ways, "forward")), Case(BOTH_WAYS, 1.0, partial(ways, "forward_backward"))]
    about = f"one MoE layer of {name} with 8 experts, {tokens} tokens; weight casts are made before the clock starts"
    return Table("layer", f"A MoE layer of {name}", "ms", list(subjects)[-1], about, cases)


def weight_tables(setting: Setting, subjects: dict[str, Running]) -> list[Table]:
    """The casts of all weights under each recipe that quantizes them: they happen once an optimizer step."""
    about = "FP32 masters read once, codes for fprop and for dgrad written; the ratio is the share of a copy's rate"
    cases = []
    for name, subject in subjects.items():
        if isinstance(subject, Subject) and any(codes.quantizers.gemm.weight.quantized for codes, _ in subject.weights()):
            work = 6.0 * sum(weight.numel() for _, weight in subject.weights())
            cases.append(Case(name, work, partial(_weight_ways, setting, subject)))
    title = "Weight casts of the layer, once an optimizer step"
    return [Table("layer, weight casts", title, "GB/s", COPY, about, cases)] if cases else []


def _weight_ways(setting: Setting, subject: Subject) -> list[Way]:
    return [Way("ours", partial(_calls, subject.cast_weights)), copy_way(setting)]


def _calls(call: Call) -> list[Call]:
    return [call]


def layer_memory(setting: Setting, subjects: dict[str, Running], name: str) -> dict[str, float | None]:
    """GB that forward and backward allocate at most above what lies there before, and bytes a token kept between the two."""
    if setting.device.type != "cuda":
        return {"peak_gb": None, "kept_bytes_per_token": None}
    subject = subjects[name]
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(setting.device)
    resting = torch.cuda.memory_allocated(setting.device)
    subject.forward_backward()
    peak = torch.cuda.max_memory_allocated(setting.device) - resting
    before = torch.cuda.memory_stats(setting.device)["requested_bytes.all.current"]
    out = subject.forward()
    after = torch.cuda.memory_stats(setting.device)["requested_bytes.all.current"]
    # The norm keeps the input, which is there before; the outputs are not kept for backward.
    kept = after - before + subject.x.nbytes - sum(t.untyped_storage().nbytes() for t in out)
    return {"peak_gb": peak / 1e9, "kept_bytes_per_token": kept / subject.x.shape[0]}


def layer_breakdown(setting: Setting, subject: Running, ms: float | None) -> dict[str, Any]:
    """Kernels of one forward with backward."""
    return breakdown(subject.forward_backward, setting.device, ms)
