"""Must show 1: what really ran, under every recipe, is what the contract says; and every planted mistake is seen."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from contract import ROLES, expected, violations
from support import build, gradients, nano, recipe, windows
from torch import Tensor

from dsv3fp8.model import linear as model_linear
from dsv3fp8.ops import attention as attention_op
from dsv3fp8.ops import linear as linear_op
from dsv3fp8.ops import router as router_op
from dsv3fp8.ops.norm import Normed
from dsv3fp8.ops.quantizers import LinearQuantizers
from dsv3fp8.ops.stash import keep
from dsv3fp8.precision.formats import E4M3
from dsv3fp8.precision.ledger import Ledger, observe_ops
from dsv3fp8.precision.tiles import BLOCK_128, values_of

# Every dimension has more than one tile and a tail: no two tilings look alike.
SIZES: dict[str, Any] = {
    "dim": 192, "heads": 2, "q_latent": 160, "kv_latent": 136, "head_nope": 64, "head_rope": 16, "head_v": 72, "ffn": 200,
    "expert_ffn": 144, "mtp_depth": 0, "context": 160,
}  # fmt: skip


def observe(name: str, **sizes: Any) -> Ledger:
    config = nano(**{**SIZES, **sizes})
    model = build(config, recipe(name))
    with observe_ops() as ledger:
        gradients(model, [windows(config, length=150)])
    return ledger


def all_violations(name: str, **sizes: Any) -> list[str]:
    ledger, latent = observe(name, **sizes), sizes.get("q_latent", True) is not None
    dense = violations(ledger, "layers.0", name, dense=True, latent=latent)
    return dense + violations(ledger, "layers.1", name, dense=False, latent=latent)


@pytest.mark.parametrize("name", ROLES)
def test_every_node_runs_as_the_contract_says(name: str) -> None:
    assert all_violations(name) == []


@pytest.mark.parametrize("name", ["bf16", "dsv3"])
def test_every_node_without_a_query_latent_runs_as_the_contract_says(name: str) -> None:
    assert all_violations(name, q_latent=None) == []


def router_in_bf16(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(router_op, "wide", lambda x: x.to(torch.bfloat16))


def norm_stashes_its_output(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(model_linear.RMSNorm, "stash", lambda self, x, operand, reader=None: keep(values_of(operand).bfloat16()))


def norm_keeps_its_output_unsaid(patch: pytest.MonkeyPatch) -> None:
    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, edge: Tensor, y: Tensor) -> Tensor:
            ctx.save_for_backward(y)
            return edge.view_as(edge)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return grad, None

    norm = model_linear.norm

    def hoarding(*args: Any, **rest: Any) -> Normed:
        made = norm(*args, **rest)
        return made if made.y is None else made._replace(edges=tuple(Keeps.apply(edge, made.y) for edge in made.edges))

    patch.setattr(model_linear, "norm", hoarding)


def gradients_in_blocks(patch: pytest.MonkeyPatch) -> None:
    quantize = LinearQuantizers.quantize

    def blocks(self: LinearQuantizers, role: str, x: Tensor, k_axis: int, **rest: Any) -> Any:
        if role != "gradient":
            return quantize(self, role, x, k_axis, **rest)
        return attention_op.quantize(x, E4M3, BLOCK_128, self.gemm.gradient.scale, col_parts=rest.get("col_parts", 1))

    patch.setattr(LinearQuantizers, "quantize", blocks)
    patch.setattr(LinearQuantizers, "rides", lambda *_: None)


def output_cached_in_bf16(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(attention_op, "quantize", lambda x, *_: x)


def wgrad_in_bf16(patch: pytest.MonkeyPatch) -> None:
    matmul = linear_op.matmul_nt

    def narrow(a: Any, b: Any, out_dtype: torch.dtype, spec: Any, gemm: str) -> Tensor:
        if gemm == "wgrad":
            a, b = values_of(a).bfloat16(), values_of(b).bfloat16()
        return matmul(a, b, out_dtype, spec, gemm)

    patch.setattr(linear_op, "matmul_nt", narrow)


def no_retiling(patch: pytest.MonkeyPatch) -> None:
    retile = LinearQuantizers.retile

    def as_kept(self: LinearQuantizers, role: str, kept: Any, groups: Tensor | None = None) -> Any:
        return retile(self, role, kept, groups) if self.gemm.op == "out" else kept  # packed codes cannot be read as they are

    patch.setattr(LinearQuantizers, "retile", as_kept)


@pytest.mark.parametrize(
    ("plant", "seen"),
    [
        (router_in_bf16, "('forward', 'router') computes in: ('fp32', 'bf16')"),
        (norm_stashes_its_output, "('forward', 'q_a') keeps: ['y_attn: bf16', 'y_attn: e4m3 1x128 fp32']"),
        (norm_keeps_its_output_unsaid, "kept but reported by no op: Saved(scope='layers.1', format='bf16'"),
        (gradients_in_blocks, "('backward', 'q_a') reads: ['dc_q: e4m3 128x128 fp32', 'dc_q: e4m3 1x128 fp32']"),
        (output_cached_in_bf16, "('forward', 'attention') keeps: ['attn_cache: bf16', 'attn_cache: e5m6 1x128 pow2']"),
        (wgrad_in_bf16, "('wgrad', 'kv_b') computes in: ('e4m3', 'bf16')"),
        (no_retiling, "('wgrad', 'q_a.requant') did not run"),
    ],
)
def test_a_planted_mistake_is_seen(
    plant: Callable[[pytest.MonkeyPatch], None], seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    found = all_violations("dsv3")
    assert any(line.startswith(seen) for line in found), found


def test_recipes_differ_in_the_table_as_they_should() -> None:
    """The table judges nothing if it says the same of every recipe; delayed and static differ from tensorwise in time only."""
    tables = {name: expected(name, dense=False, latent=True) for name in ROLES}
    same = {(a, b) for a in tables for b in tables if a < b and tables[a] == tables[b]}
    assert same == {("delayed", "static")}
