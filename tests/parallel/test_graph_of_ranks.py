"""CUDA graphs of several ranks: all take a step the same way. Played without a GPU, and on two of them."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from one_step import made
from processes import Ranks, on_ranks
from support import build, nano
from support import recipe as recipes

from dsv3fp8.data import Batch
from dsv3fp8.parallel import ranks as rank_room
from dsv3fp8.parallel import reduction
from dsv3fp8.precision.cast_meter import measure_casts
from dsv3fp8.training import graph as graphs
from dsv3fp8.training.config import OptimizerConfig
from dsv3fp8.training.graph import StepGraph
from dsv3fp8.training.optimizer import AdamW
from dsv3fp8.training.step import take_step, train_step


def tokens(seed: int, length: int = 20, rows: int = 1) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [Batch(torch.randint(96, (rows, length + 1), generator=generator), None)]


class Played(StepGraph):
    """Takes a step wherever a graph would; `failing`: the ranks that cannot record."""

    failing: tuple[int, ...]
    happened: list[str]

    def _capture(self, *_: Any) -> str | None:
        if self._ranks.index in self.failing:
            return "no memory"
        self._graph = object()  # type: ignore[assignment]
        return None

    def _replay(self, windows: Any, lr: float) -> Any:
        self.happened.append("replayed")
        totals, _ = graphs.count_step([Batch(window, None) for window, _ in windows], 2, self._ranks)
        return take_step(self._model, self._optimizer, windows, totals, lr, self._clip_norm, self._ranks)

    def _launch(self, *given: Any) -> Any:
        self.happened.append("launched")
        return super()._launch(*given)


def played_steps(ranks: Ranks, failing: tuple[int, ...]) -> tuple[list[str], list[str], bool]:
    """(what became of each step, what was said, whether the weights are those of `train_step`)."""
    weights, said = [], []
    for plain in (True, False):
        model, optimizer = made("bf16", layers=1, mtp_depth=2)
        steps = Played(model, optimizer, 1.0, ranks, said.append)
        steps.failing, steps.happened = failing, []
        for number in range(9):
            given = tokens(10 * number + ranks.index, length=16 if (number, ranks.index) == (6, 0) else 20)
            with measure_casts() if (number, ranks.index) in ((1, 0), (5, 1)) else nullcontext():
                if plain:
                    train_step(model, optimizer, given, 1e-3, 1.0, ranks)
                else:
                    steps.step(given, 1e-3)
        weights.append([each.detach().clone() for each in model.parameters()])
    return steps.happened, said, all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_what_one_rank_has_to_launch_all_launch() -> None:
    """Watched on rank 0 (step 1) or on rank 1 (step 5), of another shape on rank 0 (step 6)."""
    expected = ["launched"] * 3 + ["replayed", "replayed", "launched", "launched", "replayed", "replayed"]
    assert on_ranks(2, played_steps, ()) == [(expected, [], True)] * 2


def test_where_one_rank_cannot_record_all_launch() -> None:
    (first, of_first, same), (second, of_second, also) = on_ranks(2, played_steps, (1,))
    assert first == second == ["launched"] * 9
    assert (of_first, of_second) == (["another process could not"], ["no memory"])
    assert same
    assert also


# What the kernels of a GPU take whole, so that a step of it can be recorded.
WIDE = {
    "vocab_size": 512, "dim": 256, "heads": 2, "q_latent": 128, "kv_latent": 128, "head_nope": 128, "head_rope": 64,
    "head_v": 128, "ffn": 256, "expert_ffn": 128, "experts": 8, "context": 128,
}  # fmt: skip


def steps_on_gpu(ranks: Ranks, recipe: str, graphed: bool, behind: bool = False) -> dict[str, Any]:
    """Losses and weights after steps of two micro-batches, one of which is launched in any case.

    behind: gradients travel when all of them are made.
    """
    rank_room.BUCKET_ELEMENTS = 1 << 16  # many buckets for a small model
    if behind:
        reduction.GradientSums._made = lambda *_: None
    model = build(nano(**WIDE), recipes(recipe)).to(torch.device("cuda", ranks.local))
    model.invalidate_codes()
    optimizer = AdamW(model.parameter_groups(), OptimizerConfig(lr=1e-3, weight_decay=0.1))
    graph = StepGraph(model, optimizer, 1.0, ranks)
    losses = []
    for number in range(8):
        given = [*tokens(20 * number + ranks.index, 128, 4), *tokens(20 * number + 10 + ranks.index, 128, 4)]
        with measure_casts() if number == 5 else nullcontext():
            lr = 1e-3 * (number + 1)
            step = graph.step(given, lr) if graphed else train_step(model, optimizer, given, lr, 1.0, ranks)
        losses += [step.loss, step.grad_norm, float(step.expert_load.sum())]
    recorded = graph._graph is not None
    graph.close()
    return {"losses": losses, "weights": dict(model.state_dict()), "recorded": recorded}


@pytest.mark.gpu(2)
@pytest.mark.parametrize("recipe", ["dsv3", "bf16"])
def test_replayed_steps_of_two_gpus_equal_launched_ones(recipe: str) -> None:
    """And those whose gradients travel behind the backward pass."""
    launched = on_ranks(2, steps_on_gpu, recipe, False, device="cuda")
    behind = on_ranks(2, steps_on_gpu, recipe, False, True, device="cuda")
    replayed = on_ranks(2, steps_on_gpu, recipe, True, device="cuda")
    assert [each["recorded"] for each in launched + replayed] == [False, False, True, True]
    for each in (launched[1], *behind, *replayed):
        assert each["losses"] == launched[0]["losses"]
        assert all((each["weights"][name] == of_first).all() for name, of_first in launched[0]["weights"].items())
