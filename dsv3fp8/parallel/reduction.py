"""What the ranks add up in a step, so that all of them take the same update.

Every rank has differentiated its share of the step's loss, whose means range over the tokens of all ranks: what is added up
here is divided by nothing. An expert has seen the tokens of all ranks of its group: only its replicas add up. Gradients
travel while backward still makes those of the layers before. Those of weights that are cut over ranks are none of these: FSDP
adds them up as it cuts them (`parallel/shard.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dsv3fp8.ops.accumulate import adding_up
from dsv3fp8.parallel.experts import expert_parameters
from dsv3fp8.parallel.placement import local_part
from dsv3fp8.parallel.ranks import Ranks, buckets, start_combining
from dsv3fp8.training.gradients import gradients

if TYPE_CHECKING:
    from dsv3fp8.model.transformer import Transformer

# Buckets under way at a time: they are what the sums take beside the gradients, 64 MiB each.
UNDER_WAY = 4


class GradientSums:
    """The FP32 gradients of one step, each to become its sum over the ranks that share its weight, in place.

    A bucket leaves as soon as the last micro-batch's backward has made all its gradients and the buckets before it have left.
    Their order is that of backward, from the layout of the model alone: NCCL wants one order on all ranks. A bucket holds the
    same gradients wherever it leaves, so that the bits are those of sums behind the backward pass.
    """

    def __init__(self, model: Transformer, parameters: list[nn.Parameter], ranks: Ranks) -> None:
        self._buckets: list[tuple[list[nn.Parameter], dist.ProcessGroup | None]] = []
        if ranks.count > 1:
            shared, experts = _split(model, [p for p in parameters if not isinstance(p, DTensor)], ranks)
            self._buckets = [(bucket, None) for bucket in buckets(shared)]
            if ranks.replicas is not None and ranks.replicas.size() > 1:
                self._buckets += [(bucket, ranks.replicas) for bucket in buckets(experts)]
            # The head's weight is read behind all layers, where it is not the embedding.
            forward = (model.embedding, *model.layers.parameters(), *model.parameters())
            position: dict[int, int] = {}
            for parameter in forward:
                position.setdefault(id(parameter), len(position))
            # Complete when the gradient of its first layer is, which backward comes to last.
            self._buckets.sort(key=lambda each: -min(position[id(parameter)] for parameter in each[0]))
        self._home = {id(parameter): number for number, (bucket, _) in enumerate(self._buckets) for parameter in bucket}
        self._missing = [{id(parameter) for parameter in bucket} for bucket, _ in self._buckets]
        self._left = 0  # buckets that have left
        self._under_way: deque[Callable[[], None]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """After an error streams come together again, so that a recording ends as it should; no host waits for others."""
        if error is not None and self._buckets and self._buckets[0][0][0].is_cuda:
            while self._under_way:
                self._under_way.popleft()()

    @contextmanager
    def backward(self, last: bool) -> Iterator[None]:
        """Around the backward pass of each micro-batch. last: no other comes after it."""
        if not last or not self._buckets:
            with adding_up():
                yield
            return
        parameters = [parameter for bucket, _ in self._buckets for parameter in bucket]
        hooks = [parameter.register_post_accumulate_grad_hook(self._made) for parameter in parameters]
        try:
            with adding_up(self._made):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def finish(self) -> None:
        """What has not left leaves; all are back when this returns, on a GPU for what is launched from now on."""
        while self._left < len(self._buckets):
            self._leave()
        while self._under_way:
            self._under_way.popleft()()

    def _made(self, parameter: Tensor) -> None:
        number = self._home.get(id(parameter))
        if number is None:  # an expert that has no replicas
            return
        # Autograd may tell of a weight whose gradient an op has added, too.
        self._missing[number].discard(id(parameter))
        while self._left < len(self._buckets) and not self._missing[self._left]:
            self._leave()

    def _leave(self) -> None:
        bucket, group = self._buckets[self._left]
        self._left += 1
        for parameter in bucket:
            if parameter.grad is None:  # not used by this rank's tokens, but maybe by another's
                parameter.grad = torch.zeros_like(parameter)
        if len(self._under_way) == UNDER_WAY:
            self._under_way.popleft()()
        self._under_way.append(start_combining(gradients(bucket), dist.ReduceOp.SUM, group))


def add_up_figures(model: Transformer, sums: Tensor, ranks: Ranks) -> None:
    """Losses in FP64 and experts' loads as whole numbers become those of all ranks; amaxes the largest.

    sums: the step's summed losses. Everything is changed in place, and has the same bits on every rank.
    """
    ranks.add_up([sums])
    ranks.add_up(model.loads)
    ranks.take_largest(model.amaxes)


def split_gradients(model: Transformer, parameters: Iterable[nn.Parameter], ranks: Ranks) -> tuple[list[Tensor], list[Tensor]]:
    """This rank's FP32 gradients: (of what every rank computes with, of experts that other ranks have others of)."""
    shared, experts = ([local_part(each) for each in gradients(kind)] for kind in _split(model, parameters, ranks))
    return shared, experts


def _split(
    model: Transformer, parameters: Iterable[nn.Parameter], ranks: Ranks
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    dealt = {id(each) for each in expert_parameters(model)} if ranks.expert > 1 else set()
    given = list(parameters)
    return [p for p in given if id(p) not in dealt], [p for p in given if id(p) in dealt]


def joint_norm(shared: Tensor, experts: Tensor, ranks: Ranks) -> Tensor:
    """The norm of all gradients, the same bits on every rank, from the FP64 norms of this rank's two kinds."""
    if ranks.shard == ranks.expert == 1:
        return shared
    own = torch.stack((shared, experts)).square()
    everyone = [torch.empty_like(own) for _ in range(ranks.count)]
    dist.all_gather(everyone, own)
    squares = torch.stack(everyone)
    # Ranks lie replica by replica: the first ones hold every part once.
    return (squares[: ranks.shard, 0].sum() + squares[: ranks.expert_parts, 1].sum()).sqrt()
