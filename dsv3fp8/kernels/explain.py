"""What every op of a recipe takes on a device, and why, before any of them runs: for `doctor` and the manifest of a run.

Nothing is chosen here. kernels/backend.py and the modules of the other ops are asked, with operands of the real formats, tiles
and sizes that take one row's memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from dsv3fp8.kernels import backend, elementwise, moe, outer, te
from dsv3fp8.kernels.attention import choice as attention
from dsv3fp8.kernels.backend import LOOP, Choice
from dsv3fp8.precision.formats import E5M6
from dsv3fp8.precision.recipe import LINEAR_OPS, ROLES, GemmSpec, OperandSpec, Recipe
from dsv3fp8.precision.tiles import ROW_128, Operand, QuantizedTensor, grid_size


def explain(
    recipe: Recipe,
    device: torch.device,
    shapes: Mapping[str, tuple[int, int]] | None = None,
    isolated: bool = False,
    head: tuple[int, int] = (192, 128),
) -> list[tuple[str, Choice]]:
    """(op, choice) of every op under a recipe on a device, without running anything heavy.

    shapes: (in, out) features of each linear; one that is not given stands for a large one of whole tiles.
    isolated: documents are kept apart in attention. head: widths of a head's q and k, and of its v.
    """
    rows = []
    for op in LINEAR_OPS if recipe.linears == "ours" else ():
        spec = recipe.linear(op)
        shape = (shapes or {}).get(op, (8192, 8192))
        for gemm, (left, right) in _sample_gemms(spec, device, shape, recipe.gate).items():
            wide = gemm == "wgrad" or (op, gemm) in _SUMMED_IN_FP32
            choice = backend.choose_gemm(left, right, spec, torch.float32 if wide else torch.bfloat16)
            if op.startswith("expert_"):
                choice = _in_groups(choice, left, right, spec, gemm)
            rows.append((f"{op}.{gemm}", choice))
    if recipe.linears == "te":
        rows += [(f"{op}.{gemm}", te.choose(device)) for op in LINEAR_OPS for gemm in ("fprop", "dgrad", "wgrad")]
    dtype = torch.bfloat16 if recipe.compute == "bf16" else torch.float32
    rows.append(("attention", attention.choose(device, dtype, head, masked=isolated)))
    rows += _casts(recipe, device)
    act = recipe.linear("expert_down").input
    rows += elementwise.explain(device, dtype, act.storage if act.quantized else None)
    rows += outer.explain(device, dtype)
    rows += moe.explain(device, dtype)
    return rows


def reads_counts(recipe: Recipe, device: torch.device, shapes: Mapping[str, tuple[int, int]]) -> str | None:
    """Why a step reads back from the device how many rows each expert has, or None where it does not.

    Where no launch takes all experts, the host launches a GEMM for each that has rows.
    """
    if recipe.linears == "te":
        return "Transformer Engine's grouped linears take the counts from the host"
    taken = (row for row in explain(recipe, device, shapes) if row[0].startswith("expert_"))
    return next((f"{op} takes {choice.reason}" for op, choice in taken if choice.reason.startswith(LOOP)), None)


def _in_groups(alone: Choice, left: Operand, right: Operand, spec: GemmSpec, gemm: str) -> Choice:
    """The choice for experts, whose GEMMs one launch may take together; alone: the choice for one of them."""
    if gemm == "wgrad":
        left, right = (x.transposed() if isinstance(x, QuantizedTensor) else x.mT for x in (left, right))
    out_dtype = torch.float32 if gemm == "wgrad" else torch.bfloat16
    together = backend.choose_grouped(left, right, spec, gemm, out_dtype)
    if together.backend != "loop":
        return together
    against = together.reason.removeprefix(LOOP)
    why = alone.reason if alone.reason.startswith(against) else f"{against}; each: {alone.reason}"
    return Choice(alone.backend, f"{LOOP}{why}", alone.exact)


def _casts(recipe: Recipe, device: torch.device) -> list[tuple[str, Choice]]:
    """A row for every format and tile that the recipe casts to, and one for re-tiling what is kept."""
    given = torch.ones(1, 1)
    rows: dict[str, Choice] = {}
    if recipe.attention_cache == "e5m6":
        rows[f"quantize {E5M6.name} {ROW_128}"] = backend.choose_quantize(device, E5M6, ROW_128)
    for spec in map(recipe.linear, LINEAR_OPS):
        for role in (getattr(spec, name) for name in ROLES):
            for k_axis in (1, 0) if role.quantized else ():
                tile, kept = role.tile_along(k_axis), role.scaling != "current"
                name = f"quantize {role.format} {tile}" + (f" {role.scaling}" if kept else "")
                rows[name] = backend.choose_quantize(device, role.storage, tile, scale=given if kept else None)
        if spec.input.quantized and spec.input.tile == "1x128":
            sample = _sample(spec.input, 128, 128, device=device, plain=torch.float32)
            assert isinstance(sample, QuantizedTensor)
            tile = spec.input.tile_along(0)
            rows[f"re-tile {spec.input.format} {sample.tile} to {tile}"] = backend.choose_quantize(
                device, spec.input.storage, tile, source=sample
            )
    return list(rows.items())


_SUMMED_IN_FP32 = {("out", "fprop"), ("q", "dgrad"), ("q_a", "dgrad"), ("kv_a", "dgrad")}
"""GEMMs whose result is added to something before it is rounded; wgrads aside."""


def _sample_gemms(
    spec: GemmSpec, device: torch.device, shape: tuple[int, int], gate: str
) -> dict[str, tuple[Operand, Operand]]:
    """Operands of the sizes and tiles of the real ones, 128 tokens: a fused projection's outputs are tiled in two parts.

    What is dispatched has a scale a row: rows that shared one go to unlike experts. gate: of the recipe.
    """
    (inputs, outputs), parts, tokens = shape, 2 if spec.op.endswith("gate_up") else 1, 128
    sample = partial(_sample, device=device, plain=torch.bfloat16 if spec.compute == "bf16" else torch.float32)
    arrived = spec.op == "expert_gate_up"
    sent_back = spec.op == "expert_down" and gate == "before"
    return {
        "fprop": (
            sample(spec.input, tokens, inputs, dispatched=arrived),
            sample(spec.weight, outputs, inputs, row_parts=parts),
        ),
        "dgrad": (
            sample(spec.gradient, tokens, outputs, col_parts=parts, dispatched=sent_back),
            sample(spec.weight, inputs, outputs, col_parts=parts),
        ),
        "wgrad": (sample(spec.gradient, outputs, tokens, row_parts=parts), sample(spec.input, inputs, tokens)),
    }


def _sample(
    spec: OperandSpec, rows: int, cols: int, *, device: torch.device, plain: torch.dtype,
    row_parts: int = 1, col_parts: int = 1, dispatched: bool = False,
) -> Operand:  # fmt: skip
    """An operand of one row's memory: what chooses reads formats, tiles, sizes and strides. plain: its dtype, not quantized."""
    if not spec.quantized:
        return torch.empty(cols, dtype=plain, device=device).expand(rows, cols)
    tile = spec.tile_along(1)
    if dispatched and tile.rows is not None:
        tile = replace(tile, rows=1)
    row_parts, col_parts = (1 if tile.rows is None else row_parts), (1 if tile.cols is None else col_parts)
    codes = torch.empty(cols, dtype=spec.storage.dtype, device=device).expand(rows, cols)
    grid = grid_size(rows, tile.rows, row_parts), grid_size(cols, tile.cols, col_parts)
    scale = torch.empty(grid[1], device=device).expand(grid)
    return QuantizedTensor(codes, scale, spec.storage, tile, (rows, cols), spec.scale, row_parts, col_parts)
