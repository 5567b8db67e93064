"""The load-balance bias: counted per optimizer step, outside training's optimizer, FP32 whatever happens to the model."""

import pytest
import torch
from support import build, gradients, nano, recipe, windows
from torch import Tensor

from dsv3fp8.errors import UserError
from dsv3fp8.model.router import Router
from dsv3fp8.model.transformer import Transformer


def make(**sizes: object) -> Transformer:
    return build(nano(mtp_depth=0, **sizes), recipe("fp32"))


def routers(model: Transformer) -> list[Router]:
    return [m for m in model.modules() if isinstance(m, Router)]


def biases(model: Transformer) -> list[Tensor]:
    return [router.bias.clone() for router in routers(model)]


def with_counts(counts: list[int], speed: float = 1e-3) -> Router:
    router = Router(nano(experts=len(counts), bias_update_speed=speed))
    router.load += torch.tensor(counts)
    return router


def test_the_sign_rule_from_summed_counts_moves_the_bias_once_per_step() -> None:
    """T10: counts [3, 1, 2, 2] of two micro-batches move it by gamma, not by two; counts are then forgotten."""
    router = with_counts([3, 1, 2, 2])
    router.load += torch.tensor([3, 1, 2, 2])
    router.end_step(True)
    assert router.bias.tolist() == pytest.approx([-1e-3, 1e-3, 0.0, 0.0])
    router.end_step(True)
    assert router.bias.tolist() == pytest.approx([-1e-3, 1e-3, 0.0, 0.0])


def test_a_mean_that_is_no_integer_is_compared_exactly() -> None:
    """T11: local counts [3, 1, 0, 0] and [0, 0, 1, 3] sum to [3, 1, 1, 3]: signs -, +, +, -."""
    router = with_counts([3, 1, 1, 3])
    router.end_step(True)
    assert router.bias.tolist() == pytest.approx([-1e-3, 1e-3, 1e-3, -1e-3])
    huge = with_counts([2**40 + 1, 2**40, 2**40 - 1, 2**40])
    huge.end_step(True)
    assert huge.bias.tolist() == pytest.approx([-1e-3, 0.0, 1e-3, 0.0])


def test_micro_batches_count_together_and_a_skipped_step_not_at_all() -> None:
    """T10, O07."""
    model = make()
    batches = [windows(model.config, seed=s) for s in range(3)]
    gradients(model, batches)
    assert model.expert_load().sum(1).tolist() == [3 * 2 * 20 * 2]
    assert model.expert_load().dtype == torch.int64
    model.end_step(applied=False)
    assert torch.equal(biases(model)[0], torch.zeros(4))
    assert int(model.expert_load().sum()) == 0
    gradients(model, batches)
    load = model.expert_load()[0]
    model.end_step(applied=True)
    assert torch.equal(biases(model)[0], 1e-3 * torch.sign(load.sum() - 4 * load))


def test_evaluation_is_not_counted() -> None:
    """T13: in eval mode and under no_grad, both of which a loop may use alone."""
    with_eval, without = make(), make()
    for step in range(3):
        for model in (with_eval, without):
            gradients(model, [windows(model.config, seed=step)])
            model.end_step(True)
            if model is with_eval:
                model.eval()
                gradients(model, [windows(model.config, seed=90 + step)])
                model.logits(windows(model.config, seed=80)[:, :-1])
                model.train()
                with torch.no_grad():
                    model(windows(model.config, seed=70))
                model.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(biases(with_eval), biases(without), strict=True))
    assert biases(without)[0].any()


def test_every_layer_is_updated_dense_ones_or_not() -> None:
    """T14: two dense layers before two MoE layers and an MTP block."""
    model = build(nano(layers=4, dense_layers=2), recipe("fp32"))
    gradients(model, [windows(model.config)])
    assert model.expert_load().shape == (3, 4)
    assert model.config.moe_layers == 3
    model.end_step(True)
    assert all(bias.any() for bias in biases(model))
    assert not model.expert_load().any()


def test_the_bias_is_no_parameter_at_any_width() -> None:
    """T16: no optimizer group, no gradient, no decay; DeepSeek's reference has it at dim 7168 only."""
    for dim in (32, 256):
        model = make(dim=dim)
        grouped = {name for group in model.parameter_groups().values() for name, _ in group}
        assert not any("bias" in name for name in grouped)
        assert [name for name, _ in model.named_buffers() if name.endswith("router.bias")] == [
            "layers.1.feed_forward.router.bias"
        ]
        assert not routers(model)[0].bias.requires_grad


