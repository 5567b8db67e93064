"""The precision manifest of a run: what every linear quantizes, what is kept per token, which backend each op takes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from dsv3fp8.kernels.backend import Choice
from dsv3fp8.kernels.explain import explain
from dsv3fp8.kernels.te import INSIDE
from dsv3fp8.model.config import ModelConfig
from dsv3fp8.precision.recipe import LINEAR_OPS, OperandSpec, Recipe
from dsv3fp8.precision.tiles import ceil_div

ALWAYS_HIGH = {
    "embedding": "fp32 master",
    "output head": "compute type, fp32 logits and loss",
    "norms": "compute type, fp32 statistics and gamma gradients",
    "attention": "compute type, fp32 softmax",
    "router": "fp32",
    "multi-token projection": "compute type",
    "weight gradients": "fp32",
    "master weights": "fp32",
}


TE_OPERANDS = {"input": "e4m3 1x128 pow2", "weight": "e4m3 128x128 pow2", "gradient": "e4m3 1x128 pow2"}
"""How Transformer Engine documents what its Float8BlockScaling does."""

RECOMPUTED = {
    "none": "no norm, no projection",
    "norms": "norm outputs",
    "norms_and_up": "norm outputs and the up-projections (attention's q, k, v)",
}


def linear_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(in, out) features of every linear op this model has."""
    dim, heads = config.dim, config.heads
    shapes = {
        "kv_a": (dim, config.kv_latent + config.head_rope),
        "kv_b": (config.kv_latent, heads * (config.head_nope + config.head_v)),
        "out": (heads * config.head_v, dim),
    }
    if config.q_latent is None:
        shapes["q"] = (dim, heads * config.head_qk)
    else:
        shapes |= {"q_a": (dim, config.q_latent), "q_b": (config.q_latent, heads * config.head_qk)}
    if config.dense_layers:
        shapes |= {"gate_up": (dim, 2 * config.ffn), "down": (config.ffn, dim)}
    if config.has_experts:
        shapes |= {"expert_gate_up": (dim, 2 * config.expert_ffn), "expert_down": (config.expert_ffn, dim)}
        if config.shared_experts:
            hidden = config.shared_experts * config.expert_ffn
            shapes |= {"shared_gate_up": (dim, 2 * hidden), "shared_down": (hidden, dim)}
    return {op: shapes[op] for op in LINEAR_OPS if op in shapes}


def precision_manifest(config: ModelConfig, recipe: Recipe, device: torch.device, isolated: bool = False) -> dict[str, Any]:
    """Plain containers, ready for JSON. Bytes are per token and layer, from the recipe's formats.

    isolated: documents are kept apart in attention.
    """
    linears = {}
    for op, (fan_in, fan_out) in linear_shapes(config).items():
        spec = recipe.linear(op)
        linears[op] = {
            "shape": [fan_in, fan_out],
            **{role: _describe(role, getattr(spec, role), recipe) for role in ("input", "weight", "gradient")},
            "promote_every": spec.promote_every,
        }
    probe = device if device.type != "meta" else torch.device("cpu")
    taken = explain(recipe, probe, linear_shapes(config), isolated, (config.head_qk, config.head_v))
    backends = [{"op": op, **dataclasses.asdict(choice)} for op, choice in taken]
    present = set(linears)
    return {
        "recipe": recipe.name,
        "compute": recipe.compute,
        "accumulator": recipe.accumulator or "fp32 in the reference, the tensor core's own on Hopper",
        "gemm": recipe.gemm,
        "whose_linears": INSIDE if recipe.linears == "te" else "this package's",
        "linears": linears,
        "high_precision": dict(ALWAYS_HIGH),
        "caches": _caches(config, recipe),
        "choices": {k: getattr(recipe, k) for k in ("operand", "swiglu_input", "swiglu_output", "gate", "recompute")},
        "backends": [b for b in backends if "." not in b["op"] or b["op"].split(".")[0] in present],
    }


def _describe(role: str, spec: OperandSpec, recipe: Recipe) -> str:
    if recipe.linears == "te":
        return TE_OPERANDS[role]
    if not spec.quantized:
        return recipe.compute
    scaling = "" if spec.scaling == "current" else f" {spec.scaling}"
    return f"{spec.format} {spec.tile} {spec.scale}{scaling}"


def _caches(config: ModelConfig, recipe: Recipe) -> dict[str, dict[str, Any]]:
    plain = 2 if recipe.compute == "bf16" else 4
    width = config.heads * config.head_v
    if recipe.attention_cache == "e5m6":
        attention = {"format": "e5m6 1x128 pow2", "bytes": ceil_div(width, 2) * 3 + 4 * ceil_div(width, 128)}
    else:
        attention = {"format": recipe.compute, "bytes": plain * width}
    swiglu: dict[str, Any] = {"format": recipe.compute}
    if recipe.swiglu_cache.format == "e4m3":
        swiglu["format"] = f"e4m3 1x128 {recipe.swiglu_cache.scale}"

    def swiglu_bytes(hidden: int) -> int:
        if recipe.swiglu_cache.format == "e4m3":
            return 2 * (hidden + 4 * ceil_div(hidden, 128))
        return 2 * hidden * plain

    if config.dense_layers:
        swiglu["bytes_dense_layer"] = swiglu_bytes(config.ffn)
    if config.has_experts:
        swiglu["bytes_moe_layer"] = config.top_k * swiglu_bytes(config.expert_ffn) + (
            swiglu_bytes(config.shared_experts * config.expert_ffn) if config.shared_experts else 0
        )
    return {"attention_output": attention, "swiglu_input": swiglu}


def format_manifest(manifest: dict[str, Any]) -> str:
    """The manifest as a short table for the terminal."""
    lines = [
        f"precision: recipe {manifest['recipe']}, compute {manifest['compute']}, accumulator {manifest['accumulator']}, "
        f"gemm {manifest['gemm']}"
    ]
    if manifest["whose_linears"] == INSIDE:
        lines.append(f"  linears: {INSIDE}")
    lines.append(f"  {'linear':<16}{'in -> out':<16}{'input':<20}{'weight':<20}{'gradient':<20}backend")
    by_op: dict[str, list[str]] = {}
    for entry in manifest["backends"]:
        op, _, gemm = entry["op"].partition(".")
        if gemm and entry["backend"] not in by_op.setdefault(op, []):
            by_op[op].append(entry["backend"])
    for op, row in manifest["linears"].items():
        shape = f"{row['shape'][0]} -> {row['shape'][1]}"
        backends = ", ".join(by_op.get(op, []))
        lines.append(f"  {op:<16}{shape:<16}{row['input']:<20}{row['weight']:<20}{row['gradient']:<20}{backends}")
    caches = manifest["caches"]
    attention, swiglu = caches["attention_output"], caches["swiglu_input"]
    kept = f"  kept per token and layer: attention output {attention['format']} ({attention['bytes']} bytes)"
    sizes = ", ".join(f"{v} bytes {k.removeprefix('bytes_').replace('_', ' ')}" for k, v in swiglu.items() if k != "format")
    lines.append(f"{kept}, SwiGLU input {swiglu['format']} ({sizes})")
    lines.append(f"  recomputed in backward: {RECOMPUTED[manifest['choices']['recompute']]}")
    lines.append("  fp32: router, softmax, norm statistics, loss, weight gradients, master weights")
    reasons = sorted({str(Choice(b["backend"], b["reason"], b["exact"])) for b in manifest["backends"]})
    lines.extend(f"  backend {reason}" for reason in reasons)
    return "\n".join(lines)
