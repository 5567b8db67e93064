"""Attention's kernels in Triton's interpreter, against float64: run by test_attention_kernels.py in a process of its own.

The interpreter's dot multiplies the bits of BF16 as integers: it is replaced by one that multiplies values and sums in fp32.
"""

import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from interpreted_triton import _as_on_a_gpu
from torch import Tensor

from dsv3fp8.kernels.attention import triton as attention
from dsv3fp8.kernels.quantize.reference import quantize
from dsv3fp8.precision.formats import E5M6
from dsv3fp8.precision.tiles import ROW_128

__all__ = ["_as_on_a_gpu"]  # the fixture
V3, SMALL, ODD = (192, 128), (24, 16), (40, 24)


@pytest.fixture(autouse=True)
def _products_of_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    def create_dot(_self: Any, a: Any, b: Any, acc: Any, *_how: Any) -> Any:
        assert a.dtype == b.dtype == tl.bfloat16
        left, right = (x.data.view(ml_dtypes.bfloat16).astype(np.float32) for x in (a, b))
        return interpreter.TensorHandle(left @ right + acc.data, acc.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def draw(length: int, widths: tuple[int, int], batch: int = 1, heads: int = 1, seed: int = 0) -> list[Tensor]:
    """q, k, v and the gradient of the output in bf16, each a part of something wider, with its tokens behind its heads."""
    generator = torch.Generator().manual_seed(seed)
    qk, v = widths
    whole = (torch.randn(batch, heads, length, width + 8, generator=generator) for width in (qk, qk, v, v))
    return [x.bfloat16().transpose(1, 2)[..., 8:] for x in whole]


def plain(q: Tensor, k: Tensor, v: Tensor, scale: float, documents: Tensor | None) -> tuple[Tensor, Tensor]:
    """Softmax attention in float64 and its log-sum-exp, with 0 and -inf where a query sees nothing."""
    length = q.shape[1]
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    seen = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    if documents is not None:
        seen = seen & ((documents[:, :, None] == documents[:, None, :]) & (documents >= 0)[:, None, :])[:, None]
    scores = scores.masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1)
    probabilities = torch.where(seen, (scores - torch.where(lse == -math.inf, 0.0, lse)[..., None]).exp(), 0.0)
    return torch.einsum("bhij,bjhd->bihd", probabilities, v), lse


