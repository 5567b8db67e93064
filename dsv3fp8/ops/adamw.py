"""The AdamW update of all weights: one launch on a Hopper GPU, where nothing is read back, and torch elsewhere.

Whether the step counts and how far its gradients are scaled are tensors beside the weights: on the GPU they are decided
and used without the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dsv3fp8.kernels import outer
from dsv3fp8.kernels.optimizer import reference

# Elements updated at a time in torch: the FP32 working copies of BF16 moments never take more than three times this.
BUCKET_ELEMENTS = 1 << 26


class Update:
    """FP32 weights and their two moments, FP32 or BF16, and the number of updates they have had.

    decayed: which weights the decay takes from.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        first: Sequence[Tensor],
        second: Sequence[Tensor],
        decayed: Sequence[bool],
        betas: Sequence[float],
        eps: float,
        weight_decay: float,
    ) -> None:
        self.weights, self.first, self.second, self.decayed = list(weights), list(first), list(second), list(decayed)
        self.betas, self.eps, self.weight_decay = (betas[0], betas[1]), eps, weight_decay
        device = self.weights[0].device
        self.steps = torch.zeros((), dtype=torch.int64, device=device)
        self._betas = torch.tensor(self.betas, dtype=torch.float64, device=device)
        self._fused = None
        if outer.choose("optimizer", device, self.first[0].dtype).backend == "triton":
            from dsv3fp8.kernels.optimizer import triton

            self._fused = triton.Tensors([weight.numel() for weight in self.weights], self.decayed, device)

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where the last update found its tensors, for `point`."""
        return () if self._fused is None else self._fused.addresses

    def point(self, addresses: tuple[int, ...]) -> None:
        """Let an update that a CUDA graph recorded find its tensors where it found them then."""
        if self._fused is not None:
            self._fused.point(addresses)

    @torch.no_grad()
    def apply(self, gradients: Sequence[Tensor | None], lr: float | Tensor, applied: Tensor, factor: Tensor) -> None:
        """Move everything by FP32 gradients times `factor`, or nothing where `applied` is False.

        None is a gradient of zero. lr: FP64 where it is a tensor; factor: FP64 scalar. In torch the gradients are scaled in
        place.
        """
        given = [torch.zeros_like(w) if g is None else g for w, g in zip(self.weights, gradients, strict=True)]
        if self._fused is not None:
            self._at_once(given, lr, applied, factor)
        elif applied:
            self._in_torch(given, float(lr), float(factor))

    def _at_once(self, gradients: list[Tensor], lr: float | Tensor, applied: Tensor, factor: Tensor) -> None:
        from dsv3fp8.kernels.optimizer import triton

        assert self._fused is not None
        steps = self.steps + applied
        bias = 1 - self._betas**steps
        rate = lr if isinstance(lr, Tensor) else torch.full_like(bias[0], lr)
        scalars = torch.stack((applied.double(), factor, 1 - rate * self.weight_decay, 1 / bias[1].sqrt(), -(rate / bias[0])))
        tensors = self.weights, gradients, self.first, self.second
        triton.update(self._fused, *tensors, scalars.float(), self.betas, self.eps)
        self.steps.copy_(steps)

    def _in_torch(self, gradients: list[Tensor], lr: float, factor: float) -> None:
        self.steps += 1
        for part in self._buckets():
            if factor != 1:
                torch._foreach_mul_(gradients[part], factor)
            decay = self.weight_decay if self.decayed[part.start] else 0.0
            rates = reference.Rates(lr, decay, self.betas, self.eps, int(self.steps))
            reference.update(self.weights[part], gradients[part], self.first[part], self.second[part], rates)

    def _buckets(self) -> Iterator[slice]:
        """Ranges of the tensors in their order, cut where the decay changes or the bucket is full."""
        start = elements = 0
        for at, weight in enumerate(self.weights):
            full = elements + weight.numel() > BUCKET_ELEMENTS
            if at > start and (full or self.decayed[at] != self.decayed[start]):
                yield slice(start, at)
                start, elements = at, 0
            elements += weight.numel()
        yield slice(start, len(self.weights))
