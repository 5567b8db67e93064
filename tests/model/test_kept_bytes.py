"""What one MoE block keeps for backward, in bytes per token, against the contract's table (CONTRACT 4 and 5)."""

import pytest
import torch
from support import nano, recipe
from torch import Tensor

from dsv3fp8.model.block import Block
from dsv3fp8.model.config import ModelConfig
from dsv3fp8.model.sequence import Sequences

# As many tokens as fill a tile for every expert, and every expert for every token: no inert rows.
CONFIG = nano(
    dim=256, heads=2, head_nope=128, head_rope=64, head_v=128, q_latent=256, kv_latent=128, expert_ffn=128, experts=4, top_k=4,
    context=128,
)  # fmt: skip
TOKENS = 128


def per_token(config: ModelConfig, fp8: bool, swiglu_output: bool) -> int:
    """The table's column "kept for backward", added up; scores and ids not counted."""

    def stored(width: int) -> int:  # E4M3 codes and fp32 scales of 1x128 tiles, or BF16
        return width + 4 * (width // 128) if fp8 else 2 * width

    heads, outputs = config.heads, config.heads * config.head_v
    residuals = 2 * 2 * config.dim
    norms = 2 * stored(config.dim)
    latents = 2 * (config.q_latent + config.kv_latent) + stored(config.q_latent) + stored(config.kv_latent)
    attention = 2 * heads * (2 * config.head_qk + config.head_v) + 4 * heads
    attention += outputs * 3 // 2 + 4 * (outputs // 128) if fp8 else 2 * outputs
    received = config.top_k * stored(config.dim)
    hidden = (config.top_k + config.shared_experts) * stored(config.expert_ffn)
    return residuals + norms + latents + attention + received + hidden * (3 if swiglu_output else 2)


def kept(config: ModelConfig, name: str, *overrides: str) -> float:
    block = Block(config, recipe(name, *overrides), dense=False)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    x = torch.randn(TOKENS, config.dim).bfloat16().requires_grad_()
    own = {p.untyped_storage().data_ptr() for p in block.parameters()}
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in own:
            saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    sequences = Sequences.of(config, torch.zeros(1, TOKENS, dtype=torch.int64), None)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out, balance = block(x, sequences)
    assert out.requires_grad
    assert balance is not None
    return sum(saved.values()) / TOKENS


@pytest.mark.parametrize(
    ("name", "overrides", "fp8", "output"),
    [
        ("dsv3", (), True, False), ("dsv3", ("swiglu_output=keep",), True, True), ("bf16", (), False, False),
        ("bf16", ("swiglu_output=keep",), False, True),
    ],
)  # fmt: skip
def test_a_moe_block_keeps_what_the_contract_lists(name: str, overrides: tuple[str, ...], fp8: bool, output: bool) -> None:
    """No BF16 copy of what is kept in FP8, no operand beside its cache."""
    listed = per_token(CONFIG, fp8, output)
    # Beside it: k_rope's columns in kv_a's output, RoPE's table, and the router's fp32 numbers per expert and choice.
    small = 2 * CONFIG.head_rope + 4 * CONFIG.head_rope + 64 * CONFIG.experts
    assert listed <= kept(CONFIG, name, *overrides) <= listed + small


def test_the_table_adds_up_to_the_contracts_numbers_for_v3() -> None:
    v3 = ModelConfig(
        dim=7168, heads=128, q_latent=1536, kv_latent=512, head_nope=128, head_rope=64, head_v=128, expert_ffn=2048, top_k=8
    )
    assert per_token(v3, fp8=True, swiglu_output=False) == 303_488
    assert per_token(v3, fp8=False, swiglu_output=True) == 455_168
