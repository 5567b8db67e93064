"""The fused norm, SwiGLU and RoPE kernels in Triton's interpreter: run by test_elementwise.py in a process of its own."""

from typing import Any

import pytest
import torch
from interpreted_triton import _as_on_a_gpu, check
from torch import Tensor

from dsv3fp8.kernels import elementwise
from dsv3fp8.kernels.norm import reference as norm_reference
from dsv3fp8.kernels.norm import triton as norm
from dsv3fp8.kernels.quantize.columns import quantize_columns
from dsv3fp8.kernels.quantize.reference import quantize
from dsv3fp8.kernels.rope import reference as rope_reference
from dsv3fp8.kernels.rope import triton as rope
from dsv3fp8.kernels.swiglu import reference as swiglu_reference
from dsv3fp8.kernels.swiglu import triton as swiglu
from dsv3fp8.precision.cast_meter import measure_casts
from dsv3fp8.precision.formats import E4M3, E5M2
from dsv3fp8.precision.ledger import observe_ops
from dsv3fp8.precision.tiles import COLUMN_128, ROW_128, QuantizedTensor, values_of

__all__ = ["_as_on_a_gpu"]  # the fixture
EPS = 1e-6


def draw(rows: int, cols: int, seed: int = 0, poisoned: bool = False) -> Tensor:
    """BF16 rows of unlike sizes, one of zeros; a NaN and an infinity where asked and there is room."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator) * torch.exp(2 * torch.randn(rows, 1, generator=generator))
    if rows > 4:
        x[1] = 0
        if poisoned:
            x[2, cols // 2], x[4, 0] = torch.nan, torch.inf
    return x.bfloat16()


def same_bf16(got: Tensor, want: Tensor) -> None:
    """Equal but for one step of BF16 in one of 200 elements: rows are summed in another order. NaN where NaN is wanted."""
    assert torch.equal(torch.isnan(got), torch.isnan(want))
    steps = (got.view(torch.int16).int() - want.view(torch.int16).int()).abs()[torch.isfinite(want)]
    assert steps.numel() == 0 or (steps.max() <= 1 and (steps > 0).float().mean() < 0.005)


SIZES = [(1, 1), (5, 200), (130, 128), (3, 576), (2, 1408)]


@pytest.mark.parametrize(("rows", "cols"), SIZES)
@pytest.mark.parametrize("kind", ["fp32", "pow2"])
def test_norm_forward(rows: int, cols: int, kind: str) -> None:
    x, gamma = draw(rows, 2 * cols, poisoned=True)[:, :cols], 1 + 0.1 * torch.randn(cols)
    y = norm.forward(x, gamma, EPS)
    same_bf16(y, norm_reference.forward(x, gamma, EPS))
    kept, cast = norm.forward_cast(x, gamma, EPS, E4M3, kind, True)
    assert kept is not None
    assert torch.equal(kept.view(torch.int16), y.view(torch.int16))
    check(cast, quantize(y, E4M3, ROW_128, kind))
    check(norm.forward_cast(x, gamma, EPS, E4M3, kind, False)[1], cast)


@pytest.mark.parametrize(("rows", "cols"), SIZES)
@pytest.mark.parametrize(("grads", "railed"), [("b", False), ("ff", True), ("bbf", True), ("-f", False)])
def test_norm_backward(rows: int, cols: int, grads: str, railed: bool) -> None:
    """One to three readers in BF16 and FP32, one that gave nothing, with and without a rail."""
    x, gamma = draw(rows, cols), 1 + 0.1 * torch.randn(cols)
    types = {"b": torch.bfloat16, "f": torch.float32}
    given = [None if t == "-" else draw(rows, cols, i).to(types[t]) for i, t in enumerate(grads)]
    rail = draw(rows, cols, 9) if railed else None
    got, want = (k.backward(x, gamma, EPS, given, rail) for k in (norm, norm_reference))
    # What the row's means cancel may be a step of a larger number than dx.
    assert ((got[0].float() - want[0].float()).abs() <= want[0].float().abs() / 128 + 1e-6 * want[0].float().abs().amax()).all()
    assert (got[0] != want[0]).float().mean() < 0.01
    assert torch.allclose(got[1], want[1], rtol=1e-5, atol=1e-5 * float(want[1].abs().max()))


@pytest.mark.parametrize("beside", [0, 64])
@pytest.mark.parametrize("kind", ["fp32", "pow2"])
def test_norm_backward_casts_its_bf16_result_both_ways(kind: str, beside: int) -> None:
    x, gamma, dy = draw(140, 256, poisoned=True), torch.ones(256), draw(140, 256, 1)
    extra = draw(140, beside, 2) if beside else None
    by_row, by_column, _ = norm.backward_cast(x, gamma, EPS, dy, extra, E5M2, kind)
    dx, _ = norm.backward(x, gamma, EPS, [dy], None)
    both = dx if extra is None else torch.cat((dx, extra), 1)
    check(by_row, quantize(both, E5M2, ROW_128, kind))
    check(by_column, quantize(both, E5M2, COLUMN_128, kind))
    assert by_column.codes.mT.is_contiguous()


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (127, 129), (144, 200)])
def test_columns_are_cast_as_the_reference_does(rows: int, cols: int) -> None:
    x = draw(cols, rows, poisoned=True).mT
    check(quantize_columns(x, E4M3, "fp32"), quantize(x, E4M3, COLUMN_128))


def near(got: QuantizedTensor, want: QuantizedTensor) -> None:
    """Equal but for the interpreter's exp, which is numpy's: at most one step of E4M3 in one of 200 elements."""
    assert (got.shape, got.tile, got.col_parts, got.scale_kind) == (want.shape, want.tile, want.col_parts, want.scale_kind)
    a, b = got.decode(), want.decode()
    assert torch.equal(torch.isnan(a), torch.isnan(b))
    differing = torch.isfinite(b) & (a != b)
    assert differing.float().mean() < 0.005
    assert ((a - b).abs()[differing] <= torch.maximum(a.abs(), b.abs())[differing] / 8).all()


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (33, 128), (130, 200)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["fp32", "pow2"])
def test_swiglu(rows: int, cols: int, weighted: bool, kind: str) -> None:
    """The cache to the bit; what comes of it; inert rows of zeros get code 0 and scale 1."""
    h, dout = draw(rows, 2 * cols, poisoned=True), draw(rows, cols, 1)
    weight = torch.rand(rows) if weighted else None
    if rows > 4:
        h[3], dout[3], h[0, 0] = 0, 0, -1e4
    for through in (True, False):
        got, want = (k.forward_cast(h, weight, kind, through, E4M3, kind) for k in (swiglu, swiglu_reference))
        check(got[0], want[0])
        near(got[1], want[1])
    for cache in (want[0], h):
        again, wanted = (k.forward_again(cache, torch.bfloat16, weight, E4M3, kind) for k in (swiglu, swiglu_reference))
        near(again, wanted)
        values = values_of(cache)
        plain, wanted = swiglu.forward(cache, h.dtype, weight), swiglu_reference.forward(values, h.dtype, weight)
        same_bf16(plain, wanted)
        (dh, dweight), (dh_want, dweight_want) = (
            swiglu.backward(cache, dout, h.dtype, weight), swiglu_reference.backward(values, dout, h.dtype, weight)
        )  # fmt: skip
        same_bf16(dh, dh_want)
        if weight is not None:
            assert torch.allclose(dweight, dweight_want, rtol=1e-5, atol=1e-4, equal_nan=True)
        ours, theirs = (k.backward_cast(cache, dout, weight, E4M3, kind) for k in (swiglu, swiglu_reference))
        near(ours[0], theirs[0])
        near(ours[1], theirs[1])
        assert ours[1].codes.mT.is_contiguous()
        if rows > 4:
            assert (ours[0].scale[3] == 1).all()
            assert (ours[0].codes[3].view(torch.uint8) & 0x7F == 0).all()
        if weight is not None:
            assert torch.allclose(ours[2], theirs[2], rtol=1e-5, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize(
    "size", [(2, 70, 3, 16, 8, 24), (1, 130, 2, 128, 64, 128), (1, 1, 1, 4, 2, 3), (2, 5, 20, 6, 6, 7)], ids=str
)
@pytest.mark.parametrize("kind", ["fp32", "pow2"])
def test_rope(size: tuple[int, ...], kind: str) -> None:
    """Forward and casts to the bit, over tiles that begin inside a head; k_rope's gradient but for the order of its sum."""
    batch, length, heads, nope, turned, v = size

    def given(*shape: int) -> Tensor:
        return torch.randn(shape).bfloat16()

    q, kv, k_rope = (given(batch, length, *rest) for rest in ((heads, nope + turned), (heads, nope + v), (turned,)))
    angles = torch.randn(batch if batch > 1 else 1, length, turned // 2)
    tables = angles.cos(), angles.sin()
    ours, theirs = (k.forward(q, kv, k_rope, *tables) for k in (rope, rope_reference))
    for got, want in zip(ours, theirs, strict=True):
        assert torch.equal(got.view(torch.int16), want.view(torch.int16))
    dq = given(batch, heads, length, nope + turned).transpose(1, 2)
    dk, dv = given(batch, length, heads, nope + turned), given(batch, length, heads, v)
    dq[0, 0, 0, 0], dv[0, 0, 0, 0] = torch.nan, torch.inf
    got, want = (k.backward(dq, dk, dv, *tables) for k in (rope, rope_reference))
    for i in range(2):
        assert torch.equal(got[i].view(torch.int16), want[i].view(torch.int16))
    same_bf16(got[2], want[2])
    casts = (E4M3, kind), (E5M2, "fp32")
    got, want = (k.backward_cast(dq, dk, dv, *tables, *casts) for k in (rope, rope_reference))
    for i in range(2):
        check(got[i][0], want[i][0])
        check(got[i][1], want[i][1])
        assert got[i][1].codes.mT.is_contiguous()
    same_bf16(got[2], want[2])


def test_ops_with_casts_are_counted_by_the_reference_and_give_their_kernels_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a kernel calls a quantizer, which refuses to run while what casts lose is counted."""
    monkeypatch.setattr(elementwise, "against_triton", lambda _: None)
    x, dy, gamma, weight = draw(130, 192), draw(130, 192, 1), torch.ones(192), torch.rand(130)
    h, cast, angle = draw(130, 384, 2), (E4M3, "fp32"), torch.rand(1, 130, 32)
    cache = swiglu_reference.cast_input(h, "fp32")
    q, v = draw(130, 2 * 192, 3).view(1, 130, 2, 192), draw(130, 2 * 128, 4).view(1, 130, 2, 128)
    calls = {
        "norm": lambda: elementwise.norm_forward_cast(x, gamma, EPS, *cast, True),
        "norm backward": lambda: elementwise.norm_backward_cast(x, gamma, EPS, dy, draw(130, 64, 5), *cast),
        "swiglu": lambda: elementwise.swiglu_forward_cast(h, weight, "fp32", True, *cast),
        "swiglu again": lambda: elementwise.swiglu_forward_again(cache, torch.bfloat16, weight, *cast),
        "swiglu backward": lambda: elementwise.swiglu_backward_cast(cache, dy, weight, *cast),
        "rope backward": lambda: elementwise.rope_backward_cast(q, q, v, angle.cos(), angle.sin(), cast, cast),
    }
    for name, call in calls.items():
        alone = call()
        with measure_casts() as meter:
            counted = call()
        assert meter._counts, name
        for got, want in zip(_flat(counted), _flat(alone), strict=True):
            assert torch.equal(got, want), name


def _flat(results: Any) -> list[Tensor]:
    if isinstance(results, QuantizedTensor):
        return [results.codes.view(torch.uint8), results.scale]
    return [results] if isinstance(results, Tensor) else [t for part in results for t in _flat(part)]


def test_a_step_through_the_fused_kernels_reports_and_gives_what_the_reference_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every gradient but those of norm weights, which are sums over tokens, is equal or next to it; records are the same."""
    from support import build, gradients, nano, recipe, windows

    config, given, ledgers = nano(), [], []
    for against in ("not asked for", None):
        monkeypatch.setattr(elementwise, "against_triton", lambda _, why=against: why)
        with observe_ops() as ledger:
            given.append(gradients(build(config, recipe("dsv3")), [windows(config)]))
        ledgers.append(ledger)
    assert ledgers[0].records == ledgers[1].records
    assert not ledgers[1].unreported
    assert not ledgers[1].unsaved
    for name, want in given[0].items():
        assert torch.nn.functional.cosine_similarity(want.flatten(), given[1][name].flatten(), 0) > 0.9999, name
