"""Must show 3: bytes kept per token, as the ledger saw them, equal the contract's arithmetic, for layers of three sizes."""

import pytest
import torch
from contract import per_token
from support import recipe

from dsv3fp8.observe.kept_bytes import Kept, block_config, contract_bytes, observed_bytes

CPU = torch.device("cpu")
CASES = [
    ("bf16", ("swiglu_output=keep",), (False, True, "none")), ("bf16", (), (False, False, "none")),
    ("dsv3", ("swiglu_output=keep",), (True, True, "none")), ("dsv3", (), (True, False, "none")),
    ("dsv3", ("recompute=norms",), (True, False, "norms")),
    ("dsv3", ("recompute=norms_and_up",), (True, False, "norms_and_up")),
]  # fmt: skip
V3_BF16 = 455_168
V3 = {("dsv3",): 303_488, ("dsv3", "recompute=norms_and_up"): 155_648}


def observe(size: str, name: str, *overrides: str, tokens: int = 128) -> Kept:
    return observed_bytes(block_config(size), recipe(name, *overrides), tokens, CPU)


@pytest.mark.parametrize(("name", "overrides", "contract"), CASES)
@pytest.mark.parametrize("size", ["tiny", "v2_lite_16b"])
def test_a_layer_keeps_what_the_contract_adds_up_to(
    size: str, name: str, overrides: tuple[str, ...], contract: tuple[bool, bool, str]
) -> None:
    """To the byte, the router's numbers apart; with them within 2 % of the sum and of what its table lists of them."""
    config, kept = block_config(size), observe(size, name, *overrides)
    listed = per_token(config, *contract)
    assert kept.tensors == listed == contract_bytes(config, recipe(name, *overrides))
    scores_and_ids = 4 * config.experts + 8 * config.top_k
    assert kept.tensors + kept.router == pytest.approx(listed + scores_and_ids, rel=0.02)


def test_the_contracts_sum_for_v3_in_bf16_is_the_yardstick() -> None:
    """Observed in docs/kept_bytes.md; here, two smaller layers are (above)."""
    config = block_config("v3_671b")
    assert contract_bytes(config, recipe("bf16", "swiglu_output=keep")) == per_token(config, False, True) == V3_BF16


def test_a_v3_layer_with_eight_experts_keeps_two_thirds_of_bf16_and_one_third_with_recomputation() -> None:
    kept = {words: observe("v3_671b", *words) for words in V3}
    assert {words: k.tensors for words, k in kept.items()} == V3
    assert all(k.tensors + k.router == pytest.approx(V3[words], rel=0.02) for words, k in kept.items())
    assert all(k.padding == 0 for k in kept.values())  # 128 tokens at every expert fill whole tiles
    assert [round(k.tensors / V3_BF16, 3) for k in kept.values()] == [0.667, 0.342]


def test_padding_is_reported_apart_and_is_what_fills_the_experts_last_tiles() -> None:
    """33 tokens twice over 8 experts are 66 rows of 8 * 128: the rest is padding, in the received codes and SwiGLU's input."""
    config = block_config("tiny")
    kept = observe("tiny", "dsv3", tokens=33)
    per_row = (config.dim + 4 * 2) + 2 * (config.expert_ffn + 4)
    assert kept.tensors == per_token(config, True, False)
    assert kept.padding == pytest.approx((8 * 128 - 66) * per_row / 33, rel=1e-3)
