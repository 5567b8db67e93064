"""Rotary embedding: pairs, positions, YaRN, and the backward of the box."""

import math

import pytest
import torch
from support import nano
from torch import Tensor

from dsv3fp8.kernels.rope.reference import rotate
from dsv3fp8.model.config import ModelConfig, YarnConfig
from dsv3fp8.model.rope import inverse_frequencies, magnitude, positions_of, rope_table, softmax_scale
from dsv3fp8.ops.rope import mla_rope


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_pairs_are_interleaved() -> None:
    """A04: (0, 1), (2, 3), ... of DeepSeek's weights, not halves."""
    angles = torch.tensor([1.0, 0.01])
    got = rotate(torch.tensor([1.0, 2.0, 3.0, 4.0]), angles.cos(), angles.sin())
    assert torch.allclose(got, torch.tensor([-1.1426, 1.9221, 2.9599, 4.0298]), atol=1e-4)


def test_reordered_pairs_turn_as_halves_do() -> None:
    """A04: the same numbers in half-split order, which an export to that convention must produce by permuting rows."""
    halves = torch.tensor([1.0, 2.0, 3.0, 4.0])
    to_pairs = torch.tensor([0, 2, 1, 3])  # pair i of the halves is (i, i + 2)
    angles = torch.tensor([1.0, 0.01])
    turned = rotate(halves[to_pairs], angles.cos(), angles.sin())[to_pairs.argsort()]
    assert torch.allclose(turned, torch.tensor([-1.9841, 1.9599, 2.4624, 4.0198]), atol=1e-4)


def test_the_box_equals_autograd_of_an_independent_complex_rotation() -> None:
    """q and k from complex numbers; k_rope's gradient is the sum over heads."""
    batch, length, heads, nope, rope, v = 2, 5, 3, 4, 6, 7
    q, kv = draw(batch, length, heads, nope + rope), draw(batch, length, heads, nope + v, seed=1)
    k_rope, angles = draw(batch, length, rope, seed=2), draw(batch, length, rope // 2, seed=3)
    grads = [draw(batch, length, heads, n, seed=s) for s, n in ((4, nope + rope), (5, nope + rope), (6, v))]
    inputs = [t.requires_grad_() for t in (q, kv, k_rope)]
    out = mla_rope(q, kv, k_rope, 1.5 * angles.cos(), 1.5 * angles.sin())
    got = torch.autograd.grad(out, inputs, grads)

    turn = torch.polar(torch.full_like(angles, 1.5), angles)

    def turned(x: Tensor, by: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * by).flatten(-2)

    want_q = torch.cat((q[..., :nope], turned(q[..., nope:], turn[:, :, None])), -1)
    shared = turned(k_rope, turn)[:, :, None].expand(-1, -1, heads, -1)
    want = (want_q, torch.cat((kv[..., :nope], shared), -1), kv[..., nope:])
    for ours, theirs in zip(out, want, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12)
    for ours, theirs in zip(got, torch.autograd.grad(want, inputs, grads), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12)


def test_the_gradient_of_the_shared_key_is_summed_and_turned_in_fp32_and_rounded_once() -> None:
    tokens, heads = 200, 64
    q, kv = (torch.zeros(1, tokens, heads, n, dtype=torch.bfloat16) for n in (4 + 6, 4 + 3))
    k_rope = torch.zeros(1, tokens, 6, dtype=torch.bfloat16, requires_grad=True)
    angles = draw(1, tokens, 3).float()
    _, k, _ = mla_rope(q, kv, k_rope, angles.cos(), angles.sin())
    dk = draw(*k.shape, seed=1).bfloat16()
    k.backward(dk)
    want = rotate(dk[..., 4:].double().sum(2), angles.cos().double(), -angles.sin().double())
    assert (k_rope.grad != want.bfloat16()).float().mean() < 0.005  # but for ties of the fp32 sum


def test_positions_restart_with_every_document() -> None:
    """A07: and run on from the start of the sequence without documents."""
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, -1, -1], [4, 4, 5, 5, 5, 5, 5, 5]])
    want = [[0, 1, 2, 0, 1, 0, 0, 1], [0, 1, 0, 1, 2, 3, 4, 5]]
    assert positions_of(documents, 2, 8, torch.device("cpu")).tolist() == want
    assert positions_of(None, 2, 4, torch.device("cpu")).tolist() == [[0, 1, 2, 3]]


