"""A whole optimizer step as one CUDA graph: recorded once, replayed with other tokens, without Python between its kernels.

For models so small that launching their kernels takes longer than running them. The graph keeps the memory of a step for
itself, beside what steps outside of it take, so that it is the wrong thing for a model that fills its GPU.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsv3fp8.errors import UserError
from dsv3fp8.model.targets import Totals
from dsv3fp8.precision import flush, ledger
from dsv3fp8.training.optimizer import AdamW
from dsv3fp8.training.step import StepResult, Window, count_step, moved, take_step

if TYPE_CHECKING:
    from dsv3fp8.data.batches import Batch
    from dsv3fp8.model.transformer import Transformer

WARM_UP = 2  # steps of the shape before it is recorded: kernels are compiled and libraries make their plans


class StepGraph:
    """Takes optimizer steps with the results of `train_step`, bit for bit, from a graph where it can.

    Steps of another shape, with documents to keep apart, or looked at by a flush meter, a ledger or a profiler are taken
    as `train_step` takes them.
    """

    def __init__(self, model: "Transformer", optimizer: AdamW, clip_norm: float) -> None:
        self._model, self._optimizer, self._clip_norm = model, optimizer, clip_norm
        self._device = next(iter(optimizer.parameters.values())).device
        self._shapes: list[torch.Size] = []
        self._taken = 0  # steps of these shapes
        self._graph: torch.cuda.CUDAGraph | None = None
        self._windows: list[Window] = []
        self._lr = torch.zeros((), dtype=torch.float64, device=self._device)
        self._found: tuple[Tensor, Tensor]
        self._addresses: tuple[int, ...] = ()

    def step(self, micro_batches: Sequence["Batch"], lr: float) -> StepResult:
        """As `train_step`."""
        totals, tokens = count_step(micro_batches, self._model.config.mtp_depth)
        windows = [moved(batch, self._device) for batch in micro_batches]
        if self._replays(micro_batches):
            if self._graph is None:
                self._record(windows, totals)
            figures, load = self._replay(windows, lr)
        else:
            figures, load = take_step(self._model, self._optimizer, windows, totals, lr, self._clip_norm)
        return StepResult(figures, totals, tokens, load)

    def _replays(self, micro_batches: Sequence["Batch"]) -> bool:
        """Whether the graph may take this step. Counts the steps that go before its recording."""
        watched = flush.active_meter() is not None or ledger.active() is not None or torch._C._autograd._profiler_enabled()
        if watched or any(batch.documents is not None for batch in micro_batches):
            return False
        shapes = [batch.tokens.shape for batch in micro_batches]
        if self._graph is None and shapes != self._shapes:
            self._shapes, self._taken = shapes, 0
        self._taken += 1
        return shapes == self._shapes and self._taken > WARM_UP

    def _record(self, windows: list[Window], totals: Totals) -> None:
        self._windows = [(tokens.clone(), None) for tokens, _ in windows]
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._found = take_step(self._model, self._optimizer, self._windows, totals, self._lr, self._clip_norm)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"training.cuda_graph=true: the step cannot be recorded ({reason}); set it to false") from error
        self._addresses = self._optimizer.addresses
        self._graph = graph

    def _replay(self, windows: list[Window], lr: float) -> tuple[Tensor, Tensor]:
        assert self._graph is not None
        for (into, _), (tokens, _) in zip(self._windows, windows, strict=True):
            into.copy_(tokens)
        self._lr.fill_(lr)
        self._optimizer.point(self._addresses)
        self._graph.replay()
        # Weights moved behind the back of whoever watches their versions.
        self._model.invalidate_codes()
        figures, load = self._found
        return figures, load.clone()
