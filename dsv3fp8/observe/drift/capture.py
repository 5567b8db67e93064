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
from dsv3fp8.precision.tiles import Operand, QuantizedTensor
from dsv3fp8.training.checkpoint import list_checkpoints, load_file, load_model
from dsv3fp8.training.host import keep_freed_memory, limit_memory
from dsv3fp8.training.run_directory import RunDirectory
from dsv3fp8.training.state import SCALE_STATE, load_state


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

    def note_kernel(self, op: str, gemm: str, backend: str, *operands: Operand) -> None:
        super().note_kernel(op, gemm, backend, *operands)
        quantized = [x for x in operands if isinstance(x, QuantizedTensor)]
        if len(quantized) != 2 or any(0 in x.shape for x in quantized):
            return
        a, b = quantized
        if gemm == "fprop":
            newer = self._layer_of.get(op) != self.scope
            self._layer_of[op] = self.last_layer = self.scope
        else:
            newer = False
        if newer or (op, gemm) not in self.captured:
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


def describe_run(run: Path) -> str:
    """One line: which checkpoint the operands come from. Raises UserError where there is none, or no text to run it on."""
    _, trained, step = _checkpoint(run)
    _tokenizer(run)
    return f"model {trained.model.name}, trained under recipe {trained.recipe.name}, step {step}"


def _checkpoint(run: Path) -> tuple[Path, RunConfig, int]:
    found = list_checkpoints(RunDirectory(run).checkpoints)
    if not found:
        raise UserError(f"run={run} has no checkpoint: give the run directory of `dsv3fp8 train`, or leave the key out")
    step, checkpoint = found[-1]
    return checkpoint, RunConfig.from_dict(load_state(checkpoint)[1]), step


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
    saved = load_file(checkpoint, "model")
    # Amax histories and frozen scales are the training recipe's; these recipes keep none.
    load_model(model, {name: tensor for name, tensor in saved.items() if not SCALE_STATE.fullmatch(name)}, checkpoint)
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
