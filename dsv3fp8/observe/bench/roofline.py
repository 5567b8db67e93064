"""A yardstick for the layer under dsv3: its GEMMs and attention at the best rates of this run, and its bytes, one by one.

No bound. Parts are measured alone, back to back on a hot chip: inside the layer GEMMs run some 10 % faster. A kernel that does
more than one op's work in a pass (a GEMM that adds the residual as it stores) can go below it as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from dsv3fp8.model.config import ModelConfig
from dsv3fp8.model.manifest import linear_shapes
from dsv3fp8.observe.bench.casts import COPY, attention_cases, copy_way
from dsv3fp8.observe.bench.gemms import PEER as DENSE_PEER
from dsv3fp8.observe.bench.gemms import dense_ways
from dsv3fp8.observe.bench.grouped import PEER as GROUPED_PEER
from dsv3fp8.observe.bench.grouped import grouped_ways
from dsv3fp8.observe.bench.operands import Setting
from dsv3fp8.observe.bench.rates import Case, Table, Way
from dsv3fp8.observe.kept_bytes import block_config
from dsv3fp8.precision.tiles import ceil_div

GEMMS = ("fprop", "dgrad", "wgrad")
BF16 = 2.0
E4M3 = 1 + 4 / 128  # a code with its share of a tile's fp32 scale
E5M6 = 1.5 + 4 / 128
FP32 = 4.0
Medians = Mapping[str, Mapping[str, float | None]]
"""Milliseconds by case and way."""


@dataclass(frozen=True)
class LayerGemm:
    """A linear of the layer: y [rows, outputs] = x [rows, inputs] W^T, of each of `experts` experts (0: no experts)."""

    op: str
    experts: int
    rows: int
    inputs: int
    outputs: int

    @property
    def work(self) -> float:
        """FLOP of one of its three GEMMs."""
        return 2.0 * max(self.experts, 1) * self.rows * self.inputs * self.outputs


def layer_gemms(config: ModelConfig, tokens: int) -> list[LayerGemm]:
    """The linears of a MoE layer, experts with equal numbers of rows, in whole blocks of 128."""
    found = []
    for op, (inputs, outputs) in linear_shapes(config).items():
        if op.startswith("expert_"):
            rows = 128 * ceil_div(tokens * config.top_k, 128 * config.experts)
            found.append(LayerGemm(op, config.experts, rows, inputs, outputs))
        elif op not in ("gate_up", "down"):  # a dense layer's
            found.append(LayerGemm(op, 0, tokens, inputs, outputs))
    return found


def byte_passes(config: ModelConfig, tokens: int) -> dict[str, float]:
    """Bytes that each op between the GEMMs reads and writes under dsv3, each tensor once, scales of 1x128 tiles included.

    A token's copies are read once where they are dispatched. Statistics, indices and gate weights are left out.
    """
    heads, rope = config.heads, config.head_rope
    x = float(tokens * config.dim)  # elements of the residual stream
    copies = x * config.top_k
    q, attended = float(tokens * heads * config.head_qk), float(tokens * heads * config.head_v)
    kv, k_rope = float(tokens * heads * (config.head_nope + config.head_v)), float(tokens * rope)
    latents = float(tokens * ((config.q_latent or 0) + config.kv_latent))
    acts = float(tokens * (config.top_k + config.shared_experts) * config.expert_ffn)
    return {
        "attention norm": x * (BF16 + E4M3),
        "latent norms": latents * (BF16 + E4M3),
        "RoPE": BF16 * (q + kv + k_rope + 2 * q + attended),
        "attention's output: E5M6 cache and codes": attended * (BF16 + E5M6 + E4M3),
        "residual behind attention": x * 3 * BF16,
        "FFN norm": x * (2 * BF16 + E4M3),
        "router": x * BF16,
        "dispatch": (x + copies) * E4M3,
        "SwiGLU": acts * (2 * BF16 + 3 * E4M3),
        "combine and residual": (copies + 3 * x) * BF16,
        "dY: casts": x * (BF16 + 3 * E4M3),
        "dY: dispatch": (x + copies) * E4M3,
        "re-tiles": (2 * copies + 2 * x + latents) * 2 * E4M3 + acts * 3 * E4M3 + attended * (E5M6 + E4M3),
        "SwiGLU backward": acts * (2 * E4M3 + BF16 + 4 * E4M3),
        "combine of dX": (copies + x) * BF16,
        "FFN norm backward": x * (5 * BF16 + FP32),
        "dX behind attention: casts": x * (BF16 + 2 * E4M3),
        "attention backward: decode": attended * (E5M6 + BF16),
        "RoPE backward": BF16 * (2 * q + attended + k_rope) + 2 * E4M3 * (q + kv),
        "latent norms backward": latents * (2 * BF16 + 2 * E4M3) + k_rope * (BF16 + 2 * E4M3),
        "attention norm backward": x * (3 * BF16 + 2 * FP32),
    }


def roofline_tables(setting: Setting) -> list[Table]:
    """What has to be measured: each GEMM of the layer, attention at its size, and a copy."""
    name, tokens = setting.sizes.layer
    config = block_config(name)
    dense, grouped = [], []
    for linear in layer_gemms(config, tokens):
        for gemm in GEMMS:
            if linear.experts:
                shape = (linear.experts, linear.rows, linear.outputs, linear.inputs)
                grouped.append(Case(f"{linear.op} {gemm}", linear.work, partial(grouped_ways, setting, gemm, shape)))
            else:
                sizes = (linear.rows, linear.outputs, linear.inputs)
                dense.append(Case(f"{linear.op} {gemm}", linear.work, partial(_fast_ways, setting, gemm, *sizes)))
    attention = attention_cases(setting, (config.heads, tokens, config.head_qk, config.head_v))
    about = "the layer's own shapes; operands are quantized before the clock starts"
    return [
        Table("layer, dense", "GEMMs of the layer", "TFLOP/s", DENSE_PEER, about, dense),
        Table("layer, grouped", "Grouped GEMMs of the layer", "TFLOP/s", GROUPED_PEER, about, grouped),
        Table("layer, attention", "Attention of the layer", "TFLOP/s", "", "causal, as in the layer", attention),
        Table("layer, copy", "Copy", "GB/s", "", "the rate of bytes", [_copy_case(setting)]),
    ]


def _fast_ways(setting: Setting, gemm: str, *sizes: int) -> list[Way]:
    return [way for way in dense_ways(setting, gemm, *sizes) if way.name != "triton"]


def _copy_case(setting: Setting) -> Case:
    return Case(COPY, 2.0 * setting.sizes.copied, lambda: [copy_way(setting)])


def roofline(setting: Setting, measured: Mapping[str, Medians], layer: Mapping[str, float | None]) -> dict[str, Any]:
    """The parts with their best times, their sum, and the share of it that each measured layer reaches.

    measured: the medians of `roofline_tables`, by table. layer: of forward with backward, by subject.
    """
    name, tokens = setting.sizes.layer
    config = block_config(name)
    parts = [_gemm_part(linear, measured) for linear in layer_gemms(config, tokens)]
    attention = [best(ways) for ways in measured["layer, attention"].values()]
    attention_ms = None if None in attention else sum(ms for ms in attention if ms is not None)
    parts.append({"part": "attention", "work": "cuDNN's time, forward and backward", "rates": "", "ms": attention_ms})
    copy_ms = measured["layer, copy"][COPY][COPY]
    per_ms = None if copy_ms is None else 2.0 * setting.sizes.copied / copy_ms
    parts += [_byte_part(what, size, per_ms) for what, size in byte_passes(config, tokens).items()]
    times = [part["ms"] for part in parts]
    total = None if None in times else sum(times)
    weights = 6.0 * sum(linear.work / 2 / linear.rows for linear in layer_gemms(config, tokens))
    return {
        "parts": parts,
        "ms": total,
        "once_a_step": _byte_part("weight casts", weights, per_ms),
        "shares": {
            subject: {"ms": ms, "share": None if ms is None or total is None else total / ms} for subject, ms in layer.items()
        },
    }


def _gemm_part(linear: LayerGemm, measured: Mapping[str, Medians]) -> dict[str, Any]:
    cases = measured["layer, grouped" if linear.experts else "layer, dense"]
    times = [best(cases[f"{linear.op} {gemm}"]) for gemm in GEMMS]
    rates = [f"{linear.work / ms * 1e-9:,.0f}" if ms else "–" for ms in times]
    total = None if None in times else sum(ms for ms in times if ms is not None)
    return {"part": linear.op, "work": f"{3 * linear.work / 1e12:.2f} TFLOP", "rates": " / ".join(rates), "ms": total}


def best(ways: Mapping[str, float | None]) -> float | None:
    """The shortest time of those ways that are no BF16 peer."""
    times = [ms for way, ms in ways.items() if ms is not None and way not in (DENSE_PEER, GROUPED_PEER)]
    return min(times, default=None)


def _byte_part(what: str, size: float, per_ms: float | None) -> dict[str, Any]:
    rate = "" if per_ms is None else f"{per_ms * 1e-6:,.0f}"
    return {"part": what, "work": f"{size / 1e9:.2f} GB", "rates": rate, "ms": None if per_ms is None else size / per_ms}
