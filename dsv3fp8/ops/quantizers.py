"""Quantizers of one linear: where a scale comes from (this tensor, the last steps, a calibration) and what is kept of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dsv3fp8.kernels.backend import decode, quantize, quantize_both, retile
from dsv3fp8.kernels.quantize.reference import scale_from_amax
from dsv3fp8.precision.formats import Format
from dsv3fp8.precision.recipe import ROLES, GemmSpec, OperandSpec, Recipe
from dsv3fp8.precision.tiles import Operand, QuantizedTensor

Cast = tuple[Format, str]
"""Format and scale kind of a cast to 1x128 tiles, or to 1x128 and 128x1 tiles."""


class ScaleState(nn.Module):
    """Amax history of delayed scaling, or the calibrated amax of static scaling, for one role of one linear.

    Buffers are fp32 and travel in the checkpoint. `experts` > 0 keeps one scale per expert instead of one per tensor.
    history: the largest |x| of the last steps, newest first; static scaling keeps one running maximum and a step count.
    """

    history: Tensor
    current: Tensor
    steps: Tensor

    def __init__(self, spec: OperandSpec, recipe: Recipe, experts: int) -> None:
        super().__init__()
        self.spec = spec
        self.calibration_steps = recipe.calibration_steps
        length = recipe.amax_history if spec.scaling == "delayed" else 1
        self.register_buffer("history", torch.zeros(length, max(experts, 1)))
        self.register_buffer("current", torch.zeros(max(experts, 1)), persistent=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def scale(self, amax: Tensor) -> Tensor:
        """The scale to use now, [experts or 1], given this tensor's amax; observes amax while training."""
        if self.training:
            self.current.copy_(torch.maximum(self.current, amax.detach()))
        known = self.history.amax(0)
        calibrating = self.spec.scaling == "static" and self.steps < self.calibration_steps
        # Before there is a history (and while calibrating) the tensor's own amax serves.
        chosen = torch.where((known == 0) | calibrating, amax, known)
        return scale_from_amax(chosen, self.spec.storage, self.spec.scale)  # quantize poisons tiles that are not finite

    @torch.no_grad()
    def end_step(self, applied: Tensor | bool) -> None:
        """Once per optimizer step; a skipped step leaves no trace. applied: not read where it is a tensor."""
        if self.spec.scaling == "delayed":
            moved = torch.cat((self.current[None], self.history[:-1]))
        else:
            frozen = self.steps >= self.calibration_steps
            moved = torch.where(frozen, self.history, torch.maximum(self.history, self.current[None]))
        self.history.copy_(torch.where(torch.as_tensor(applied, device=moved.device), moved, self.history))
        self.steps += applied
        self.current.zero_()