def wanted(
    tensors: list[Tensor], kept: Tensor, scale: float, documents: Tensor | None
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Output, lse and gradients in float64, the gradients as backward gives them from `kept`, whatever forward gave.

    It reads the output in delta = sum(dout * out) alone: another delta moves ds by that of each query times its probabilities.
    """
    *inputs, dout = (x.double() for x in tensors)
    q, k, v = (x.requires_grad_() for x in inputs)
    out, lse = plain(q, k, v, scale, documents)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    moved = (dout * (out.detach() - kept.double())).sum(-1)  # [B, S, H]
    weights = moved.transpose(1, 2) * torch.where(lse == -math.inf, 0.0, lse)  # whose gradient is that of lse, times moved
    dq_moved, dk_moved = torch.autograd.grad(weights.sum(), (q, k))
    return out.detach(), lse.detach(), (dq + dq_moved, dk + dk_moved, dv)


def close(got: Tensor, want: Tensor, whole: float, each: float) -> None:
    """whole: of the norms; each: of the largest magnitude, in any element. Zeros up to what fp32 sums leave of them."""
    got = got.double()
    assert torch.isfinite(got).all()
    assert (got - want).norm() <= whole * want.norm() + 1e-5
    assert (got - want).abs().max() <= each * want.abs().max() + 1e-6


def check(tensors: list[Tensor], scale: float, documents: Tensor | None = None, kept: Tensor | None = None) -> list[Tensor]:
    """Forward and backward against float64; kept: what backward reads as the output, by default forward's."""
    q, k, v, dout = tensors
    out, lse = attention.attention_forward(q, k, v, scale, documents)
    kept = out if kept is None else kept
    gradients = attention.attention_backward(dout, q, k, v, kept, lse, scale, documents)
    want, want_lse, want_gradients = wanted(tensors, kept, scale, documents)
    close(out, want, 0.003, 0.006)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(lse == -math.inf, want_lse == -math.inf)
    assert torch.allclose(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    for x, got, wide in zip((q, k, v), gradients, want_gradients, strict=True):
        assert (got.shape, got.dtype) == (x.shape, torch.bfloat16)
        close(got, wide, 0.004, 0.01)
    return [out, lse, *gradients]


LENGTHS = [(length, V3) for length in (1, 127, 129, 200)] + [(1, SMALL), (200, SMALL), (129, ODD)]


@pytest.mark.parametrize(("length", "widths"), LENGTHS, ids=str)
def test_plain_causal_attention(length: int, widths: tuple[int, int]) -> None:
    check(draw(length, widths), widths[0] ** -0.5)


@pytest.mark.parametrize("widths", [(96, 64), (48, 32), (64, 32), (8, 2), (100, 72)], ids=str)
def test_other_widths(widths: tuple[int, int]) -> None:
    """Of one power of two and of two, with and without values that do not exist."""
    check(draw(130, widths), widths[0] ** -0.5)


DOCUMENTS = {
    "across blocks": [[0] * 130 + [1] * 1 + [2] * 60 + [-1] * 9, [5] * 200],
    "of one token": [list(range(200)), [7] * 127 + [8, 9, 10] + [11] * 70],
    "all padding": [[-1] * 200, [-1] * 3 + [0] * 100 + [-1] * 40 + [1] * 57],
    "in no order": [[2] * 64 + [9] * 76 + [2] * 60, [9] * 64 + [2] * 76 + [9] * 60, [i % 3 for i in range(200)]],
}


@pytest.mark.parametrize("case", DOCUMENTS)
def test_documents_are_kept_apart_in_batches_of_heads(case: str) -> None:
    documents = torch.tensor(DOCUMENTS[case], dtype=torch.int64 if case == "in no order" else torch.int32)
    found = check(draw(200, SMALL, batch=len(documents), heads=3), 0.3, documents)
    padding = documents < 0
    for x in (found[0], *found[2:]):
        assert torch.count_nonzero(x[padding]) == 0


def test_documents_at_v3_widths() -> None:
    check(draw(200, V3), 192**-0.5, torch.tensor([[0] * 70 + [1] * 70 + [-1] * 60]))


def test_heads_and_windows_do_not_touch_each_other() -> None:
    """Equal, to the bit, to each head of each window alone."""
    tensors = draw(140, ODD, batch=2, heads=3)
    together = check(tensors, 0.2)
    for b, h in itertools.product(range(2), range(3)):
        alone = check([x[b : b + 1, :, h : h + 1] for x in tensors], 0.2)
        for whole, part in zip(together, alone, strict=True):
            mine = whole[b, h] if whole.dim() == 3 else whole[b, :, h]
            assert torch.equal(mine, part.reshape(mine.shape))


def test_backward_reads_the_output_as_it_was_kept() -> None:
    """Rounded through E5M6, and one that has nothing to do with forward's."""
    tensors = draw(130, SMALL, heads=2)
    *qkv, dout = tensors
    out, lse = attention.attention_forward(*qkv, 0.2, None)
    kept = quantize(out.reshape(130, -1), E5M6, ROW_128, "pow2").decode().bfloat16().view_as(out)
    assert not torch.equal(kept, out)
    check(tensors, 0.2, kept=kept)
    other = draw(130, SMALL, heads=2, seed=1)[3]
    check(tensors, 0.2, kept=other)
    exact, changed = (attention.attention_backward(dout, *qkv, x, lse, 0.2, None) for x in (out, other))
    assert not torch.equal(exact[0], changed[0])
    assert torch.equal(exact[2], changed[2])  # dv knows nothing of it


@pytest.mark.parametrize("documents", [None, [[0] * 70 + [1] * 70]], ids=["causal", "documents"])
@pytest.mark.parametrize("score", [1e4, -1e4])
def test_extreme_scores_give_neither_nan_nor_infinity(score: float, documents: list[list[int]] | None) -> None:
    """Of some keys only, so that a row's scores lie 1e4 and more apart; and of all of them."""
    q, k, v, dout = draw(140, SMALL)
    ids = None if documents is None else torch.tensor(documents)
    for keys in (slice(None), slice(3, None, 7)):
        q[..., 0], k[..., 0] = 100.0, 0.0
        k[:, keys, :, 0] = score / 100
        out, lse = attention.attention_forward(q, k, v, 1.0, ids)
        want, want_lse = plain(q.double(), k.double(), v.double(), 1.0, ids)
        assert torch.allclose(lse.double(), want_lse, rtol=1e-6)
        close(out, want, 0.01, 0.02)
        for gradient in attention.attention_backward(dout, q, k, v, out, lse, 1.0, ids):
            assert torch.isfinite(gradient).all()


def test_no_probability_of_backward_is_above_one() -> None:
    """Where the log-sum-exp is of 4e8, and its last bit of 32: a row that sees one key gives it all of its gradient."""
    q, k, v, dout = (x.abs() + 1 for x in draw(130, SMALL))
    q, k = q * 1e4, k * 1e4
    out, lse = attention.attention_forward(q, k, v, 1.0, None)
    assert lse.max() > 4e8
    dq, dk, dv = attention.attention_backward(dout, q, k, v, out, lse, 1.0, None)
    for gradient in (dq, dk, dv):
        assert torch.isfinite(gradient).all()
    assert dv.double().sum(1).le(1.01 * dout.double().sum(1)).all()


def test_scores_below_what_fp32_holds_are_not_seen() -> None:
    """A whole block of keys at -inf, the first."""
    q, k, v, dout = draw(140, SMALL)
    q[..., 0], k[..., 0] = 1e30, 0.0
    k[:, 1:66, :, 0] = -1e30
    out, lse = attention.attention_forward(q, k, v, 1.0, None)
    dq, dk, dv = attention.attention_backward(dout, q, k, v, out, lse, 1.0, None)
    assert all(torch.isfinite(x).all() for x in (out, lse, dq, dk, dv))
    k[:, 0, :, 0] = -1e30
    out, _ = attention.attention_forward(q, k, v, 1.0, None)
    assert torch.isfinite(out[:, 66:]).all()


def test_documents_of_one_row_are_those_of_all() -> None:
    q, k, v, dout = draw(70, SMALL, batch=2)
    ids = torch.arange(70)[None] // 30
    ours, each = (attention.attention_forward(q, k, v, 0.3, given) for given in (ids, ids.expand(2, -1)))
    assert torch.equal(ours[0], each[0])
    ours, each = (attention.attention_backward(dout, q, k, v, *each, 0.3, given) for given in (ids, ids.expand(2, -1)))
    assert all(torch.equal(*pair) for pair in zip(ours, each, strict=True))


def test_zeros() -> None:
    """Every query sees its keys alike."""
    q, k, v, dout = draw(130, SMALL)
    for x in (q, k):
        x.zero_()
    out, lse, dq, dk, _ = check([q, k, v, dout], 0.5)
    assert torch.allclose(lse[0, 0], torch.arange(1, 131).float().log(), atol=1e-6)
    assert torch.equal(out[0, 0], v[0, 0])
    assert torch.count_nonzero(dq) == torch.count_nonzero(dk) == 0


def test_a_nan_is_not_lost() -> None:
    q, k, v, dout = draw(130, SMALL)
    q[0, 50, 0, 3] = math.nan
    out, lse = attention.attention_forward(q, k, v, 0.5, None)
    assert torch.isnan(out[0, 50]).all()
    assert torch.isnan(lse[0, 0, 50])
    assert torch.isfinite(out[0, :50]).all()
    dq, dk, dv = attention.attention_backward(dout, q, k, v, out, lse, 0.5, None)
    assert torch.isnan(dq[0, 50]).all()
    assert torch.isnan(dk[0, :51]).all()
    assert torch.isnan(dv[0, :51]).all()


def test_repeats_have_the_same_bits_and_no_tokens_no_launch() -> None:
    tensors, documents = draw(200, SMALL, heads=2), torch.tensor([[0] * 90 + [1] * 110])
    first, second = (check(tensors, 0.2, documents) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    q, k, v, dout = (x[:, :0] for x in tensors)
    out, lse = attention.attention_forward(q, k, v, 0.2, None)
    assert attention.attention_backward(dout, q, k, v, out, lse, 0.2, None)[0].shape == q.shape


def test_what_the_kernels_cannot_take_is_refused_in_a_line() -> None:
    wide = torch.zeros(1, 4, 1, 256).bfloat16()
    with pytest.raises(ValueError, match="heads of up to 192 and 128 values, not 256 and 256"):
        attention.attention_forward(wide, wide, wide, 0.1, None)
    q, k, v, _ = draw(4, SMALL)
    with pytest.raises(ValueError, match="a scale above 0"):
        attention.attention_forward(q, k, v, -0.1, None)
