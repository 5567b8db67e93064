"""AdamW over FP32 master parameters, with moments kept in FP32 or BF16.

Written out rather than taken from ``torch.optim`` for three things: moments of another dtype than their parameter (the
report keeps both in BF16), a state keyed by parameter name, so that a checkpoint says what belongs to what, and a
learning rate handed in by the caller, so that nothing but the step decides it. In FP32 it takes the very operations of
``torch.optim.AdamW`` in their order.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from dsv3fp8.errors import UserError
from dsv3fp8.training.config import OptimizerConfig

MOMENT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Elements updated at a time: the FP32 working copies of BF16 moments never take more than three times this.
BUCKET_ELEMENTS = 1 << 26

NamedParameters = Sequence[tuple[str, nn.Parameter]]


class AdamW:
    """Decoupled weight decay on the group ``decay``, none on ``no_decay``."""

    def __init__(self, groups: Mapping[str, NamedParameters], config: OptimizerConfig) -> None:
        """`groups`: {"decay": [(name, FP32 parameter)…], "no_decay": […]}; each tensor once, tied or not."""
        self.config = config
        self.parameters: dict[str, nn.Parameter] = {}
        self._decayed: set[str] = set()
        for group, members in groups.items():
            assert group in ("decay", "no_decay"), group
            for name, parameter in members:
                assert name not in self.parameters, f"{name} is given twice"
                assert parameter.dtype is torch.float32, f"{name} is {parameter.dtype}, not an FP32 master"
                self.parameters[name] = parameter
                if group == "decay":
                    self._decayed.add(name)
        assert len({id(parameter) for parameter in self.parameters.values()}) == len(self.parameters), "a tied tensor twice"
        dtype = MOMENT_DTYPES[config.moments]
        # Steps taken, which the bias correction of the moments needs; skipped steps are none.
        self.steps = 0
        self.first = {name: torch.zeros_like(p, dtype=dtype) for name, p in self.parameters.items()}
        self.second = {name: torch.zeros_like(p, dtype=dtype) for name, p in self.parameters.items()}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update from the FP32 ``.grad`` of each parameter; a parameter without one has a gradient of zero."""
        self.steps += 1
        for names in self._buckets():
            self._update(names, lr)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def _buckets(self) -> Iterator[list[str]]:
        """Names in their order, cut where the decay changes or the bucket is full."""
        bucket: list[str] = []
        elements = 0
        for name, parameter in self.parameters.items():
            full = elements + parameter.numel() > BUCKET_ELEMENTS
            if bucket and (full or (name in self._decayed) != (bucket[0] in self._decayed)):
                yield bucket
                bucket, elements = [], 0
            bucket.append(name)
            elements += parameter.numel()
        if bucket:
            yield bucket

    def _update(self, names: list[str], lr: float) -> None:
        beta1, beta2 = self.config.betas
        weights: list[Tensor] = [self.parameters[name] for name in names]
        gradients = [torch.zeros_like(w) if w.grad is None else w.grad for w in weights]
        stored = [self.first[name] for name in names], [self.second[name] for name in names]
        # In FP32 these are the stored tensors themselves, updated in place; in BF16 working copies.
        first, second = [t.float() for t in stored[0]], [t.float() for t in stored[1]]

        if names[0] in self._decayed and self.config.weight_decay:
            torch._foreach_mul_(weights, 1 - lr * self.config.weight_decay)
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        denominators = torch._foreach_sqrt(second)
        torch._foreach_div_(denominators, math.sqrt(1 - beta2**self.steps))
        torch._foreach_add_(denominators, self.config.eps)
        torch._foreach_addcdiv_(weights, first, denominators, -lr / (1 - beta1**self.steps))

        if self.config.moments != "fp32":
            torch._foreach_copy_(stored[0], first)
            torch._foreach_copy_(stored[1], second)

    def state_dict(self) -> dict:
        """{"steps": int, "first": {name: tensor}, "second": {name: tensor}}; the tensors are not copied."""
        return {"steps": self.steps, "first": dict(self.first), "second": dict(self.second)}

    def load_state_dict(self, state: Mapping) -> None:
        """Take over a saved state; UserError if it belongs to other parameters or was kept in another dtype."""
        for saved, own in ((state["first"], self.first), (state["second"], self.second)):
            differing = sorted(saved.keys() ^ own.keys())
            if differing:
                raise UserError(
                    f"the optimizer state is of another model: {differing[0]} is in only one of the two "
                    f"({len(differing)} such names); start in another run_dir"
                )
            for name, tensor in own.items():
                if saved[name].shape != tensor.shape:
                    raise UserError(
                        f"the optimizer state is of another model: {name} has shape {tuple(saved[name].shape)} there "
                        f"and {tuple(tensor.shape)} here; start in another run_dir"
                    )
                # A fork may change optimizer.moments: rounding to BF16 or widening is what that asks for.
                tensor.copy_(saved[name])
        self.steps = state["steps"]
