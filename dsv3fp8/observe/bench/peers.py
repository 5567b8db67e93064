"""Other libraries' calls, where they are installed. Whatever they refuse becomes the one-line reason of their row."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from dsv3fp8.observe.bench.rates import Call
from dsv3fp8.precision.tiles import QuantizedTensor

TRANSFORMER_ENGINE, DEEP_GEMM = "Transformer Engine", "DeepGEMM"
TE_SCALINGS = {"TE block scaling": "Float8BlockScaling", "TE current scaling": "Float8CurrentScaling"}
"""Transformer Engine's recipes, by the name of their column."""
MODULES = {TRANSFORMER_ENGINE: "transformer_engine.pytorch", DEEP_GEMM: "deep_gemm"}


def find() -> tuple[dict[str, str], list[str]]:
    """(version of each library that can be imported, a line for each that cannot, with the reason)."""
    versions, lines = {}, []
    for name, module in MODULES.items():
        try:
            importlib.import_module(module)
            versions[name] = str(getattr(importlib.import_module(module.partition(".")[0]), "__version__", "unknown"))
        except Exception as error:  # a library that is there may still fail to load
            lines.append(f"{name} is left out: {' '.join(str(error).split())[:160]}")
    return versions, lines


def te_linear(scaling: str, inputs: int, outputs: int, sets: list[tuple[Tensor, Tensor]]) -> list[Call]:
    """Transformer Engine's Linear under one of its recipes, forward and backward, its weight cast once before.

    sets: x [T, inputs] that requires a gradient, and dy [T, outputs].
    """
    te: Any = importlib.import_module(MODULES[TRANSFORMER_ENGINE])
    recipe = getattr(importlib.import_module("transformer_engine.common.recipe"), scaling)()
    layer = te.Linear(inputs, outputs, bias=False, params_dtype=torch.bfloat16, device="cuda")
    layer.weight.data.normal_(std=0.02)

    def forward(x: Tensor, first: bool) -> Tensor:
        with te.autocast(enabled=True, recipe=recipe):
            return layer(x, is_first_microbatch=first)

    forward(sets[0][0], True)  # casts the weight, which later calls keep

    def call(x: Tensor, dy: Tensor) -> object:
        return torch.autograd.grad(forward(x, False), (x, layer.weight), dy)

    return [partial(call, x, dy) for x, dy in sets]


def deep_gemm_dense(pairs: list[tuple[QuantizedTensor, QuantizedTensor]], gemm: str) -> list[Call]:
    """DeepGEMM's dense GEMM of a [M, K] and b [N, K]; its wgrad adds to an FP32 output."""
    library = _deep_gemm()
    m, n = pairs[0][0].shape[0], pairs[0][1].shape[0]
    wgrad = gemm == "wgrad"
    out = torch.zeros(m, n, dtype=torch.float32 if wgrad else torch.bfloat16, device="cuda")
    more: dict[str, Any] = {"c": out, "recipe": (1, 1, 128)} if wgrad else {}
    function: Callable[..., object] = library.fp8_gemm_nt
    ready = [
        ((a.codes, _aligned(library, a.scale)), (b.codes, _aligned(library, b.scale) if wgrad else b.scale)) for a, b in pairs
    ]
    return [partial(function, a, b, out, **more) for a, b in ready]


def deep_gemm_grouped(a: QuantizedTensor, weights: QuantizedTensor, groups: Tensor) -> list[Call]:
    """DeepGEMM's grouped GEMM over rows in expert order. groups: the expert of each block of 128 rows."""
    library = _deep_gemm()
    out = torch.empty(a.shape[0], weights.shape[-2], dtype=torch.bfloat16, device="cuda")
    of_row = groups.to(torch.int32).repeat_interleave(128)
    left = (a.codes, _aligned(library, a.scale))
    right = (weights.codes, weights.scale)
    return [lambda: library.m_grouped_fp8_gemm_nt_contiguous(left, right, out, of_row)]


def _deep_gemm() -> ModuleType:
    return importlib.import_module(MODULES[DEEP_GEMM])


def _aligned(library: ModuleType, scale: Tensor) -> Tensor:
    """Row scales in the layout that TMA reads, made before the clock starts."""
    made: Tensor = library.get_mn_major_tma_aligned_tensor(scale.contiguous())
    return made
