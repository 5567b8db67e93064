"""RMSNorm, its junction and the residual rail, against autograd of the formula in float64."""

import pytest
import torch
from support import relative
from torch import Tensor

from dsv3fp8.kernels.norm.reference import junction
from dsv3fp8.ops.norm import norm
from dsv3fp8.ops.residual import residual_sum

EPS = 1e-6


def formula(x: Tensor, gamma: Tensor) -> Tensor:
    return gamma * x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_forward_and_backward_equal_autograd_of_the_formula() -> None:
    """Three readers' gradients sum, and the rail's joins dx."""
    x, gamma = draw(5, 24).requires_grad_(), (1 + 0.1 * draw(24, seed=1)).requires_grad_()
    grads, rail_grad = [draw(5, 24, seed=s) for s in (2, 3, 4)], draw(5, 24, seed=5)
    rail, y, _, edges = norm(x, gamma, EPS, (torch.float64,) * 3)
    torch.autograd.backward([rail, *edges], [rail_grad, *grads])
    got = x.grad, gamma.grad
    x.grad = gamma.grad = None
    want = formula(x, gamma)
    torch.autograd.backward([want, x], [sum(grads), rail_grad])
    assert torch.allclose(y, want, rtol=1e-12)
    assert not y.requires_grad
    assert relative(got[0], x.grad) < 1e-12
    assert relative(got[1], gamma.grad) < 1e-12


def test_bf16_is_read_computed_in_fp32_and_rounded_once() -> None:
    """Forward and dx are the BF16 rounding of the exact result; gamma's gradient is FP32."""
    x, gamma, dy, rail_grad = (draw(64, 40, seed=s).bfloat16() for s in range(4))
    x, gamma = x.requires_grad_(), gamma[0].float().requires_grad_()
    rail, y, _, (edge,) = norm(x, gamma, EPS, (torch.bfloat16,))
    torch.autograd.backward([rail, edge], [rail_grad, dy])
    wide, wide_gamma = x.detach().double().requires_grad_(), gamma.detach().double().requires_grad_()
    torch.autograd.backward([formula(wide, wide_gamma), wide], [dy.double(), rail_grad.double()])
    assert torch.equal(y, formula(wide, wide_gamma).bfloat16())
    assert x.grad.dtype == torch.bfloat16
    differing = x.grad != wide.grad.bfloat16()  # fp32 arithmetic may fall on the other side of a tie
    assert differing.float().mean() < 0.002
    assert gamma.grad.dtype == torch.float32
    assert relative(gamma.grad, wide_gamma.grad) < 1e-6


def test_readers_gradients_are_summed_in_fp32_in_order_with_one_rounding() -> None:
    """256 + 0.5 + 0.5 + ... in BF16 would stay 256."""
    grads = [torch.tensor([256.0]).bfloat16(), *[torch.tensor([0.5]).bfloat16()] * 4]
    assert junction(list(grads), torch.bfloat16) == 258.0
    big, small = torch.tensor([2.0**24]), torch.tensor([1.0])
    assert junction([big, small, small], torch.float32) == 2.0**24  # the order given, not small ones first
    assert junction([None, small, None], torch.float32) == 1.0
    assert junction([None], torch.bfloat16) is None


def views() -> dict[str, Tensor]:
    return {
        "every second column": draw(4, 512)[..., ::2],
        "transposed": draw(48, 6).t(),
        "part of wider rows": draw(5, 576)[:, :512],
        "slice of a batch": draw(2, 5, 64)[:, 1:4],
        "one row repeated": draw(1, 64).expand(7, 64),
    }


@pytest.mark.parametrize("case", views())
def test_strides_do_not_matter_forward_or_backward(case: str) -> None:
    """N01: strided x, and a strided gradient."""
    results = []
    for contiguous in (False, True):
        x = views()[case].float()
        x = (x.contiguous() if contiguous else x).detach().requires_grad_()
        gamma = torch.linspace(0.5, 1.5, x.shape[-1]).requires_grad_()
        grad = draw(*x.shape[:-1], 2 * x.shape[-1], seed=9, dtype=torch.float32)[..., ::2]
        _, y, _, (edge,) = norm(x, gamma, EPS, (torch.float32,))
        edge.backward(grad.contiguous() if contiguous else grad)
        results.append((y, x.grad, gamma.grad))
    for strided, contiguous_result in zip(*results, strict=True):
        assert torch.allclose(strided, contiguous_result, rtol=1e-5, atol=1e-6)  # sums may run in another order


def test_an_unread_norm_passes_the_rail_through() -> None:
    x, gamma = draw(3, 8).requires_grad_(), torch.ones(8, dtype=torch.float64, requires_grad=True)
    rail, *_ = norm(x, gamma, EPS, (torch.float64,))
    rail.sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 8, dtype=torch.float64))
    assert gamma.grad is None


def test_the_residual_sum_rounds_once_and_every_branch_gets_dy() -> None:
    x, a, b = (torch.tensor([v]).bfloat16().requires_grad_() for v in (256.0, 0.9, 0.9))
    out = residual_sum(x, a, b)
    assert out.item() == 258.0  # 257.8 rounded once; rounded in between it would be 256
    out.backward(torch.tensor([3.0]).bfloat16())
    assert [t.grad.item() for t in (x, a, b)] == [3.0] * 3
