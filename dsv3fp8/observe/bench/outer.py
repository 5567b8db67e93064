"""What lies outside the layers, by the bytes that it moves, beside a device copy: embedding, loss and AdamW."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dsv3fp8.kernels import outer
from dsv3fp8.observe.bench.casts import COPY, copy_way
from dsv3fp8.observe.bench.operands import Setting, random
from dsv3fp8.observe.bench.rates import Case, Table, Way
from dsv3fp8.ops.adamw import Update

BETAS, EPS, DECAY, LR = (0.9, 0.95), 1e-8, 0.1, 1e-4
MADE = tuple[Callable[[], object], str]


def outer_tables(setting: Setting) -> list[Table]:
    """One row for each kernel, on tensors larger than the L2 cache."""
    tokens, vocabulary = setting.sizes.logits
    rows, dim = setting.sizes.cast
    logits, x, updated = tokens * vocabulary, rows * dim, setting.sizes.updated
    cases = [
        _case(setting, "loss of FP32 logits", 4.0 * logits, lambda: _loss(setting, backward=False)),
        _case(setting, "its backward → BF16", 6.0 * logits, lambda: _loss(setting, backward=True)),
        _case(setting, "embedding → BF16", 6.0 * x, lambda: _embedding(setting, backward=False)),
        _case(
            setting, "its backward, FP32 gradient", 2.0 * x + 4.0 * vocabulary * dim, lambda: _embedding(setting, backward=True)
        ),
        _case(setting, "AdamW, FP32 moments", 28.0 * updated, lambda: _adamw(setting, torch.float32)),
        _case(setting, "AdamW, BF16 moments", 20.0 * updated, lambda: _adamw(setting, torch.bfloat16)),
    ]  # fmt: skip
    about = "every tensor read and written once; the ratio is the share of a copy's rate"
    return [Table("outer", "Outside the layers", "GB/s", COPY, about, cases)]


def _case(setting: Setting, name: str, work: float, make: Callable[[], MADE]) -> Case:
    def build() -> list[Way]:
        call, note = make()
        return [Way("ours", lambda: [call], note=note), copy_way(setting)]

    return Case(name, work, build)


def _loss(setting: Setting, backward: bool) -> MADE:
    tokens, vocabulary = setting.sizes.logits
    logits = random(setting, tokens, vocabulary, dtype=torch.float32)
    targets = torch.randint(vocabulary, (tokens,), device=setting.device)
    note = str(outer.choose("cross_entropy", setting.device, torch.float32))
    if not backward:
        return lambda: outer.cross_entropy_forward(logits, targets), note
    loss, lse = outer.cross_entropy_forward(logits, targets)
    dloss = torch.full_like(loss, 1 / tokens)
    return lambda: outer.cross_entropy_backward(logits, lse, targets, dloss, torch.bfloat16), note


def _embedding(setting: Setting, backward: bool) -> MADE:
    rows, dim = setting.sizes.cast
    vocabulary = setting.sizes.logits[1]
    ids = torch.randint(vocabulary, (rows,), device=setting.device)
    note = str(outer.choose("embedding", setting.device, torch.bfloat16))
    if backward:
        dx = random(setting, rows, dim)
        return lambda: outer.embedding_backward(ids, dx, vocabulary), note
    weight = random(setting, vocabulary, dim, dtype=torch.float32)
    return lambda: outer.embedding_forward(ids, weight, torch.bfloat16), note


def _adamw(setting: Setting, moments: torch.dtype) -> MADE:
    """Eight weights of equal size."""
    part = setting.sizes.updated // 8
    weights, gradients = ([random(setting, part, dtype=torch.float32) for _ in range(8)] for _ in range(2))
    first, second = ([torch.zeros(part, dtype=moments, device=setting.device) for _ in range(8)] for _ in range(2))
    update = Update(weights, first, second, [True] * 8, BETAS, EPS, DECAY)
    applied = torch.ones((), dtype=torch.bool, device=setting.device)
    factor = torch.ones((), dtype=torch.float64, device=setting.device)
    note = str(outer.choose("optimizer", setting.device, moments))
    return lambda: update.apply(gradients, LR, applied, factor), note
