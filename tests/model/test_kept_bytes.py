"""What one MoE block keeps for backward, in bytes per token, against the contract's table (CONTRACT 4 and 5)."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from contract import per_token
from support import build, nano, recipe, windows
from torch import Tensor

from dsv3fp8.model.block import Block
from dsv3fp8.model.config import ModelConfig
from dsv3fp8.model.sequence import Sequences
from dsv3fp8.precision.recipe import Recipe

# As many tokens as fill a tile for every expert, and every expert for every token: no inert rows.
CONFIG = nano(
    dim=256, heads=2, head_nope=128, head_rope=64, head_v=128, q_latent=256, kv_latent=128, expert_ffn=128, experts=4, top_k=4,
    context=128,
)  # fmt: skip
TOKENS = 128


def kept(config: ModelConfig, name: str, *overrides: str, dense: bool = False) -> float:
    """Bytes per token that autograd holds of one block, each storage once, parameters left out."""
    block = Block(config, recipe(name, *overrides), dense)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    x = torch.randn(TOKENS, config.dim).bfloat16().requires_grad_()
    sequences = Sequences.of(config, torch.zeros(1, TOKENS, dtype=torch.int64), None)
    return saved_by(block, lambda: block(x, sequences)[0])


def kept_of_model(config: ModelConfig, given: Recipe) -> float:
    """The same of a whole model."""
    model = build(config, given)
    return saved_by(model, lambda: model.objective(parts := model(windows(config, 1, TOKENS)), parts.totals))


def saved_by(module: torch.nn.Module, forward: Callable[[], Tensor]) -> float:
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in own:
            saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = forward()
    assert out.requires_grad
    return sum(saved.values()) / TOKENS


@pytest.mark.parametrize(
    ("name", "overrides", "fp8", "output"),
    [
        ("dsv3", (), True, False), ("dsv3", ("swiglu_output=keep",), True, True), ("bf16", (), False, False),
        ("bf16", ("swiglu_output=keep",), False, True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("recompute", ["none", "norms", "norms_and_up"])
@pytest.mark.parametrize("config", [CONFIG, dataclasses.replace(CONFIG, q_latent=None)], ids=["V3", "V2-Lite"])
def test_a_moe_block_keeps_what_the_contract_lists(
    config: ModelConfig, recompute: str, name: str, overrides: tuple[str, ...], fp8: bool, output: bool
) -> None:
    """No BF16 copy of what is kept in FP8, no operand beside its cache; a V3-like block and one without a query latent."""
    listed = per_token(config, fp8, output, recompute)
    # Beside it: RoPE's table, and the router's numbers per expert and choice.
    small = 4 * config.head_rope + 64 * config.experts
    assert listed <= kept(config, name, f"recompute={recompute}", *overrides) <= listed + small


@pytest.mark.parametrize("name", ["dsv3", "bf16"])
@pytest.mark.parametrize("depth", [0, 1])
def test_outside_the_blocks_recomputation_drops_the_last_norms_output_and_those_of_multi_token_prediction(
    name: str, depth: int
) -> None:
    """Per token in BF16: D for the output head, and 2D more where two norms feed the projection of a depth."""
    config = nano(dim=256, layers=1, dense_layers=1, mtp_depth=depth, context=TOKENS)
    blocks = [kept_of_model(config, recipe(name, f"recompute={value}")) for value in ("none", "norms")]
    alone = [kept(config, name, f"recompute={value}", dense=True) for value in ("none", "norms")]
    outside = (blocks[0] - blocks[1]) - (1 + depth) * (alone[0] - alone[1])
    assert outside == pytest.approx(2 * config.dim * (1 + 3 * depth), rel=0.02)


def test_the_table_adds_up_to_the_contracts_numbers_for_v3() -> None:
    v3 = ModelConfig(
        dim=7168, heads=128, q_latent=1536, kv_latent=512, head_nope=128, head_rope=64, head_v=128, expert_ffn=2048, top_k=8
    )
    bf16 = per_token(v3, fp8=False, swiglu_output=True)
    assert bf16 == 455_168
    fp8 = {value: per_token(v3, True, False, value) for value in ("none", "norms", "norms_and_up")}
    assert fp8 == {"none": 303_488, "norms": 286_592, "norms_and_up": 155_648}
    assert [round(fp8[value] / bf16, 3) for value in ("none", "norms_and_up")] == [0.667, 0.342]
    assert round(per_token(v3, fp8=True, swiglu_output=True) / bf16, 3) == 0.709
