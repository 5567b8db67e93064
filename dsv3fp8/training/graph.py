"""A whole optimizer step as one CUDA graph: recorded once, replayed with other tokens, without Python between its kernels.

For models so small that launching their kernels takes longer than running them. The graph keeps the memory of a step for
itself, beside what steps outside of it and validation take: `training.cuda_graph=null` takes it where both fit.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dsv3fp8.config import RunConfig
from dsv3fp8.errors import UserError
from dsv3fp8.kernels import outer
from dsv3fp8.kernels.backend import Choice
from dsv3fp8.kernels.explain import reads_counts
from dsv3fp8.model.manifest import linear_shapes
from dsv3fp8.model.targets import Totals
from dsv3fp8.parallel.ranks import ALONE, Ranks
from dsv3fp8.precision import cast_meter, ledger
from dsv3fp8.training.optimizer import MOMENT_DTYPES, AdamW
from dsv3fp8.training.step import StepResult, Window, count_step, moved, take_step

if TYPE_CHECKING:
    from dsv3fp8.data.batches import Batch
    from dsv3fp8.model.transformer import Transformer

WARM_UP = 2  # steps of the shape before it is recorded: kernels are compiled and libraries make their plans
# What has to be free beside a graph, in sizes of the graph: a step outside of it, whose blocks lie a little differently.
ROOM = 1.1
SYNCHRONIZING = "called a synchronizing CUDA operation"  # torch's words for what no graph can hold
PROTOTYPE = "Synchronization debug mode is a prototype feature"  # and, once, about telling us so


def reasons_to_launch(config: RunConfig, device: torch.device) -> list[str]:
    """Why the steps of a run cannot be recorded on a device; empty where they can."""
    if device.type != "cuda":
        return [f"there are CUDA graphs on a CUDA GPU alone, not on {device.type}"]
    model, moments = config.model, config.optimizer.moments
    reasons = []
    if config.data.isolate_documents:
        reasons.append("data.isolate_documents=true keeps documents apart, which lie differently in every step")
    if config.parallel.expert > 1:
        reasons.append(f"parallel.expert={config.parallel.expert} reads how many rows go to which process")
    if config.parallel.dp_shard > 1:
        reasons.append(f"parallel.dp_shard={config.parallel.dp_shard} gathers weights in hooks, which are not recorded")
    update = outer.choose("optimizer", device, MOMENT_DTYPES[moments])
    if update.backend != "triton":
        reasons.append(f"the update in torch reads back whether a step counts ({update.reason})")
    against = reads_counts(config.recipe, device, linear_shapes(model)) if model.has_experts else None
    if against is not None:
        reasons.append(f"a step reads counts back: {against}")
    return reasons


def choose_steps(config: RunConfig, device: torch.device) -> Choice:
    """How a run takes its steps, as the manifest tells it; `training.cuda_graph=true` has been checked before."""
    if config.training.cuda_graph is False:
        return Choice("launched", "steps, kernel by kernel: training.cuda_graph=false")
    if reasons := reasons_to_launch(config, device):
        return Choice("launched", f"steps, kernel by kernel: {'; '.join(reasons)}")
    return Choice("graph", f"steps, recorded as a CUDA graph after {WARM_UP} that are launched, and replayed")


class StepGraph:
    """Takes optimizer steps with the results of `train_step`, bit for bit, from a graph where it can.

    Steps of another shape, with documents to keep apart, or looked at by a cast meter, a ledger or a profiler are taken
    as `train_step` takes them. All ranks do the same: what one of them has to launch is launched by all, since NCCL knows no
    sum that one rank replays and another launches.
    """

    def __init__(
        self,
        model: "Transformer",
        optimizer: AdamW,
        clip_norm: float,
        ranks: Ranks = ALONE,
        launched: Callable[[str], None] | None = None,
    ) -> None:
        """launched: told in one line why all steps are launched after all; without it that is an error, and so is no room."""
        self._model, self._optimizer, self._clip_norm = model, optimizer, clip_norm
        self._ranks, self._launched = ranks, launched
        self._device = next(iter(optimizer.parameters.values())).device
        self._shapes: list[torch.Size] = []
        self._taken = 0  # steps of these shapes
        self._given_up = False  # on all ranks
        self._last = False  # whether the step at hand is the last before the recording
        self._waits: str | None = None  # what a step was seen to wait for
        self._graph: torch.cuda.CUDAGraph | None = None
        self._windows: list[Window] = []
        self._lr = torch.zeros((), dtype=torch.float64, device=self._device)
        self._found: tuple[Tensor, Tensor] | None = None
        self._addresses: tuple[int, ...] = ()

    def step(self, micro_batches: Sequence["Batch"], lr: float) -> StepResult:
        """As `train_step`."""
        totals, tokens = count_step(micro_batches, self._model.config.mtp_depth, self._ranks)
        windows = [moved(batch, self._device) for batch in micro_batches]
        if self._is_ready(micro_batches) and (self._graph is not None or self._record(windows, totals)):
            figures, load = self._replay(windows, lr)
        else:
            figures, load = self._launch(windows, totals, lr)
        return StepResult(figures, totals, tokens, load)

    def close(self) -> None:
        """Let go of the graph and its memory. Before ranks part: NCCL waits for the graphs that hold its work."""
        self._graph = None

    def _is_ready(self, micro_batches: Sequence["Batch"]) -> bool:
        """Whether the graph may take this step, on all ranks. Counts the steps that go before its recording."""
        if self._given_up:
            return False
        return not self._ranks.largest(not self._counts(micro_batches))

    def _counts(self, micro_batches: Sequence["Batch"]) -> bool:
        """`_is_ready` as far as this rank is concerned."""
        watched = cast_meter.active_meter() is not None or ledger.active() is not None or torch._C._autograd._profiler_enabled()
        self._last = False
        if watched or any(batch.documents is not None for batch in micro_batches):
            return False
        shapes = [batch.tokens.shape for batch in micro_batches]
        if self._graph is None and shapes != self._shapes:
            self._shapes, self._taken = shapes, 0
        self._taken += 1
        self._last = self._graph is None and self._taken == WARM_UP
        return shapes == self._shapes and self._taken > WARM_UP

    def _launch(self, windows: list[Window], totals: Totals, lr: float) -> tuple[Tensor, Tensor]:
        given = self._model, self._optimizer, windows, totals, lr, self._clip_norm, self._ranks
        if not self._last or self._device.type != "cuda":
            return take_step(*given)
        # The last one before the recording, whose end in an error would leave no state to go on from.
        with _watching() as waits:
            taken = take_step(*given)
        self._waits = waits[0] if waits else None
        return taken

    def _record(self, windows: list[Window], totals: Totals) -> bool:
        """Whether the step is recorded now, on all ranks; it is not taken yet, neither way."""
        problem = self._waits
        if not self._ranks.largest(problem is not None):  # recorded by all, or by none
            problem = self._capture(windows, totals)
            if not self._ranks.largest(problem is not None):
                return True
        self._drop()
        problem = problem or "another process could not"
        if self._launched is None:
            raise UserError(f"training.cuda_graph=true: the step cannot be recorded ({problem}); set it to false")
        self._given_up = True
        self._launched(problem)
        return False

    def _capture(self, windows: list[Window], totals: Totals) -> str | None:
        """Records; nothing of the step runs. Why there is no graph, where one can go on without it; UserError elsewhere.

        NCCL's work is recorded like any other, without a word between the ranks. Only what this thread does can spoil the
        recording: NCCL's watchdog and a checkpoint's writer are threads of their own that may look at earlier work meanwhile.
        """
        self._windows = [(tokens.clone(), None) for tokens, _ in windows]
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self._device)
        graph, problem = torch.cuda.CUDAGraph(), None
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                try:
                    given = self._model, self._optimizer, self._windows, totals, self._lr, self._clip_norm, self._ranks
                    self._found = take_step(*given)
                except torch.OutOfMemoryError as error:  # which the recording survives: it ends as it should
                    problem = _first_line(error)
        except RuntimeError as error:
            # Of what the allocator and the stream are in then, torch promises nothing.
            raise UserError(
                f"the step cannot be recorded as a CUDA graph ({_first_line(error)}): set training.cuda_graph=false"
            ) from error
        if problem is None and self._launched is not None:
            problem = _lack_of_room(torch.cuda.memory_reserved(self._device) - before, torch.cuda.mem_get_info(self._device)[0])
        if problem is None:
            self._graph, self._addresses = graph, self._optimizer.addresses
        return problem

    def _drop(self) -> None:
        """All that a recording that came to nothing has left: no kernel of it ran, but Python did."""
        self._graph, self._windows, self._found = None, [], None
        self._optimizer.zero_grad()
        self._model.invalidate_codes()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _replay(self, windows: list[Window], lr: float) -> tuple[Tensor, Tensor]:
        assert self._graph is not None
        assert self._found is not None
        for (into, _), (tokens, _) in zip(self._windows, windows, strict=True):
            into.copy_(tokens)
        self._lr.fill_(lr)
        self._optimizer.point(self._addresses)
        self._graph.replay()
        # Weights moved behind the back of whoever watches their versions.
        self._model.invalidate_codes()
        figures, load = self._found
        return figures, load.clone()


@contextmanager
def _watching() -> Iterator[list[str]]:
    """What is seen to wait for the GPU inside, once one has left it."""
    waits: list[str] = []
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    told: dict[Any, int] = {}  # what else was seen is said after all, once each
    for each in seen:
        if SYNCHRONIZING in str(each.message):
            waits.append(f"it waits for the GPU, at {each.filename}:{each.lineno}")
        elif PROTOTYPE not in str(each.message):
            warnings.warn_explicit(str(each.message), each.category, each.filename, each.lineno, registry=told)


def _lack_of_room(graph: int, free: int) -> str | None:
    """Why a graph of so many bytes may not stay: steps outside of it (those that count, say) need as much again."""
    if free >= ROOM * graph:
        return None
    return (
        f"it keeps {graph / 1e9:.1f} GB, and {free / 1e9:.1f} GB are left for the steps outside of it, which take as much "
        "(training.cuda_graph=true tries all the same)"
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
