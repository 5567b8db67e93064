"""The plain PyTorch layer that the benchmark compares with computes what our block computes."""

import pytest
import torch
from torch import Tensor

from dsv3fp8.model.block import Block
from dsv3fp8.model.sequence import Sequences
from dsv3fp8.observe.bench.operands import recipe_named
from dsv3fp8.observe.bench.plain import PlainLayer
from dsv3fp8.observe.kept_bytes import block_config

OURS = {
    "attention_gain": "attention.norm.weight", "ffn_gain": "feed_forward.norm.weight", "q_gain": "attention.q_norm.weight",
    "kv_gain": "attention.kv_norm.weight", "q_a": "attention.q_a.weight", "q_b": "attention.q_b.weight",
    "kv_a": "attention.kv_a.weight", "kv_b": "attention.kv_b.weight", "out": "attention.out.weight",
    "router": "feed_forward.router.weight", "gate_up": "feed_forward.experts.gate_up", "down": "feed_forward.experts.down",
    "shared_gate_up": "feed_forward.shared.gate_up.weight", "shared_down": "feed_forward.shared.down.weight",
}  # fmt: skip


def grouped(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """F.grouped_mm of rows, in FP32."""
    starts = [0, *offs.tolist()]
    return torch.cat([a[i:j] @ w for i, j, w in zip(starts, starts[1:], b, strict=False)])


def test_output_and_gradients_are_those_of_our_block_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.functional.grouped_mm", grouped)
    config = block_config("tiny")
    block, layer = Block(config, recipe_named("fp32"), dense=False), PlainLayer(config)
    ours = dict(block.named_parameters())
    assert {name for name, _ in layer.named_parameters()} == set(OURS)
    assert set(OURS.values()) == set(ours)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.1)
            ours[OURS[name]].copy_(parameter)
        for buffer in block.buffers():
            buffer.zero_()
    tokens = 48
    x, dy = torch.randn(tokens, config.dim), torch.randn(tokens, config.dim)
    sequences = Sequences.of(config, torch.zeros(1, tokens, dtype=torch.int64), None)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    want, _ = block(inputs[0], sequences)
    got = layer(inputs[1], sequences.cos[0], sequences.sin[0])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    want.backward(dy)
    got.backward(dy)
    pairs = {"x": (inputs[1].grad, inputs[0].grad)}
    pairs |= {name: (parameter.grad, ours[OURS[name]].grad) for name, parameter in layer.named_parameters()}
    for name, (mine, theirs) in pairs.items():
        assert mine is not None
        assert theirs is not None
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()), msg=name)
