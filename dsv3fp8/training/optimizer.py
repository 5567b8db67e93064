"""AdamW over FP32 master parameters, with moments kept in FP32 or BF16.

Written out rather than taken from ``torch.optim`` for three things: moments of another dtype than their parameter (the
report keeps both in BF16), a state keyed by parameter name, so that a checkpoint says what belongs to what, and a
learning rate handed in by the caller, so that nothing but the step decides it. In FP32 it takes the very operations of
``torch.optim.AdamW`` in their order.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from dsv3fp8.errors import UserError
from dsv3fp8.ops.adamw import Update
from dsv3fp8.parallel.placement import local_part
from dsv3fp8.training.config import OptimizerConfig

MOMENT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

NamedParameters = Sequence[tuple[str, nn.Parameter]]


class AdamW:
    """Decoupled weight decay on the group ``decay``, none on ``no_decay``.

    Of a parameter that is cut over ranks (a DTensor) each rank updates its part; the moments are DTensors likewise.
    """

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
        self.first = {name: torch.zeros_like(p.detach(), dtype=dtype) for name, p in self.parameters.items()}
        self.second = {name: torch.zeros_like(p.detach(), dtype=dtype) for name, p in self.parameters.items()}
        first, second = ([local_part(each) for each in kind.values()] for kind in (self.first, self.second))
        decayed = [name in self._decayed for name in self.parameters]
        weights = [local_part(parameter.detach()) for parameter in self.parameters.values()]
        self._update = Update(weights, first, second, decayed, config.betas, config.eps, config.weight_decay)

    @property
    def steps(self) -> int:
        """Steps taken, which the bias correction of the moments needs; skipped steps are none. Read from the device."""
        return int(self._update.steps)

    def step(self, lr: float | Tensor, applied: Tensor | None = None, factor: Tensor | None = None) -> None:
        """One update from the FP32 ``.grad`` of each parameter; a parameter without one has a gradient of zero.

        `applied`: bool scalar, False where everything has to stay as it is. `factor`: FP64 scalar that the gradients are
        multiplied by. `lr` is FP64 where it is a tensor. Tensors lie beside the parameters and are not read back.
        """
        device = self._update.steps.device
        applied = torch.ones((), dtype=torch.bool, device=device) if applied is None else applied
        factor = torch.ones((), dtype=torch.float64, device=device) if factor is None else factor
        gradients = [None if p.grad is None else local_part(p.grad) for p in self.parameters.values()]
        self._update.apply(gradients, lr, applied, factor)

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where the last step found its tensors, for `point`."""
        return self._update.addresses

    def point(self, addresses: tuple[int, ...]) -> None:
        """Let a step that a CUDA graph recorded find its tensors where it found them then; call it before every replay."""
        self._update.point(addresses)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

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
        self._update.steps.fill_(state["steps"])
