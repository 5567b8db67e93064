"""The attention box: causal softmax against autograd in float64, isolation of documents, and the E5M6 cache."""

import dataclasses

import emulation
import pytest
import torch
from emulation import matmul
from support import recipe, relative
from torch import Tensor

from dsv3fp8.kernels.attention import reference
from dsv3fp8.model.linear import Linear
from dsv3fp8.ops.attention import attention
from dsv3fp8.ops.quantizers import LinearQuantizers

SIZES = (2, 9, 3, 8, 6)  # batch, length, heads, qk, v


def draw(seed: int, sizes: tuple[int, ...] = SIZES) -> list[Tensor]:
    """q, k, v and the gradient of the output, float64."""
    batch, length, heads, qk, v = sizes
    generator = torch.Generator().manual_seed(seed)
    widths = (qk, qk, v, v)
    return [torch.randn(batch, length, heads, width, generator=generator, dtype=torch.float64) for width in widths]


def plain(q: Tensor, k: Tensor, v: Tensor, scale: float, documents: Tensor | None = None) -> Tensor:
    """softmax over visible keys, one query at a time."""
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    rows = []
    for b in range(q.shape[0]):
        for i in range(q.shape[1]):
            seen = [
                j for j in range(i + 1)
                if documents is None or (documents[b, j] == documents[b, i] and documents[b, j] >= 0)
            ]  # fmt: skip
            if not seen:
                rows.append(out[b, i])
                continue
            scores = torch.einsum("hd,jhd->hj", q[b, i], k[b, seen]) * scale
            rows.append(torch.einsum("hj,jhd->hd", scores.softmax(-1), v[b, seen]))
    return torch.stack(rows).view_as(out)


DOCUMENTS = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 1], [3, 3, 4, 4, 4, 4, -1, -1, -1]])


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["causal", "documents"])
@pytest.mark.parametrize("block", [512, 4])
def test_forward_and_backward_equal_autograd(documents: Tensor | None, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "QUERY_BLOCK", block)
    q, k, v, dout = draw(0)
    out, lse = reference.attention_forward(q, k, v, 0.3, documents)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    want = plain(q, k, v, 0.3, documents)
    assert torch.allclose(out, want, rtol=1e-12, atol=1e-14)
    got = reference.attention_backward(dout, q, k, v, out, lse, 0.3, documents)
    for ours, theirs in zip(got, torch.autograd.grad(want, inputs, dout), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-13)


def test_bf16_in_fp32_softmax_one_rounding_out() -> None:
    q, k, v, dout = (t.bfloat16() for t in draw(1, (1, 300, 2, 24, 16)))
    out, lse = reference.attention_forward(q, k, v, 24**-0.5, None)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    wide = [t.double() for t in (q, k, v)]
    exact, exact_lse = reference.attention_forward(*wide, 24**-0.5, None)
    assert (out != exact.bfloat16()).float().mean() < 0.002
    assert torch.allclose(lse.double(), exact_lse, rtol=1e-6)
    got = reference.attention_backward(dout, q, k, v, out, lse, 24**-0.5, None)
    for ours, theirs in zip(
        got, reference.attention_backward(dout.double(), *wide, exact, exact_lse, 24**-0.5, None), strict=True
    ):
        assert ours.dtype == torch.bfloat16
        assert relative(ours.double(), theirs) < 2.0**-7


def test_another_document_changes_nothing() -> None:
    """A07: documents of 5 and 4 tokens; B's output and all gradients equal B alone, whatever A holds."""
    q, k, v, dout = draw(2, (1, 9, 2, 8, 6))
    documents = torch.tensor([[7] * 5 + [8] * 4])

    def run(*tensors: Tensor, with_documents: Tensor | None = documents) -> list[Tensor]:
        q, k, v, dout = tensors
        out, lse = reference.attention_forward(q, k, v, 0.3, with_documents)
        return [out, *reference.attention_backward(dout, q, k, v, out, lse, 0.3, with_documents)]

    packed = run(q, k, v, dout)
    other = [torch.cat((draw(3, (1, 9, 2, 8, 6))[i][:, :5], t[:, 5:]), 1) for i, t in enumerate((q, k, v, dout))]
    changed = run(*other)
    alone = run(*(t[:, 5:] for t in (q, k, v, dout)), with_documents=None)
    for whole, with_other_a, only_b in zip(packed, changed, alone, strict=True):
        assert torch.equal(whole[:, 5:], with_other_a[:, 5:])
        assert torch.allclose(whole[:, 5:], only_b, rtol=1e-12, atol=1e-15)


def test_padding_sees_nothing_and_is_not_seen() -> None:
    """A09: fully masked rows and an all-padding sequence give output 0 and gradients of exactly 0."""
    q, k, v, dout = (t.float() for t in draw(4))
    documents = torch.tensor([[0] * 6 + [-1] * 3, [-1] * 9])
    out, lse = reference.attention_forward(q, k, v, 0.3, documents)
    grads = reference.attention_backward(dout, q, k, v, out, lse, 0.3, documents)
    for t in (out, *grads):
        assert torch.isfinite(t).all()
        assert torch.count_nonzero(t[0, 6:]) == torch.count_nonzero(t[1]) == 0
        assert torch.count_nonzero(t[0, :6]) > 0


