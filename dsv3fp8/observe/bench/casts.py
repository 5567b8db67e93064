"""Casts to codes and re-tiles, by the bytes that they move, beside a device copy; and attention, cuDNN's and our own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from dsv3fp8.kernels import backend
from dsv3fp8.kernels.attention import choice as attention
from dsv3fp8.observe.bench.operands import Setting, random, recipe_named
from dsv3fp8.observe.bench.rates import Case, Table, Way
from dsv3fp8.ops.quantizers import LinearQuantizers
from dsv3fp8.ops.weights import WeightCodes
from dsv3fp8.precision.formats import E4M3, E5M6, Format
from dsv3fp8.precision.tiles import BLOCK_128, COLUMN_128, ROW_128, Tile, ceil_div

COPY = "device copy"
DOCUMENTS = 8  # of the window in which attention keeps them apart


def copy_way(setting: Setting) -> Way:
    """A kernel that reads a tensor and writes another of its size; memcpy may take another path on the chip."""
    source = random(setting, setting.sizes.copied // 4, dtype=torch.float32)
    target = torch.empty_like(source)
    return Way(COPY, lambda: [lambda: torch.mul(source, 1.0, out=target)], work=2.0 * source.nbytes, note="a torch kernel")


def cast_tables(setting: Setting) -> list[Table]:
    """One row for each format and tile, on tensors larger than the L2 cache."""
    rows, cols = setting.sizes.cast
    experts, n, k = setting.sizes.masters
    cases = [
        _cast_case(setting, "quantize 1×128", (rows, cols), E4M3, ROW_128),
        _cast_case(setting, "quantize 128×1", (rows, cols), E4M3, COLUMN_128),
        _both_case(setting, "quantize 1×128 and 128×1", (rows, cols)),
        _weight_case(setting, "weights 128×128, FP32 masters → codes and their transpose", (experts, n, k)),
        _cast_case(setting, "quantize E5M6 1×128", (rows, cols), E5M6, ROW_128),
        _retile_case(setting, "re-tile E4M3 1×128 → 128×1", (rows, cols), E4M3),
        _retile_case(setting, "re-tile E5M6 1×128 → E4M3 128×1", (rows, cols), E5M6),
        _decode_case(setting, "decode E5M6 → BF16", (rows, cols)),
    ]
    about = (
        "input once and codes and scales once, in the layout that the backend gives; the ratio is the share of a copy's rate"
    )
    return [Table("casts", "Casts and re-tiles", "GB/s", COPY, about, cases)]


def attention_tables(setting: Setting) -> list[Table]:
    """Causal attention with unequal head sizes, forward and backward, 2 FLOP a multiply-add of the visible half."""
    heads, length, qk, v = size = setting.sizes.attention
    about = (
        f"causal, 1 × {heads} heads × {length}, q and k {qk} wide, v {v}; backward makes the scores again; triton: the kernels "
        f"of training.deterministic=true; isolated: {DOCUMENTS} documents of one length"
    )
    isolated = attention_cases(setting, size, DOCUMENTS)
    return [Table("attention", "Attention", "TFLOP/s", "", about, [*attention_cases(setting, size, 1, True), *isolated])]


def attention_cases(setting: Setting, size: tuple[int, int, int, int], documents: int = 1, beside: bool = False) -> list[Case]:
    """Forward and backward. size: heads, tokens, q and k width, v width. documents: isolated, if more than one.

    beside: our own kernels too, where a run would take cuDNN.
    """
    heads, length, qk, v = size
    square = float(length) * length * heads / documents  # two FLOP, half of the scores
    name = "" if documents == 1 else ", isolated"
    ways = partial(_attention, setting, size, documents, beside)
    return [
        Case(f"forward{name}", square * (qk + v), partial(ways, backward=False)),
        Case(f"backward{name}", square * (3 * qk + 2 * v), partial(ways, backward=True)),
    ]


def moved(shape: tuple[int, ...], fmt: Format, tile: Tile, read: float) -> float:
    """Bytes of a cast: `read` an element, and the codes and fp32 scales that are written."""
    *lead, rows, cols = shape
    count = 1
    for size in lead:
        count *= size
    grid = ceil_div(rows, tile.rows or rows) * ceil_div(cols, tile.cols or cols)
    written = 1.5 if fmt is E5M6 else 1.0
    return count * (rows * cols * (read + written) + 4.0 * grid)


def _cast_case(
    setting: Setting, name: str, shape: tuple[int, ...], fmt: Format, tile: Tile, dtype: torch.dtype = torch.bfloat16
) -> Case:
    def build() -> list[Way]:
        x = random(setting, *shape, dtype=dtype)
        chosen = backend.choose_quantize(x.device, fmt, tile, shape[-1])
        return [_ours(lambda: backend.quantize(x, fmt, tile), str(chosen)), copy_way(setting)]

    return Case(name, moved(shape, fmt, tile, dtype.itemsize), build)


def _retile_case(setting: Setting, name: str, shape: tuple[int, int], fmt: Format) -> Case:
    def build() -> list[Way]:
        source = backend.quantize(random(setting, *shape), fmt, ROW_128)
        chosen = backend.choose_quantize(source.codes.device, E4M3, COLUMN_128, shape[-1], source=source)
        return [_ours(lambda: backend.retile(source, COLUMN_128, fmt=E4M3), str(chosen)), copy_way(setting)]

    cols = shape[1]
    read = (1.5 if fmt is E5M6 else 1.0) + 4.0 * ceil_div(cols, 128) / cols
    return Case(name, moved(shape, E4M3, COLUMN_128, read), build)


def _both_case(setting: Setting, name: str, shape: tuple[int, int]) -> Case:
    def build() -> list[Way]:
        x = random(setting, *shape)
        return [_ours(lambda: backend.quantize_both(x, E4M3), ""), copy_way(setting)]

    written = moved(shape, E4M3, ROW_128, 0.0) + moved(shape, E4M3, COLUMN_128, 0.0)
    return Case(name, 2.0 * shape[0] * shape[1] + written, build)


def _weight_case(setting: Setting, name: str, shape: tuple[int, int, int]) -> Case:
    """As an optimizer step makes them: what fprop reads, and what dgrad reads."""

    def build() -> list[Way]:
        master = random(setting, *shape, dtype=torch.float32)
        codes = WeightCodes(LinearQuantizers(recipe_named("dsv3"), "expert_down", shape[0]))

        def call() -> object:
            codes.invalidate()
            return codes.fprop(master), codes.dgrad(master)

        return [_ours(call, ""), copy_way(setting)]

    return Case(name, 4.0 * shape[0] * shape[1] * shape[2] + 2 * moved(shape, E4M3, BLOCK_128, 0.0), build)


def _decode_case(setting: Setting, name: str, shape: tuple[int, int]) -> Case:
    def build() -> list[Way]:
        source = backend.quantize(random(setting, *shape), E5M6, ROW_128)
        return [_ours(lambda: backend.decode(source, torch.bfloat16), ""), copy_way(setting)]

    return Case(name, 2.0 * shape[0] * shape[1] + moved(shape, E5M6, ROW_128, 0.0), build)


def _ours(call: Callable[[], object], note: str) -> Way:
    return Way("ours", lambda: [call], note=note)


def _attention(setting: Setting, size: tuple[int, int, int, int], documents: int, beside: bool, *, backward: bool) -> list[Way]:
    heads, length, qk, v_width = size
    q, k, dout_wide = (random(setting, 1, length, heads, qk) for _ in range(3))
    v, dout = random(setting, 1, length, heads, v_width), dout_wide[..., :v_width].contiguous()
    ids = None
    if documents > 1:
        ids = (torch.arange(length, device=setting.device, dtype=torch.int32) * documents // length)[None]
    chosen = attention.choose(setting.device, q.dtype, (qk, v_width), ids is not None)

    def calls(kernels: str) -> list[Callable[[], object]]:
        if not backward:
            return [lambda: attention.forward(kernels, q, k, v, qk**-0.5, ids)]
        out, lse = attention.forward(kernels, q, k, v, qk**-0.5, ids)
        return [lambda: attention.backward(kernels, dout, q, k, v, out, lse, qk**-0.5, ids)]

    ways = [Way("ours", partial(calls, chosen.backend), note=str(chosen))]
    if beside and setting.device.type == "cuda":
        ways.append(Way("triton", partial(calls, "triton"), note="the same bits in every run"))
    return ways
