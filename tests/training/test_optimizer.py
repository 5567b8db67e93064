"""AdamW against torch's own, and what its state promises."""

import copy

import pytest
import torch
from torch import nn

from dsv3fp8.errors import UserError
from dsv3fp8.training.config import OptimizerConfig
from dsv3fp8.training.optimizer import AdamW


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.LayerNorm(16), nn.Linear(16, 5))


def groups(model: nn.Module) -> dict[str, list[tuple[str, nn.Parameter]]]:
    split: dict[str, list[tuple[str, nn.Parameter]]] = {"decay": [], "no_decay": []}
    for name, parameter in model.named_parameters():
        split["decay" if parameter.dim() > 1 else "no_decay"].append((name, parameter))
    return split


def backward(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model(torch.randn(7, 12, generator=generator)).square().sum().backward()


def config(**changes: object) -> OptimizerConfig:
    return OptimizerConfig(**{"lr": 1e-2, "weight_decay": 0.1, **changes})  # type: ignore[arg-type]


def test_fp32_moments_take_the_steps_of_torch_adamw_bit_for_bit() -> None:
    ours, theirs = small_model(), small_model()
    optimizer = AdamW(groups(ours), config())
    split = groups(theirs)
    oracle = torch.optim.AdamW(
        [
            {"params": [p for _, p in split["decay"]], "weight_decay": 0.1},
            {"params": [p for _, p in split["no_decay"]], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        eps=1e-8,
        foreach=False,
    )
    for step in range(20):
        lr = 1e-2 / (step + 1)
        for group in oracle.param_groups:
            group["lr"] = lr
        for model in (ours, theirs):
            backward(model, seed=step)
        optimizer.step(lr)
        oracle.step()
        optimizer.zero_grad()
        oracle.zero_grad()
    for mine, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, expected)


def test_weight_decay_spares_the_no_decay_group() -> None:
    model = small_model()
    before = copy.deepcopy(model.state_dict())
    optimizer = AdamW(groups(model), config(weight_decay=0.5))
    optimizer.step(lr=0.1)  # no gradients: nothing but the decay moves a weight
    for name, tensor in model.state_dict().items():
        expected = before[name] * 0.95 if tensor.dim() > 1 else before[name]
        torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=0)


def test_the_fp32_master_sees_updates_that_a_bf16_weight_would_round_away() -> None:
    """O04: 100 sign updates of 1e-3 take 1.0 to 0.9; a BF16 weight stays at 1.0."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = AdamW({"decay": [], "no_decay": [("w", weight)]}, config(betas=[0.0, 0.0], moments="bf16"))
    for _ in range(100):
        weight.grad = torch.ones(3)
        optimizer.step(lr=1e-3)
    torch.testing.assert_close(weight.detach(), torch.full((3,), 0.9), rtol=1e-5, atol=0)


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_loaded_weights_are_the_masters_and_the_next_step_does_not_undo_the_load(moments: str) -> None:
    """O01: there is no second copy that could be stale. Master 0.9, load 5.0, a step of rate 0."""
    model = nn.Linear(4, 3, bias=False)
    nn.init.constant_(model.weight, 0.9)
    optimizer = AdamW(groups(model), config(moments=moments))
    for _ in range(2):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step(lr=1e-2)
    model.load_state_dict({"weight": torch.full((3, 4), 5.0)})
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step(lr=0.0)
    assert torch.equal(model.weight, torch.full((3, 4), 5.0))


def test_bf16_moments_are_the_fp32_update_rounded_once_to_nearest() -> None:
    weight = nn.Parameter(torch.zeros(1000))
    optimizer = AdamW({"decay": [("w", weight)], "no_decay": []}, config(moments="bf16"))
    generator = torch.Generator().manual_seed(1)
    first = second = torch.zeros(1000, dtype=torch.bfloat16)
    for _ in range(5):
        gradient = torch.randn(1000, generator=generator)
        weight.grad = gradient.clone()
        optimizer.step(lr=1e-3)
        first = torch.lerp(first.float(), gradient, 0.1).bfloat16()
        second = (second.float() * 0.95 + (1 - 0.95) * gradient * gradient).bfloat16()
        assert optimizer.first["w"].dtype is optimizer.second["w"].dtype is torch.bfloat16
        torch.testing.assert_close(optimizer.first["w"], first, rtol=2**-8, atol=0)
        torch.testing.assert_close(optimizer.second["w"], second, rtol=2**-8, atol=0)
        assert (optimizer.first["w"] == first).float().mean() > 0.99
        first, second = optimizer.first["w"].clone(), optimizer.second["w"].clone()


def test_bf16_moments_train_almost_as_fp32_moments_do() -> None:
    trained = []
    for moments in ("fp32", "bf16"):
        model = small_model()
        optimizer = AdamW(groups(model), config(moments=moments))
        for step in range(30):
            backward(model, seed=step)
            optimizer.step(lr=1e-3)
            optimizer.zero_grad()
        trained.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    start = torch.cat([p.detach().flatten() for p in small_model().parameters()])
    assert (trained[0] - trained[1]).norm() < 0.02 * (trained[0] - start).norm()


def test_a_tied_tensor_is_refused_twice_under_two_names() -> None:
    """M06: one tensor, one optimizer state."""
    weight = nn.Parameter(torch.ones(2))
    with pytest.raises(AssertionError, match="tied"):
        AdamW({"decay": [("embedding", weight), ("head", weight)], "no_decay": []}, config())


def test_a_tied_tensor_gets_one_state_and_the_sum_of_its_gradients() -> None:
    """M06: embedding and head share a tensor over five steps, against torch.optim.AdamW on the one parameter."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.embedding = nn.Embedding(11, 6)
            self.head = nn.Linear(6, 11, bias=False)
            self.head.weight = self.embedding.weight

    ours, theirs = Tied(), Tied()
    optimizer = AdamW({"decay": list(ours.named_parameters()), "no_decay": []}, config())
    oracle = torch.optim.AdamW(theirs.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    assert list(optimizer.state_dict()["first"]) == ["embedding.weight"]
    for step in range(5):
        for model in (ours, theirs):
            ids = torch.arange(4) + step
            nn.functional.cross_entropy(model.head(model.embedding(ids)), ids + 1).backward()
        optimizer.step(1e-2)
        oracle.step()
        optimizer.zero_grad()
        oracle.zero_grad()
    torch.testing.assert_close(ours.head.weight, theirs.head.weight, rtol=1e-6, atol=1e-8)


def test_small_buckets_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for elements in (1 << 26, 20):
        monkeypatch.setattr("dsv3fp8.ops.adamw.BUCKET_ELEMENTS", elements)
        model = small_model()
        optimizer = AdamW(groups(model), config(moments="bf16"))
        for step in range(3):
            backward(model, seed=step)
            optimizer.step(lr=1e-2)
        results.append(copy.deepcopy(model.state_dict()))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_a_saved_state_is_keyed_by_name_and_continues_bit_for_bit() -> None:
    """O02: moments and the bias correction's step count come back."""
    whole, half = small_model(), small_model()
    optimizers = [AdamW(groups(model), config(moments="bf16")) for model in (whole, half)]
    for step in range(5):
        for model, optimizer in zip((whole, half), optimizers, strict=True):
            backward(model, seed=step)
            optimizer.step(1e-2)
            optimizer.zero_grad()
    saved = copy.deepcopy(optimizers[1].state_dict())
    assert set(saved["first"]) == {name for name, _ in half.named_parameters()}
    resumed = small_model()
    resumed.load_state_dict(half.state_dict())
    optimizers[1] = AdamW(groups(resumed), config(moments="bf16"))
    optimizers[1].load_state_dict(saved)
    for step in range(5, 10):
        for model, optimizer in zip((whole, resumed), optimizers, strict=True):
            backward(model, seed=step)
            optimizer.step(1e-2)
            optimizer.zero_grad()
    for mine, expected in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, expected)


def test_a_state_of_another_model_is_refused_by_name_and_shape() -> None:
    weight = nn.Parameter(torch.zeros(4))
    optimizer = AdamW({"decay": [("w", weight)], "no_decay": []}, config())
    other_name = AdamW({"decay": [("v", nn.Parameter(torch.zeros(4)))], "no_decay": []}, config())
    other_shape = AdamW({"decay": [("w", nn.Parameter(torch.zeros(5)))], "no_decay": []}, config())
    with pytest.raises(UserError, match="another model: v is in only one"):
        optimizer.load_state_dict(other_name.state_dict())
    with pytest.raises(UserError, match=r"w has shape \(5,\) there and \(4,\) here"):
        optimizer.load_state_dict(other_shape.state_dict())