def test_the_softmax_scale_is_that_of_the_naive_form() -> None:
    """A06: absorbing W_kvb into q attends over 576 numbers a key, with 192^-0.5 all the same."""
    heads, nope, rope, latent, value, length = 2, 128, 64, 512, 128, 7
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q_nope, q_rope, c, k_rope = (
        normal(1, length, heads, nope), normal(1, length, heads, rope), normal(1, length, latent), normal(1, length, rope),
    )  # fmt: skip
    w_k, w_v = normal(heads, nope, latent) * latent**-0.5, normal(heads, value, latent) * latent**-0.5
    shared = k_rope[:, :, None].expand(-1, -1, heads, -1)
    k = torch.cat((torch.einsum("bsl,hdl->bshd", c, w_k), shared), -1)
    naive, _ = reference.attention_forward(
        torch.cat((q_nope, q_rope), -1), k, torch.einsum("bsl,hdl->bshd", c, w_v), 192**-0.5, None
    )
    absorbed_q = torch.cat((torch.einsum("bshd,hdl->bshl", q_nope, w_k), q_rope), -1)
    latents = c[:, :, None].expand(-1, -1, heads, -1)
    mixed, _ = reference.attention_forward(absorbed_q, torch.cat((latents, shared), -1), latents, 192**-0.5, None)
    assert absorbed_q.shape[-1] == 576
    assert torch.allclose(torch.einsum("bshl,hdl->bshd", mixed, w_v), naive, rtol=1e-10)


def through_out_projection(name: str, *overrides: str) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """The box and the out projection behind it: (inputs and dY, [y, dq, dk, dv, dw], the out projection's weight)."""
    given = recipe(name, *overrides)
    q, k, v, _ = (t.bfloat16().requires_grad_() for t in draw(5, (2, 70, 2, 24, 72)))
    layer = Linear(given, "out", 144, 40)
    torch.nn.init.normal_(layer.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    y = layer(attention(q, k, v, 0.2, None, given, layer.quantizers))
    dy = torch.randn(140, 40, generator=torch.Generator().manual_seed(1)).bfloat16()
    y.backward(dy)
    inputs = [t.detach() for t in (q, k, v)]
    return [*inputs, dy], [y.detach(), *(t.grad for t in (q, k, v)), layer.weight.grad], layer.weight.detach()


@pytest.mark.parametrize("operand", ["cache", "bf16"])
def test_backward_and_wgrad_read_the_output_from_its_e5m6_cache(operand: str) -> None:
    """The out projection's operand is requantized from the cache, or from the output; its wgrad always from the cache."""
    (q, k, v, dy), (y, dq, dk, dv, dw), weight = through_out_projection("dsv3", f"operand={operand}")
    out, lse = reference.attention_forward(q, k, v, 0.2, None)
    flat = out.reshape(140, 144)
    cached = emulation.quantize(flat, "e5m6", (1, 128), "pow2").values
    source = cached if operand == "cache" else flat.float().numpy()
    wq = emulation.quantize(weight, "e4m3", (128, 128), "fp32").values
    want_y = matmul(emulation.quantize(source, "e4m3", (1, 128), "pow2").values, wq.T)
    assert relative(y.double(), torch.from_numpy(want_y)) < 2.0**-8
    gq = emulation.quantize(dy, "e4m3", (1, 128), "fp32").values
    dout = torch.from_numpy(emulation.bf16(matmul(gq, wq))).bfloat16().view_as(out)
    kept = torch.from_numpy(cached).bfloat16().view_as(out)
    want = reference.attention_backward(dout, q, k, v, kept, lse, 0.2, None)
    for got, expected in zip((dq, dk, dv), want, strict=True):
        assert relative(got.float(), expected.float()) < 2.0**-6
    gt = emulation.quantize(dy, "e4m3", (128, 1), "fp32").values
    assert (
        relative(dw.double(), torch.from_numpy(matmul(gt.T, emulation.quantize(cached, "e4m3", (128, 1), "pow2").values)))
        < 1e-6
    )


def test_with_a_bf16_cache_the_wgrad_operand_is_still_e4m3() -> None:
    """bf16_cache changes what is kept, not what the GEMMs read."""
    (q, k, v, dy), (*_, dw), _ = through_out_projection("bf16_cache")
    flat = reference.attention_forward(q, k, v, 0.2, None)[0].reshape(140, 144)
    gt, xt = (emulation.quantize(t, "e4m3", (128, 1), kind).values for t, kind in ((dy, "fp32"), (flat, "pow2")))
    assert relative(dw.double(), torch.from_numpy(matmul(gt.T, xt))) < 1e-6


def test_an_unquantized_out_projection_reads_the_cache_as_bf16() -> None:
    (q, k, v, dy), (y, *_, dw), weight = through_out_projection(
        "dsv3", "ops.out.input.format=none", "ops.out.weight.format=none", "ops.out.gradient.format=none"
    )
    flat = reference.attention_forward(q, k, v, 0.2, None)[0].reshape(140, 144)
    cached = emulation.quantize(flat, "e5m6", (1, 128), "pow2").values
    assert relative(y.double(), torch.from_numpy(matmul(cached, emulation.bf16(weight).T))) < 2.0**-8
    assert relative(dw.double(), torch.from_numpy(matmul(emulation.array(dy).T, cached))) < 1e-6


def test_what_is_kept_of_attention_is_q_k_v_lse_and_twelve_bits_a_value() -> None:
    given = recipe("dsv3")
    q, k, v, _ = (t.bfloat16().requires_grad_() for t in draw(6, (1, 70, 2, 24, 64)))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        out = attention(q, k, v, 0.2, None, given, LinearQuantizers(given, "out"))
    kept = sorted((str(t.dtype).removeprefix("torch."), t.numel()) for t in saved)
    qk, width = 70 * 2 * 24, 2 * 64
    assert kept == [
        ("bfloat16", qk), ("bfloat16", qk), ("bfloat16", 70 * width), ("float32", 70), ("float32", 140), ("uint8", 70 * 192),
    ]  # fmt: skip
    assert dataclasses.is_dataclass(out.operand)
