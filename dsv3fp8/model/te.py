"""Linears that are Transformer Engine's (`recipe.linears: te`): a peer that trains, on a Hopper GPU.

te.Linear and te.GroupedLinear read our FP32 masters, which they cast once an optimizer step, take and give BF16, and leave
FP32 weight gradients. What they do in between nobody observes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsv3fp8.kernels import te
from dsv3fp8.model.linear import Linear
from dsv3fp8.ops.residual import residual_sum
from dsv3fp8.ops.slot import GradientSlot
from dsv3fp8.ops.stash import Activation
from dsv3fp8.ops.weights import WeightCodes
from dsv3fp8.precision.recipe import Recipe
from dsv3fp8.precision.tiles import values_of

MULTIPLE = 16  # of tokens, for its FP8 GEMMs


def make_linear(recipe: Recipe, op: str, in_features: int, out_features: int, parts: int = 1) -> Linear:
    """The linear that the recipe asks for."""
    kind = TELinear if recipe.linears == "te" else Linear
    return kind(recipe, op, in_features, out_features, parts)


class TELinear(Linear):
    """te.Linear on our master. Like every linear it takes an Activation, of which it reads the BF16 values."""

    def __init__(self, recipe: Recipe, op: str, in_features: int, out_features: int, parts: int = 1) -> None:
        super().__init__(recipe, op, in_features, out_features, parts)
        self.codes = TECodes(self.quantizers)
        module = new_module("Linear", in_features, out_features)
        self.borrower = Borrower(module, ["weight"], self.codes)

    def forward(self, x: Activation, residual: Tensor | None = None, slot: GradientSlot | None = None) -> Tensor:
        tokens = x.edge.shape[0]
        values = self.borrower.lend(x.edge, values_of(x.operand), self.weight)
        out: Tensor = self.borrower(F.pad(values, (0, 0, 0, -tokens % MULTIPLE)), self.weight)[:tokens]
        return out if residual is None else residual_sum(residual, out)


class TECodes(WeightCodes):
    """Transformer Engine keeps its own codes: this tells it when they are older than the master."""

    _seen: tuple[int, int] | None = None

    def stale(self, weight: Tensor) -> bool:
        """Whether the master has changed since the last call."""
        before, self._seen = self._seen, (weight._version, weight.data_ptr())
        return before != self._seen

    def invalidate(self) -> None:
        self._seen = None


def new_module(kind: str, *sizes: int) -> Any:
    """A Transformer Engine module without weights of its own. UserError where it cannot run."""
    te.require(torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu"))
    module = getattr(te.library(), kind)(
        *sizes, bias=False, params_dtype=torch.float32, device="meta", fuse_wgrad_accumulation=True
    )
    module._parameters.clear()
    return module


class Borrower:
    """A Transformer Engine module that computes with a master of ours: [N, K], or [E, N, K] where it has several weights.

    names: of its weights. It finds views of the master under them, and asks these for room for their FP32 gradients, as it
    asks parameters of FSDP; the room is the master's gradient, which `lend`'s backward hands to autograd.
    """

    def __init__(self, module: Any, names: Sequence[str], codes: TECodes) -> None:
        self.module, self.names, self.codes = module, list(names), codes
        self._key: tuple[int, bool] | None = None
        self._gradient: Tensor | None = None

    def lend(self, edge: Tensor, values: Tensor, master: Tensor) -> Tensor:
        """`values` for the module, with edge's gradient; master's gradient comes with it."""
        self._attach(master)
        out: Tensor = _Lend.apply(edge, values, master, self)
        return out

    def __call__(self, x: Tensor, master: Tensor, *rest: object) -> Tensor:
        with te.block_scaling():
            out: Tensor = self.module(x, *rest, is_first_microbatch=self.codes.stale(master))
        return out

    def take(self) -> Tensor | None:
        """The master's gradient that the module's backward left; None where it left none."""
        gradient, self._gradient = self._gradient, None
        for name in self.names:
            getattr(self.module, name).main_grad = None  # autograd copies what somebody else holds too
        return gradient

    def _attach(self, master: Tensor) -> None:
        key = master.data_ptr(), master.requires_grad
        if key == self._key:
            return
        self._key = key
        seen = [master.detach()] if len(self.names) == 1 and master.dim() == 2 else list(master.detach().unbind(0))
        for index, (name, weight) in enumerate(zip(self.names, seen, strict=True)):
            weight.requires_grad_(master.requires_grad)
            attributes = {
                "__fsdp_param__": True, "get_main_grad": self._room(master, index if master.dim() == 3 else None),
                "overwrite_main_grad": True,
            }  # fmt: skip
            for attribute, value in attributes.items():
                setattr(weight, attribute, value)
            self.module.fast_setattr(name, weight)
            # It has none, and hands on an empty one: not on the meta device, where the module was made.
            self.module.fast_setattr(name.replace("weight", "bias"), master.new_empty(0))

    def _room(self, master: Tensor, index: int | None) -> Callable[[], Tensor]:
        shape, device = master.shape, master.device

        def room() -> Tensor:
            if self._gradient is None:
                self._gradient = torch.empty(shape, dtype=torch.float32, device=device)
            return self._gradient if index is None else self._gradient[index]

        return room


class _Lend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, edge: Tensor, values: Tensor, master: Tensor, borrower: Borrower) -> Tensor:
        ctx.borrower, ctx.dtype = borrower, edge.dtype
        return values.view_as(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dvalues: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        # The module's backward has run: it made both gradients before it gave this one.
        return dvalues.to(ctx.dtype), None, ctx.borrower.take(), None
