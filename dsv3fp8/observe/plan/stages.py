"""What a unit's backward holds at its fullest moments, as the ops under dsv3fp8/ops have it.

An op's backward is one Python function: what it made lies there until it returns. Of a MoE block the shared expert comes
first, then the routed experts, all in one function, then attention. Norms, RoPE and projections hold less than what is
before or behind them. Workspaces of cuDNN and cuBLASLt are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv3fp8.model.config import ModelConfig
from dsv3fp8.observe.plan.stash import Load, kept_by_norm, kept_by_router, kept_by_row, kept_by_swiglu
from dsv3fp8.observe.plan.weights import FP32, SCALE, compute_bytes
from dsv3fp8.ops.cross_entropy import GPU_CHUNK_VALUES
from dsv3fp8.precision.recipe import OperandSpec, Recipe
from dsv3fp8.precision.tiles import ceil_div

FEED_FORWARD = ("gate_up", "down", "shared_gate_up", "shared_down")
EXPERTS = (*FEED_FORWARD, "expert_gate_up", "expert_down")
BEFORE_OUT = ("attention norm", "query norm", "key and value norm", "q", "q_a", "q_b", "kv_a", "kv_b")
JOINT = ("hidden norm", "embedding norm", "projection")


@dataclass(frozen=True)
class Stage:
    """work: bytes beside stash and gradients of weights. freed: bytes of the unit's stash that are gone by then."""

    name: str
    work: int
    freed: int = 0

    def made(self, weight: str) -> bool:
        """Whether a weight of the unit has its gradient by then."""
        if self.name == "FFN":
            return weight in FEED_FORWARD
        if self.name == "experts":
            return weight in EXPERTS
        return self.name == "" or weight not in (*BEFORE_OUT, *JOINT)


def stages(config: ModelConfig, recipe: Recipe, unit: str, load: Load, dealt: bool) -> list[Stage]:
    """Of a unit, in the order of backward. dealt: experts lie on several GPUs."""
    carried, tokens = compute_bytes(recipe), load.tokens
    stream = tokens * config.dim * carried  # a gradient of the residual stream
    if unit == "embedding":
        return [Stage("", stream)]
    if unit == "head":
        logits = min(tokens * (config.vocab_size or 0), GPU_CHUNK_VALUES)
        return [Stage("", logits * (FP32 + carried) + stream)]
    routed = config.has_experts and unit != "dense"
    shared = bool(config.shared_experts) or not routed
    swiglu, (norm_input, norm_output) = kept_by_swiglu(config, recipe, unit), kept_by_norm(config, recipe)
    found = []
    if shared:
        wide = config.shared_experts * config.expert_ffn if routed else config.ffn
        found.append(Stage("FFN", stream + tokens * _feed_forward(config, recipe, wide)))
    freed = tokens * (swiglu + norm_output)
    if routed:
        # dY, dX of the shared expert, which waits for the norm's backward, and their own dX.
        work = (2 + shared) * stream + load.padded * _expert_row(config, recipe)
        if dealt:  # rows in the order in which they came, and those that other GPUs send back
            work += (load.rows + tokens * config.top_k) * carried * config.dim
        found.append(Stage("experts", work, freed))
        freed += load.padded * kept_by_row(config, recipe) + tokens * kept_by_router(config)
    attention = tokens * _attention(config, recipe)
    return [*found, Stage("attention", stream + attention, freed + tokens * norm_input)]


def _operand(spec: OperandSpec, width: int, carried: int) -> int:
    """Bytes of a row as a GEMM reads it."""
    return width + SCALE * ceil_div(width, 128) if spec.quantized else carried * width


def _again(spec: OperandSpec, width: int) -> int:
    """Bytes of a row in its other orientation; none where one serves both GEMMs."""
    return _operand(spec, width, 0) if spec.quantized and not spec.one_orientation else 0


def _cast(spec: OperandSpec, width: int, carried: int) -> int:
    """Bytes of a row of SwiGLU's gradient: as codes both ways from its kernel, else in the compute type, and its codes."""
    rides = spec.quantized and spec.tile == "1x128" and spec.scaling == "current"
    codes = _operand(spec, width, carried) + _again(spec, width) if spec.quantized else 0
    return codes + (0 if rides else carried * width)


def _expert_row(config: ModelConfig, recipe: Recipe) -> int:
    """Bytes by row at the end of the routed experts' backward, which has held all that it made."""
    carried, dim, hidden = compute_bytes(recipe), config.dim, config.expert_ffn
    gate_up, down = recipe.linear("expert_gate_up"), recipe.linear("expert_down")
    gradient = _operand(down.gradient, dim, carried) + _again(down.gradient, dim)  # as dispatched, and re-tiled
    activation = _operand(down.input, hidden, carried) if recipe.swiglu_output == "recompute" else 0
    activation += _again(down.input, hidden)
    dact, dh = carried * hidden, _cast(gate_up.gradient, 2 * hidden, carried)
    return gradient + activation + dact + dh + carried * dim + _again(gate_up.input, dim)  # rows of dX; received, re-tiled


def _feed_forward(config: ModelConfig, recipe: Recipe, hidden: int) -> int:
    """Bytes by token in the fuller one of the two linears: dY's codes, dX, the operand made again and re-tiled."""
    carried, dim = compute_bytes(recipe), config.dim
    gate_up, down = recipe.linear("shared_gate_up"), recipe.linear("shared_down")
    made = _operand(down.gradient, dim, carried) + _again(down.gradient, dim) if down.gradient.quantized else 0
    made += _operand(down.input, hidden, carried) if recipe.swiglu_output == "recompute" else 0
    made += _again(down.input, hidden) + carried * hidden
    return max(made, _cast(gate_up.gradient, 2 * hidden, carried) + carried * dim + _again(gate_up.input, dim))


def _attention(config: ModelConfig, recipe: Recipe) -> int:
    """Bytes by token: the output's gradient, the output decoded, dq, dk, dv; q, k, v where they are made again."""
    carried = compute_bytes(recipe)
    output = config.heads * config.head_v
    inputs = 2 * config.heads * config.head_qk + output
    decoded = output if recipe.attention_cache == "e5m6" else 0
    return carried * (output + decoded + inputs * (2 if recipe.recompute == "norms_and_up" else 1))