def test_speed_zero_freezes_the_bias() -> None:
    """T16: with weight decay, five steps, a bias that is not zero."""
    model = make(bias_update_speed=0.0)
    routers(model)[0].bias.copy_(torch.tensor([0.1, -0.2, 0.3, 0.0]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(5):
        model.zero_grad()
        model.objective(losses := model(windows(model.config, seed=step)), losses.totals).backward()
        optimizer.step()
        model.end_step(True)
    assert biases(model)[0].tolist() == pytest.approx([0.1, -0.2, 0.3, 0.0])


def to_bf16(model: Transformer) -> Transformer:
    return model.to(torch.bfloat16)


def to_half(model: Transformer) -> Transformer:
    return model.half()


def to_bf16_from_inside(model: Transformer) -> Transformer:
    for child in model.children():
        child.to(torch.bfloat16)
    return model


@pytest.mark.parametrize("narrow", [to_bf16, to_half, to_bf16_from_inside])
def test_narrowing_the_model_leaves_bias_masters_and_histories_in_fp32(narrow: object) -> None:
    """T09: 0.5 + 10 x 0.001 is 0.51, in BF16 it would stay 0.5; in the checkpoint too."""
    model = narrow(build(nano(), recipe("delayed")))  # type: ignore[operator]
    router = routers(model)[0]
    router.bias.fill_(0.5)
    for _ in range(10):
        router.load += torch.tensor([0, 1, 1, 1])
        router.end_step(True)
    assert float(router.bias[0]) == pytest.approx(0.51, abs=1e-6)
    assert {t.dtype for t in model.state_dict().values()} == {torch.float32, torch.int64}
    assert model.double().state_dict()["embedding"].dtype == torch.float64


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_checkpoint_with_a_damaged_bias_is_refused_by_name(value: float) -> None:
    """T17."""
    model = make()
    state = model.state_dict()
    state["layers.1.feed_forward.router.bias"] = torch.tensor([0.0, value, 0.0, 0.0])
    with pytest.raises(UserError, match=r"layers\.1\.feed_forward\.router\.bias holds NaN or inf"):
        model.load_state_dict(state)
    assert not biases(model)[0].any()


def test_a_bias_saved_in_bf16_is_held_in_fp32() -> None:
    """T09: from someone else's checkpoint."""
    model = make()
    state = {name: t.bfloat16() if t.is_floating_point() else t for name, t in model.state_dict().items()}
    model.load_state_dict(state)
    assert routers(model)[0].bias.dtype == torch.float32


def test_a_gate_of_zeros_and_identical_tokens_choose_the_lowest_experts() -> None:
    """T07: all scores tie, in training and without gradients alike."""
    model = make(experts=8, groups=4, kept_groups=2, top_k=3)
    chosen: list[Tensor] = []
    for router in routers(model):
        torch.nn.init.zeros_(router.weight)
        router.register_forward_hook(lambda _, __, out: chosen.append(out.ids))
    tokens = windows(model.config)
    model(tokens)
    model.logits(tokens[:, :-1])
    model(torch.zeros_like(tokens))
    for ids in chosen:
        assert torch.equal(ids, torch.tensor([0, 1, 2]).expand(len(ids), 3))


def test_padding_is_neither_counted_nor_balanced() -> None:
    """R06: 2 x 8 tokens, 3 of padding, k = 2."""
    model = make()
    documents = torch.zeros(2, 9, dtype=torch.int32)
    documents[0, 6:] = -1
    documents[1, 7:] = -1
    gradients(model, [windows(model.config, length=8)], [documents])
    assert int(model.expert_load().sum()) == 2 * (6 + 7)


def test_autocast_changes_no_bit() -> None:
    """T08: neither the router nor anything else falls below what the recipe says."""
    for name in ("fp32", "bf16", "dsv3"):
        model = build(nano(), recipe(name))
        plain = gradients(model, [windows(model.config)])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = gradients(model, [windows(model.config)])
        assert all(torch.equal(plain[key], cast[key]) for key in plain), name
