"""Operands of a checkpoint's GEMMs: one forward and backward of a run's model, with a ledger that keeps what kernels read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import dsv3fp8
from dsv3fp8.config import RunConfig, load_config
from dsv3fp8.data import Tokenizer, load_tokenizer
from dsv3fp8.data.tokenizer import IdTokenizer
from dsv3fp8.errors import UserError
from dsv3fp8.model.transformer import Transformer
from dsv3fp8.precision import ledger
from dsv3fp8.precision.recipe import GemmSpec
from dsv3fp8.precision.tiles import Operand, QuantizedTensor
from dsv3fp8.training.checkpoint import Checkpoint
from dsv3fp8.training.checkpoint_directory import list_checkpoints
from dsv3fp8.training.host import keep_freed_memory, limit_memory
from dsv3fp8.training.run_directory import RunDirectory
from dsv3fp8.training.state import load_state, load_weights


@dataclass(frozen=True)
class Captured:
    """The operands of one GEMM, a [M, K] @ b [N, K]^T, as the kernel was handed them."""

    op: str
    gemm: str
    a: QuantizedTensor
    b: QuantizedTensor


class OperandLedger(ledger.Ledger):
    """Keeps the first quantized operands of every op's fprop, dgrad and wgrad in the model's last layer.

    In forward a later layer replaces an earlier one; backward begins with the last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.captured: dict[tuple[str, str], Captured] = {}
        self.last_layer = ""
        self._layer_of: dict[str, str] = {}

    def look_at_gemm(self, spec: GemmSpec, gemm: str, operands: tuple[Operand, Operand], product: Tensor) -> None:
        # One call per expert, also where one launch computes them all.
        op, (a, b) = spec.op, operands
        if not (isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor)) or 0 in (*a.shape, *b.shape):
            return
        if gemm == "fprop":
            newer = self._layer_of.get(op) != self.scope
            self._layer_of[op] = self.last_layer = self.scope
        else:
            newer = False
        if newer or (op, gemm) not in self.captured:
            if gemm == "wgrad" and op.startswith("expert_"):
                a, b = live_along_k(a, b)
            self.captured[op, gemm] = Captured(op, gemm, a, b)

    def of_last_layer(self) -> dict[tuple[str, str], Captured]:
        """By op and GEMM."""
        return {key: found for key, found in self.captured.items() if self._layer_of.get(found.op) == self.last_layer}


def capture(run: Path, recipe: str, tokens: int, device: torch.device) -> Mapping[tuple[str, str], Captured]:
    """Operands of the last layer of a run's newest checkpoint, under a recipe by name, on text of this package's sources.

    tokens: how many at least the model is run on, in windows of the context it was trained on. Raises UserError where
    the run has no checkpoint.
    """
    if device.type == "cpu":
        keep_freed_memory()
        limit_memory()
    model, tokenizer, context = _load(run, recipe, device)
    windows = _windows(tokenizer, -(-tokens // context), context).to(device)
    observed = OperandLedger()
    with ledger.observe_ops(observed):
        losses = model(windows, None, ahead=False)
        model.objective(losses, losses.totals).backward()
    return observed.of_last_layer()


def live_along_k(a: QuantizedTensor, b: QuantizedTensor) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Both operands without the zeros that end their K: on a GPU an expert's rows are padded to whole tiles with them."""
    live = ((a.codes.view(torch.uint8) & 0x7F) != 0).any(0) | ((b.codes.view(torch.uint8) & 0x7F) != 0).any(0)
    k = int(live.nonzero().max()) + 1 if bool(live.any()) else a.shape[1]
    return a.transposed().rows(0, k).transposed(), b.transposed().rows(0, k).transposed()


def check_run(run: Path) -> None:
    """Raise UserError for a run whose newest checkpoint cannot be loaded: reads it whole, runs nothing."""
    describe_run(run)
    _load(run, "rowwise", torch.device("cpu"))


def describe_run(run: Path) -> str:
    """One line: which checkpoint the operands come from. Raises UserError where there is none, or no text to run it on."""
    _, trained, step = _checkpoint(run)
    _tokenizer(run)
    return f"model {trained.model.name}, trained under recipe {trained.recipe.name}, step {step}"


def _checkpoint(run: Path) -> tuple[Checkpoint, RunConfig, int]:
    found = list_checkpoints(RunDirectory(run).checkpoints)
    if not found:
        raise UserError(f"run={run} has no checkpoint: give the run directory of `dsv3fp8 train`, or leave the key out")
    checkpoint = Checkpoint(found[-1][1])
    state, trained = load_state(checkpoint)
    return checkpoint, RunConfig.from_dict(trained), state.step


def _tokenizer(run: Path) -> Tokenizer:
    tokenizer = load_tokenizer(RunDirectory(run).tokenizer)
    if isinstance(tokenizer, IdTokenizer):
        raise UserError(f"run={run} was trained on ids, and no text is known that gives them: take a run on text")
    return tokenizer


def _load(run: Path, recipe: str, device: torch.device) -> tuple[Transformer, Tokenizer, int]:
    checkpoint, trained, _ = _checkpoint(run)
    with device:
        model = Transformer(trained.model, load_config([f"recipe={recipe}"]).recipe)
    model.initialize(seed=0)  # defines what a checkpoint leaves out, such as counters of the current step
    load_weights(checkpoint, model, new_scales=True)
    model.train()
    return model, _tokenizer(run), trained.training.context


def _windows(tokenizer: Tokenizer, count: int, context: int) -> Tensor:
    """Ids [count, context + 1] of the package's own sources, in the order of their names, repeated if they are short."""
    ids: list[int] = []
    paths = sorted(Path(dsv3fp8.__file__).parent.rglob("*.py"))
    while len(ids) < count * (context + 1):
        for path in paths:
            ids += [tokenizer.eod, *(int(each) for each in tokenizer.encode(path.read_text(encoding="utf-8")))]
            if len(ids) >= count * (context + 1):
                break
    return torch.tensor(ids[: count * (context + 1)]).view(count, context + 1)
