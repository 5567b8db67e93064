"""The recipe: what every op computes in and every tensor is carried in. Data, no behaviour.

A recipe is one small YAML file (configs/recipe). `roles` says how the three operands of every linear are quantized;
`ops` overrides that for one op at a time. `linear(op)` gives the resolved specification of one linear.
"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass, field
from typing import Any

from dsv3fp8.errors import UserError
from dsv3fp8.precision.formats import FORMATS, Format
from dsv3fp8.precision.tiles import BLOCK_128, Tile

LINEAR_OPS = (
    "q_a", "q_b", "q", "kv_a", "kv_b", "out", "gate_up", "down",
    "shared_gate_up", "shared_down", "expert_gate_up", "expert_down",
)  # fmt: skip
ROLES = ("input", "weight", "gradient")

FORMAT_NAMES = ("e4m3", "e5m2", "none")
TILE_NAMES = ("1x128", "128x128", "row", "tensor")
SCALE_KINDS = ("fp32", "pow2")
SCALINGS = ("current", "delayed", "static")
PROMOTIONS = (32, 64, 128)


@dataclass(frozen=True)
class OperandSpec:
    """How one operand of a GEMM is stored. Tiles are named along the GEMM's K.

    format: e4m3, e5m2, or none (carried in the recipe's `compute` type).
    tile: 1x128 (128 values along K), 128x128, row (all of K), tensor (everything).
    scale: fp32 (amax / max) or pow2 (the smallest power of two not below it).
    scaling: current (from this tensor), delayed (from the last steps' amax) or static (calibrated, then frozen).
    """

    format: str = "none"
    tile: str = "1x128"
    scale: str = "fp32"
    scaling: str = "current"

    @property
    def quantized(self) -> bool:
        return self.format != "none"

    @property
    def storage(self) -> Format:
        return FORMATS[self.format]

    def tile_along(self, k_axis: int) -> Tile:
        """The tile of a matrix whose columns (k_axis=1) or rows (k_axis=0) are the GEMM's K."""
        tile = {"1x128": Tile(1, 128), "128x128": BLOCK_128, "row": Tile(1, None), "tensor": Tile(None, None)}[self.tile]
        return tile if k_axis == 1 else tile.transposed()

    @property
    def one_orientation(self) -> bool:
        """Whether the same codes serve a GEMM along either axis."""
        return self.tile in ("128x128", "tensor")


@dataclass(frozen=True)
class GemmSpec:
    """The resolved recipe of one linear's three GEMMs."""

    op: str
    input: OperandSpec
    weight: OperandSpec
    gradient: OperandSpec
    retiled_scale: str | None  # scale kind of a re-tiled copy; None takes its source's
    promote_every: int | str
    accumulator: str | None
    gemm: str
    compute: str


@dataclass(frozen=True)
class SwigluCache:
    """How SwiGLU's input is kept for backward: format e4m3 (1x128 tiles) or compute, and its scale kind."""

    format: str = "compute"  # e4m3 | compute: how SwiGLU's input is kept for backward
    scale: str = "fp32"  # fp32 | pow2: of its 1x128 tiles


@dataclass(frozen=True)
class Recipe:
    """What a run computes in. Field by field in configs/recipe/base.yaml and docs/recipes.md."""

    name: str  # for the manifest, the plot and the default run_dir
    compute: str = "bf16"  # bf16 | fp32: what unquantized ops and tensors are carried in
    # hopper: its tensor core's sums to the bit, emulated elsewhere; fp32: plain FP32; null: hopper on a Hopper GPU, else fp32
    accumulator: str | None = None
    # On a Hopper GPU. fast: Gluon for BF16 results up to K = 2048, else cuBLASLt; exact: kernels whose every bit is defined
    gemm: str = "fast"
    # ours, or te: Transformer Engine's under Float8BlockScaling, which quantizes inside, where nobody observes
    linears: str = "ours"
    promote_every: int | str = 128  # FP8 products that the tensor core sums before they enter FP32, or never
    # For input, weight and gradient: format, tile, scale, scaling; see docs/recipes.md.
    roles: dict[str, OperandSpec] = field(default_factory=lambda: {r: OperandSpec() for r in ROLES})
    retiled_scale: str | None = None  # fp32 | pow2: scale kind of re-tiled copies; null takes the source's
    # The same for one linear: ops.out.input.scale=fp32.
    ops: dict[str, dict[str, Any]] = field(default_factory=dict)
    attention_cache: str = "compute"  # e5m6 | compute: how attention's output is kept for backward
    swiglu_cache: SwigluCache = SwigluCache()
    operand: str = "cache"  # cache | bf16: the out projection reads the decoded attention cache, or the output itself
    swiglu_input: str = "cache"  # cache | bf16: SwiGLU reads its input through the cache's cast, or as it came
    swiglu_output: str = "recompute"  # recompute | keep: the down projection's wgrad operand
    gate: str = "before"  # before | after: gate weights multiply inside SwiGLU, or the expert's output
    recompute: str = "none"  # none | norms | norms_and_up: made again in backward instead of kept
    amax_history: int = 16  # steps of amax that delayed scaling looks back on
    calibration_steps: int = 16  # steps after which static scales are frozen

    def linear(self, op: str) -> GemmSpec:
        """The specification of a linear op: one of LINEAR_OPS, or any other name for a linear that never runs in FP8."""
        override = self.ops.get(op) or {}
        specs = {
            role: _overridden(self.roles[role], override.get(role)) if op in LINEAR_OPS else OperandSpec() for role in ROLES
        }
        return GemmSpec(
            op=op,
            retiled_scale=_or(override.get("retiled_scale"), self.retiled_scale),
            promote_every=_or(override.get("promote_every"), self.promote_every),
            accumulator=self.accumulator,
            gemm=self.gemm,
            compute=self.compute,
            **specs,
        )

    @property
    def quantizes(self) -> bool:
        return any(getattr(self.linear(op), role).quantized for op in LINEAR_OPS for role in ROLES)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Recipe:
        """Builds and validates; unknown names and values are a UserError naming the key."""
        data = dict(data)
        _known("recipe", data, [f.name for f in dataclasses.fields(Recipe)])
        if not data.get("name"):
            raise UserError("recipe.name is missing: give the recipe a name")
        roles = data.pop("roles", None) or {}
        _known("recipe.roles", roles, ROLES)
        data["roles"] = {r: _operand(f"recipe.roles.{r}", roles.get(r) or {}) for r in ROLES}
        cache = data.pop("swiglu_cache", None) or {}
        _known("recipe.swiglu_cache", cache, ("format", "scale"))
        data["swiglu_cache"] = SwigluCache(**cache)
        data["ops"] = _op_overrides(data.pop("ops", None) or {})
        recipe = Recipe(**{k: v for k, v in data.items() if v is not None})
        recipe.validate()
        return recipe

    def to_dict(self) -> dict[str, Any]:
        """Plain containers; from_dict(to_dict()) is the same recipe."""
        return dataclasses.asdict(self)

    def validate(self) -> None:
        _one_of("recipe.compute", self.compute, ("bf16", "fp32"))
        _one_of("recipe.accumulator", self.accumulator, (None, "fp32", "hopper"))
        _one_of("recipe.gemm", self.gemm, ("fast", "exact"))
        _one_of("recipe.retiled_scale", self.retiled_scale, (None, *SCALE_KINDS))
        _one_of("recipe.attention_cache", self.attention_cache, ("e5m6", "compute"))
        _one_of("recipe.swiglu_cache.format", self.swiglu_cache.format, ("e4m3", "compute"))
        _one_of("recipe.swiglu_cache.scale", self.swiglu_cache.scale, SCALE_KINDS)
        _one_of("recipe.operand", self.operand, ("cache", "bf16"))
        _one_of("recipe.swiglu_input", self.swiglu_input, ("cache", "bf16"))
        _one_of("recipe.swiglu_output", self.swiglu_output, ("recompute", "keep"))
        _one_of("recipe.gate", self.gate, ("before", "after"))
        _one_of("recipe.recompute", self.recompute, ("none", "norms", "norms_and_up"))
        _one_of("recipe.linears", self.linears, ("ours", "te"))
        for key in ("amax_history", "calibration_steps"):
            if not isinstance(getattr(self, key), int) or getattr(self, key) < 1:
                raise UserError(f"recipe.{key}={getattr(self, key)!r}: give a whole number of steps, 1 or more")
        for op in LINEAR_OPS:
            self._validate_gemm(self.linear(op))
        if self.quantizes and self.compute != "bf16":
            raise UserError(f"recipe.compute={self.compute}: quantized recipes compute in bf16; or set every format to none")
        if self.linears == "te":
            self._validate_te()

    def _validate_te(self) -> None:
        """Transformer Engine's linears take BF16, and keep for backward what they like."""
        if self.quantizes:
            raise UserError("recipe.linears=te quantizes inside Transformer Engine: leave every format at none")
        for key, only in (("compute", "bf16"), ("attention_cache", "compute"), ("recompute", "none"), ("gate", "before")):
            if (value := getattr(self, key)) != only:
                raise UserError(f"recipe.{key}={value} has no meaning under recipe.linears=te: leave it at {only}")
        if self.swiglu_cache.format != "compute":
            raise UserError("recipe.swiglu_cache.format=e4m3 has no meaning under recipe.linears=te: leave it at compute")

    def _validate_gemm(self, spec: GemmSpec) -> None:
        own = (self.ops.get(spec.op) or {}).get("promote_every") is not None
        where = f"recipe.ops.{spec.op}.promote_every" if own else "recipe.promote_every"
        quantized = [getattr(spec, r) for r in ROLES if getattr(spec, r).quantized]
        legal = spec.promote_every in PROMOTIONS or spec.promote_every == "never"
        if not legal and not (isinstance(spec.promote_every, int) and spec.promote_every in (256, 512, 1024, 2048, 4096)):
            raise UserError(f"{where}={spec.promote_every!r}: give 32, 64, 128, 256, 512, 1024, 2048, 4096 or never")
        if spec.promote_every not in PROMOTIONS and any(s.tile in ("1x128", "128x128") for s in quantized):
            raise UserError(
                f"{where}={spec.promote_every}: a partial sum longer than 128 needs scales that are constant along K; "
                "use tile row or tensor for every role, or promote every 32, 64 or 128"
            )
        if quantized and spec.promote_every != 128 and self.accumulator != "hopper":
            raise UserError(
                f"{where}={spec.promote_every}: only the tensor core's accumulator tells promotion intervals apart; "
                "set recipe.accumulator=hopper, or leave it at 128"
            )
        for role in ROLES:
            operand: OperandSpec = getattr(spec, role)
            if operand.quantized and operand.scaling != "current" and operand.tile != "tensor":
                raise UserError(
                    f"{operand.scaling} scaling of the {role} of {spec.op} with tile {operand.tile}: "
                    "delayed and static scaling keep one scale per tensor; set its tile to tensor"
                )


def _operand(where: str, data: dict[str, Any]) -> OperandSpec:
    _known(where, data, [f.name for f in dataclasses.fields(OperandSpec)])
    spec = OperandSpec(**{k: v for k, v in data.items() if v is not None})
    _one_of(f"{where}.format", spec.format, FORMAT_NAMES)
    _one_of(f"{where}.tile", spec.tile, TILE_NAMES)
    _one_of(f"{where}.scale", spec.scale, SCALE_KINDS)
    _one_of(f"{where}.scaling", spec.scaling, SCALINGS)
    return spec


def _op_overrides(ops: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Keeps only what is set, so that a saved recipe shows what differs from its roles."""
    _known("recipe.ops", ops, LINEAR_OPS)
    kept: dict[str, dict[str, Any]] = {}
    for op, override in ops.items():
        where = f"recipe.ops.{op}"
        _known(where, override or {}, (*ROLES, "promote_every", "retiled_scale"))
        entry: dict[str, Any] = {}
        for key, value in (override or {}).items():
            if key in ROLES:
                if not isinstance(value, (dict, type(None))):
                    raise UserError(f"{where}.{key}={value}: give its fields, as in {where}.{key}.scale=pow2")
                value = {k: v for k, v in (value or {}).items() if v is not None}
                _operand(f"{where}.{key}", value)
            elif key == "retiled_scale":
                _one_of(f"{where}.{key}", value, (None, *SCALE_KINDS))
            if value not in (None, {}):
                entry[key] = value
        if entry:
            kept[op] = entry
    return kept


def _overridden(spec: OperandSpec, override: dict[str, Any] | None) -> OperandSpec:
    return dataclasses.replace(spec, **override) if override else spec


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _one_of(key: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        raise UserError(f"{key}={value}: choose {', '.join('null' if c is None else str(c) for c in choices)}")


def _known(where: str, data: dict[str, Any], names: Any) -> None:
    for key in data:
        if key not in names:
            near = difflib.get_close_matches(str(key), list(names), n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose {', '.join(names)}"
            raise UserError(f"{where}.{key} is not a key of the recipe: {hint}")
