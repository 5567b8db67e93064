"""Gradient norm and clipping where FP32 squares leave their range."""

import math

import pytest
import torch
from torch import nn

from dsv3fp8.training.gradients import clip_factor, gradient_norm, gradients


def norm_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    return gradient_norm(tensors, torch.device("cpu"))


@pytest.mark.parametrize("scale", [1.0, 1e20, 1e30, 1e-25, 0.0])
def test_the_norm_is_right_at_any_finite_scale_and_clipping_keeps_the_direction(scale: float) -> None:
    """Case fact 8: finite gradients of 1e20 give clip_grad_norm_ an infinite norm and come out as zeros."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(300, generator=generator) * scale, torch.randn(7, 11, generator=generator) * scale]
    expected = math.sqrt(sum(float((t.double() ** 2).sum()) for t in tensors))
    norm = norm_of(tensors)
    assert float(norm) == pytest.approx(expected, rel=1e-5)
    factor = clip_factor(norm, 1.0)
    assert float(factor) == pytest.approx(min(1.0, 1.0 / expected) if expected else 1.0, rel=1e-5)
    clipped = torch._foreach_mul(tensors, float(factor))
    assert float(norm_of(clipped)) == pytest.approx(min(expected, 1.0), rel=1e-5)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_non_finite_gradient_makes_the_norm_non_finite(bad: float) -> None:
    tensors = [torch.ones(10), torch.ones(10)]
    tensors[1][3] = bad
    assert not math.isfinite(norm_of(tensors))


def test_a_limit_of_zero_never_clips() -> None:
    assert clip_factor(torch.tensor(200.0, dtype=torch.float64), 0.0) == 1


def test_the_norm_of_no_gradients_is_zero() -> None:
    assert norm_of([]) == 0.0


def test_512_micro_batches_of_ones_accumulate_to_512() -> None:
    """O11: summed in BF16 they would stop at 256."""
    weight = nn.Parameter(torch.zeros(3))
    for _ in range(512):
        weight.sum().backward()
    assert torch.equal(gradients([weight])[0], torch.full((3,), 512.0))


def test_a_gradient_that_is_not_fp32_is_a_bug() -> None:
    weight = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    weight.sum().backward()
    with pytest.raises(AssertionError, match="FP32"):
        gradients([weight])
