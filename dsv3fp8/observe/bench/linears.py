"""One linear, forward and backward, from operands that arrive in BF16."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from dsv3fp8.errors import UserError
from dsv3fp8.kernels.backend import matmul_nt
from dsv3fp8.model.linear import Linear
from dsv3fp8.observe.bench import peers
from dsv3fp8.observe.bench.casts import COPY, copy_way
from dsv3fp8.observe.bench.operands import Setting, random
from dsv3fp8.observe.bench.rates import Call, Case, Table, Way
from dsv3fp8.observe.bench.sizes import LinearShape
from dsv3fp8.ops.linear import transposed
from dsv3fp8.ops.stash import Activation
from dsv3fp8.precision.tiles import QuantizedTensor

PEER = "nn.Linear BF16"
UPSTREAM = "casts upstream"
PARTS = ("graph", "host", "weights")
Set = tuple[Tensor, Tensor]  # x that requires a gradient, dy


def linear_tables(setting: Setting) -> dict[str, Table]:
    """Replayed from a graph, the same launched by the host, and the weight casts, which happen once a step; by part."""
    shapes, tokens = setting.sizes.linears, setting.sizes.tokens
    gemm, compute = setting.recipe.linear(shapes[0].op), setting.recipe.compute.upper()

    def cases(graph: bool) -> list[Case]:
        return [
            Case(str(shape), 6.0 * tokens * shape.inputs * shape.outputs, partial(_ways, setting, shape, graph))
            for shape in shapes
        ]

    written = "codes for fprop and for dgrad" if gemm.weight.quantized else f"a copy in {compute}"
    return {
        "graph": Table("linear", "Linear, forward + backward", "TFLOP/s", PEER, _counted(setting), cases(graph=True)),
        "host": Table(
            "linear, launched by the host", "Linear, forward + backward, launched by the host", "TFLOP/s", PEER,
            "the same without CUDA graphs: where launching takes longer than the chip, the rate is the host's",
            cases(graph=False),
        ),
        "weights": Table(
            "weight casts", "Weight casts, once an optimizer step", "GB/s", COPY,
            f"the FP32 master read once, {written} written; the ratio is the share of a copy's rate",
            [Case(str(s), 6.0 * s.inputs * s.outputs, partial(_weight_casts, setting, s)) for s in shapes],
        ),
    }  # fmt: skip


def _counted(setting: Setting) -> str:
    """What the rates include, which the recipe decides."""
    recipe, counted = setting.recipe, []
    gemm = recipe.linear(setting.sizes.linears[0].op)
    if gemm.gradient.quantized:
        counted.append("the cast of dY" if gemm.gradient.one_orientation else "both casts of dY")
    if gemm.input.quantized:
        counted += ["the cast of x"] if gemm.input.one_orientation else ["the cast of x", "its re-tile"]
    start = f"{setting.sizes.tokens} tokens; {recipe.name}"
    if not counted:
        return f"{start} quantizes neither x nor dY: there is no cast of theirs to count, and weights are ready beforehand"
    said = " and ".join(part for part in (", ".join(counted[:-1]), counted[-1]) if part)
    retiled = ", the re-tile of x is counted" if "its re-tile" in counted else ""
    verb = "is" if len(counted) == 1 else "are"
    return f"{start}: {said} {verb} counted, weight casts are not; {UPSTREAM}: x and dY arrive as codes{retiled}"


def _ways(setting: Setting, shape: LinearShape, graph: bool) -> list[Way]:
    tokens, size = setting.sizes.tokens, shape.inputs + shape.outputs
    sets = [
        (random(setting, tokens, shape.inputs).requires_grad_(), random(setting, tokens, shape.outputs))
        for _ in range(setting.clock.sets(2 * tokens * size))
    ]
    ways = [
        Way(setting.recipe.name, partial(_ours, setting, shape, sets), graph=graph),
        Way(PEER, partial(_torch, setting, shape, sets), graph=graph),
    ]
    gemm = setting.recipe.linear(shape.op)
    if graph and (gemm.input.quantized or gemm.gradient.quantized):
        ways.append(Way(UPSTREAM, partial(_upstream, setting, shape, sets)))
    if peers.TRANSFORMER_ENGINE in setting.peers:
        for name, scaling in peers.TE_SCALINGS.items():
            ways.append(Way(name, partial(peers.te_linear, scaling, shape.inputs, shape.outputs, sets), graph=graph))
    return ways


def _layer(setting: Setting, shape: LinearShape) -> Linear:
    with setting.device:
        layer = Linear(setting.recipe, shape.op, shape.inputs, shape.outputs, shape.parts)
    with torch.no_grad():
        layer.weight.normal_(std=0.02)
    return layer


def _ours(setting: Setting, shape: LinearShape, sets: Sequence[Set]) -> list[Call]:
    layer = _layer(setting, shape)

    def call(x: Tensor, dy: Tensor) -> object:
        operand = layer.quantizers.quantize("input", x.detach(), 1)
        return torch.autograd.grad(layer(Activation(x, operand)), (x, layer.weight), dy)

    return [partial(call, x, dy) for x, dy in sets]


def _torch(setting: Setting, shape: LinearShape, sets: Sequence[Set]) -> list[Call]:
    layer = nn.Linear(shape.inputs, shape.outputs, bias=False, device=setting.device, dtype=torch.bfloat16)

    def call(x: Tensor, dy: Tensor) -> object:
        return torch.autograd.grad(layer(x), (x, layer.weight), dy)

    return [partial(call, x, dy) for x, dy in sets]


def _upstream(setting: Setting, shape: LinearShape, sets: Sequence[Set]) -> list[Call]:
    """The three GEMMs and the re-tile: what is left where the ops before and behind the linear cast as they write."""
    layer = _layer(setting, shape)
    quantizers, spec = layer.quantizers, layer.quantizers.gemm
    weight, weight_t = layer.codes.fprop(layer.weight), layer.codes.dgrad(layer.weight)
    calls: list[Call] = []
    for x, dy in sets:
        x_codes = quantizers.quantize("input", x.detach(), 1)
        by_row = quantizers.quantize("gradient", dy, 1, col_parts=shape.parts)
        by_column = quantizers.other_orientation("gradient", dy, by_row, col_parts=shape.parts)
        if isinstance(by_column, QuantizedTensor):
            by_column = _tokens_contiguous(by_column)

        def call(x_codes=x_codes, by_row=by_row, by_column=by_column) -> object:  # type: ignore[no-untyped-def]
            y = matmul_nt(x_codes, weight, torch.bfloat16, spec, "fprop")
            dx = matmul_nt(by_row, weight_t, torch.bfloat16, spec, "dgrad")
            x_columns = quantizers.retile("input", x_codes)
            return y, dx, matmul_nt(transposed(by_column), transposed(x_columns), torch.float32, spec, "wgrad")

        calls.append(call)
    return calls


def _tokens_contiguous(codes: QuantizedTensor) -> QuantizedTensor:
    from dataclasses import replace

    return replace(codes, codes=codes.codes.mT.contiguous().mT)


def _weight_casts(setting: Setting, shape: LinearShape) -> list[Way]:
    layer = _layer(setting, shape)
    if not layer.quantizers.gemm.weight.quantized and setting.recipe.compute == "fp32":
        raise UserError(f"{setting.recipe.name} casts no weight; give another recipe")

    def call() -> object:
        layer.codes.invalidate()
        return layer.codes.fprop(layer.weight), layer.codes.dgrad(layer.weight)

    return [Way("ours", lambda: [call], note="4 bytes read and 2 written an element"), copy_way(setting)]
