"""The weights of a model, unit by unit as they are gathered, and the bytes in which each is kept and sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dsv3fp8.model.config import ModelConfig
from dsv3fp8.model.manifest import linear_shapes
from dsv3fp8.parallel.config import ParallelConfig
from dsv3fp8.precision.recipe import Recipe
from dsv3fp8.precision.tiles import ceil_div

FP32 = 4
SCALE = 4
"""Bytes of a stored scale, whatever its kind."""


@dataclass(frozen=True)
class Weight:
    """`experts` matrices [rows, columns] of routed experts, or one for all tokens (experts: 0). Norms have one column.

    op: the recipe's name of a linear, which may read codes. wide: read in FP32 (norms, router). parts: fused halves.
    stays: of a cut model gathered once for forward and backward, with what belongs to no block.
    """

    name: str
    rows: int
    columns: int = 1
    experts: int = 0
    op: str = ""
    wide: bool = False
    parts: int = 1
    stays: bool = False

    @property
    def elements(self) -> int:
        """Of all experts."""
        return max(1, self.experts) * self.rows * self.columns

    def of_rank(self, parallel: ParallelConfig) -> int:
        """Matrices that a rank computes with: its experts, or the one."""
        return max(1, self.experts // parallel.expert)

    def shard(self, parallel: ParallelConfig) -> int:
        """GPUs that each matrix is cut over."""
        return parallel.expert_shard if self.experts else parallel.dp_shard

    def kept(self, parallel: ParallelConfig) -> int:
        """Elements on the GPU that has most: whole rows, or whole experts where these divide or nothing does."""
        shard, matrices = self.shard(parallel), self.of_rank(parallel)
        if self.experts and (matrices % shard == 0 or self.rows % shard):
            return ceil_div(matrices, shard) * self.rows * self.columns
        return matrices * ceil_div(self.rows, shard) * self.columns

    def read_bytes(self, recipe: Recipe) -> int:
        """Of one matrix as GEMMs read it: codes with scales, the compute type, or FP32."""
        if not self.coded(recipe):
            return (FP32 if self.wide else compute_bytes(recipe)) * self.rows * self.columns
        return self.rows * self.columns + SCALE * self.scales(recipe)[0]

    def travel_bytes(self, recipe: Recipe) -> int:
        """Of one matrix as it is gathered: codes in as many orientations as the GEMMs need, or as they read it."""
        return len(self.scales(recipe)) * self.rows * self.columns if self.coded(recipe) else self.read_bytes(recipe)

    def scales(self, recipe: Recipe) -> tuple[int, ...]:
        """Of one coded matrix, for each orientation that does not serve the other one as well."""
        blocks = [ceil_div(self.rows // self.parts, 128) * self.parts, ceil_div(self.columns, 128)]
        return {
            "128x128": (blocks[0] * blocks[1],),
            "1x128": (self.rows * blocks[1], blocks[0] * self.columns),
            "row": (self.rows, self.columns),
            "tensor": (1,),
        }[recipe.linear(self.op).weight.tile]

    def coded(self, recipe: Recipe) -> bool:
        """Whether its GEMMs read codes."""
        return bool(self.op) and recipe.linear(self.op).weight.quantized


@dataclass(frozen=True)
class Unit:
    """Weights that are gathered together. name: embedding, dense, moe, mtp (a block with its joint) or head."""

    name: str
    weights: tuple[Weight, ...]

    @property
    def elements(self) -> int:
        """Parameters."""
        return sum(weight.elements for weight in self.weights)


def compute_bytes(recipe: Recipe) -> int:
    """Bytes of a value in the recipe's compute type."""
    return 2 if recipe.compute == "bf16" else FP32


def units(config: ModelConfig) -> list[Unit]:
    """In the order of forward. config.vocab_size is a number."""
    assert config.vocab_size is not None
    blocks = [Unit("dense", block_weights(config, dense=True))] * config.dense_layers
    if config.has_experts:
        blocks += [Unit("moe", block_weights(config, dense=False))] * (config.layers - config.dense_layers)
    table = config.vocab_size, config.dim
    head = [Weight("final norm", config.dim, wide=True, stays=True)]
    if not config.tied_head:
        head.append(Weight("head", *table, stays=True))
    joint = (
        Weight("hidden norm", config.dim, wide=True, stays=True),
        Weight("embedding norm", config.dim, wide=True, stays=True),
        Weight("projection", config.dim, 2 * config.dim),
        Weight("last norm", config.dim, wide=True, stays=True),
    )
    ahead = [Unit("mtp", (*joint, *block_weights(config, dense=not config.has_experts)))] * config.mtp_depth
    return [Unit("embedding", (Weight("embedding", *table, stays=True),)), *blocks, *ahead, Unit("head", tuple(head))]


def block_weights(config: ModelConfig, dense: bool) -> tuple[Weight, ...]:
    """Of one transformer block."""
    return tuple(_block(config, dense))


def _block(config: ModelConfig, dense: bool) -> Iterator[Weight]:
    norms = {"attention norm": config.dim, "query norm": config.q_latent, "key and value norm": config.kv_latent}
    for name, width in (norms | {"FFN norm": config.dim}).items():
        if width:
            yield Weight(name, width, wide=True)
    for op, (inputs, outputs) in linear_shapes(config).items():
        of_dense, of_experts = op in ("gate_up", "down"), op.startswith(("expert_", "shared_"))
        if of_experts if dense else of_dense:
            continue
        experts = config.experts if op.startswith("expert_") else 0
        yield Weight(op, outputs, inputs, experts, op, parts=2 if op.endswith("gate_up") else 1)
    if not dense:
        yield Weight("router", config.experts, config.dim, wide=True)