def v3(mscale: float, mscale_all_dim: float, context: int = 163840) -> ModelConfig:
    yarn = YarnConfig(40.0, 4096, 32.0, 1.0, mscale, mscale_all_dim)
    return nano_with(yarn, head_nope=128, head_rope=64, context=context)


def nano_with(yarn: YarnConfig, **sizes: int) -> ModelConfig:
    config = nano(**sizes)
    config.yarn = yarn
    return config


@pytest.mark.parametrize(("mscale", "all_dim"), [(1.0, 1.0), (0.707, 1.0), (0.707, 0.707)])
def test_yarn_scales_the_softmax_by_mscale_all_dim_and_cos_by_the_ratio(mscale: float, all_dim: float) -> None:
    """A01: factor 40 with mscale_all_dim 1 gives 1.3689^2 = 1.8739, hence 0.1352 where 192^-0.5 is 0.0722."""
    config = v3(mscale, all_dim)
    factor = 0.1 * all_dim * math.log(40) + 1
    assert softmax_scale(config) == pytest.approx(192**-0.5 * factor**2, rel=1e-12)
    if all_dim == 1.0:
        assert softmax_scale(config) == pytest.approx(0.1352, abs=1e-4)
    cos, sin = rope_table(config, torch.tensor([0, 7]))
    ratio = (0.1 * mscale * math.log(40) + 1) / factor
    assert torch.allclose(cos**2 + sin**2, torch.full_like(cos, ratio**2), rtol=1e-6)


def test_yarn_frequencies_interpolate_between_the_ends() -> None:
    """Highest frequencies as they were, lowest divided by the factor, in between a ramp."""
    config = v3(1.0, 1.0)
    plain = 10000.0 ** (-torch.arange(32, dtype=torch.float64) / 32)
    ratio = inverse_frequencies(config) / plain
    assert torch.allclose(ratio[:11], torch.ones(11, dtype=torch.float64))
    assert torch.allclose(ratio[23:], torch.full((9,), 1 / 40, dtype=torch.float64))
    assert (ratio.diff() <= 1e-12).all()


def test_yarn_acts_above_the_original_context_only() -> None:
    """A01, and the report's pre-training at 4096 with a config that names YaRN."""
    config = v3(1.0, 1.0, context=4096)
    assert softmax_scale(config) == 192**-0.5
    assert torch.allclose(inverse_frequencies(config), 10000.0 ** (-torch.arange(32, dtype=torch.float64) / 32))
    assert magnitude(1.0, 1.0) == 1.0


@pytest.mark.parametrize(("rope", "original", "factor"), [(128, 64, 40.0), (4, 64, 40.0), (2, 8, 16.0), (8, 1, 4.0)])
def test_yarn_borders_may_be_zero_or_equal(rope: int, original: int, factor: float) -> None:
    """A03: low 0, low equal to high; the first frequency stays, all are finite and positive."""
    config = nano_with(YarnConfig(factor, original), head_rope=rope, context=int(original * factor))
    frequencies = inverse_frequencies(config)
    assert torch.isfinite(frequencies).all()
    assert (frequencies > 0).all()
    assert float(frequencies[0]) == 1.0


def test_a_table_at_a_long_context_is_exact_to_fp32() -> None:
    """Angles in float64: at position 163,839 an fp32 angle would be off by 8e-3."""
    config = v3(1.0, 1.0)
    cos, _ = rope_table(config, torch.tensor([163839]))
    assert float(cos[0, 0]) == pytest.approx(math.cos(163839.0), abs=1e-7)
