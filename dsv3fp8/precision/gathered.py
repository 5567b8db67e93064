"""A weight of which a rank has what the GEMMs read and not the master: gathered from the ranks that hold its parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv3fp8.precision.tiles import Operand, QuantizedTensor

aten = torch.ops.aten


class GatheredWeight(Tensor):
    """Stands in autograd for the FP32 master [..., N, K], whose gradient it gets; it has no values of that type.

    fprop: codes and scales, or values of the compute type, as `WeightCodes.fprop` gives them. dgrad: codes in the other
    orientation where fprop's do not serve both, else None. They are there between the gathering and the freeing of the weight.
    """

    fprop: Operand
    dgrad: QuantizedTensor | None

    @staticmethod
    def __new__(cls, fprop: Operand, dgrad: QuantizedTensor | None = None) -> GatheredWeight:
        device = fprop.codes.device if isinstance(fprop, QuantizedTensor) else fprop.device
        made: GatheredWeight = Tensor._make_wrapper_subclass(cls, fprop.shape, dtype=torch.float32, device=device)
        return made

    def __init__(self, fprop: Operand, dgrad: QuantizedTensor | None = None) -> None:
        self.fprop, self.dgrad = fprop, dgrad

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """What autograd and FSDP do to a parameter's shell; whoever wants to compute with it must ask for its operands."""
        same = func is aten.as_strided.default and tuple(args[1]) == tuple(args[0].shape)
        if same or func is aten.detach.default:
            return cls(args[0].fprop, args[0].dgrad)
        raise NotImplementedError(f"{func} of a gathered weight, which has no FP32 values: read its operands")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GatheredWeight({tuple(self.shape)}, {self.fprop!r})"