class LinearQuantizers(nn.Module):
    """The three quantizers of one linear op, resolved from the recipe.

    experts: number of experts whose tensors never share a scale (0 for a plain linear).
    per_expert: the roles that are born inside the experts; the others are quantized before they are dispatched.
    """

    def __init__(self, recipe: Recipe, op: str, experts: int = 0, per_expert: tuple[str, ...] = ("weight",)) -> None:
        super().__init__()
        self.gemm: GemmSpec = recipe.linear(op)
        self.states = nn.ModuleDict()
        for role in ROLES:
            spec: OperandSpec = getattr(self.gemm, role)
            if spec.quantized and spec.scaling != "current":
                self.states[role] = ScaleState(spec, recipe, experts if role in per_expert else 0)

    def quantize(
        self,
        role: str,
        x: Tensor,
        k_axis: int,
        *,
        row_parts: int = 1,
        col_parts: int = 1,
        groups: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> Operand:
        """x as the GEMM operand of `role`, K along axis 1 or 0; x itself where the recipe does not quantize.

        groups: the expert of each block of 128 rows, for tensors born inside the experts.
        scale: for roles with kept scales, the one that forward used, where a tensor is made again: it is not observed twice.
        """
        spec: OperandSpec = getattr(self.gemm, role)
        if not spec.quantized:
            return x
        tile = spec.tile_along(k_axis)
        if role in self.states and scale is None:
            scale = self._kept_scale(role, x, groups)
        return quantize(x, spec.storage, tile, spec.scale, row_parts=row_parts, col_parts=col_parts, groups=groups, scale=scale)

    def rides(self, role: str) -> Cast | None:
        """The cast of a role, where it may ride on the op before it; None where `quantize` must do it."""
        spec: OperandSpec = getattr(self.gemm, role)
        if not spec.quantized or spec.tile != "1x128" or role in self.states:
            return None
        return spec.storage, spec.scale

    def known_scale(self, role: str, quantized: Operand) -> tuple[Tensor, ...]:
        """The scale to keep for `quantize(scale=)` where a tensor is made again: none unless it outlives this tensor."""
        # The state may have moved on by the time backward runs.
        return (quantized.scale,) if role in self.states and isinstance(quantized, QuantizedTensor) else ()

    def other_orientation(
        self, role: str, x: Tensor, quantized: Operand, *, col_parts: int = 1, groups: Tensor | None = None
    ) -> Operand:
        """x, quantized along its columns already, with its rows as K; the same codes where they serve both."""
        if not isinstance(quantized, QuantizedTensor) or getattr(self.gemm, role).one_orientation:
            return quantized
        return self.quantize(role, x, 0, col_parts=col_parts, groups=groups)

    def both_orientations(
        self, role: str, x: Tensor, *, col_parts: int = 1, groups: Tensor | None = None
    ) -> tuple[Operand, Operand]:
        """x as `quantize` gives it along its columns, and in its `other_orientation`, with one kernel where there is one."""
        if cast := self.rides(role):  # the experts' rows share no tile, whatever the groups
            return quantize_both(x, *cast, col_parts=col_parts)
        quantized = self.quantize(role, x, 1, col_parts=col_parts, groups=groups)
        return quantized, self.other_orientation(role, x, quantized, col_parts=col_parts, groups=groups)

    def retile(self, role: str, kept: Operand, groups: Tensor | None = None) -> Operand:
        """A kept operand with its rows as the wgrad's K (128x1 tiles), from its codes, never from a lost original.

        A cache may be kept in another type than the operand: BF16 where the operand is FP8, or E5M6 where it is not.
        """
        spec: OperandSpec = getattr(self.gemm, role)
        if not isinstance(kept, QuantizedTensor):
            return self.quantize(role, kept, 0, groups=groups)
        if not spec.quantized:
            return decode(kept, torch.bfloat16 if self.gemm.compute == "bf16" else torch.float32)
        tile = spec.tile_along(0)
        serves = spec.one_orientation and kept.format is spec.storage
        if serves and kept.tile == tile and (groups is None or spec.tile == "128x128"):
            return kept
        if serves and kept.one_scale_per_group and groups is not None:
            return kept  # born inside the experts: each has its one scale already
        return retile(kept, tile, self.gemm.retiled_scale, fmt=spec.storage, groups=groups)

    def scale_of(self, role: str, amax: Tensor) -> Tensor:
        """The scales of an ungrouped tensor whose tiles have these largest magnitudes, [..., grid rows, grid columns]."""
        spec: OperandSpec = getattr(self.gemm, role)
        if role not in self.states:
            return scale_from_amax(amax, spec.storage, spec.scale)
        state = self.states[role]
        assert isinstance(state, ScaleState)
        return state.scale(amax.flatten()).view_as(amax)

    def _kept_scale(self, role: str, x: Tensor, groups: Tensor | None) -> Tensor:
        state = self.states[role]
        assert isinstance(state, ScaleState)
        if groups is not None:
            blocks = _largest(x.detach().reshape(len(groups), 128 * x.shape[-1]))
            per_expert = blocks.new_zeros(state.history.shape[1]).scatter_reduce(0, groups.clamp(min=0), blocks, "amax")
            return state.scale(per_expert)[groups][:, None]
        matrices = x.detach().flatten(1) if x.dim() > 2 else x.detach().reshape(1, x.numel())  # of experts [E, N, K]
        return self.scale_of(role, _largest(matrices).reshape(*x.shape[:-2], 1, 1))


def _largest(x: Tensor) -> Tensor:
    """The largest magnitude of each row, fp32: NaN where a row holds NaN, 0 where it is empty."""
    if not x.numel():
        return x.new_zeros(x.shape[0], dtype=torch.float32)
    low, high = torch.aminmax(x, dim=1)
    return torch.maximum(-low, high).float()
