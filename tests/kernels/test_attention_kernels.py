"""Attention's own kernels: compiled for Hopper, on a GPU, and in the interpreter; and when they are taken.

The interpreter runs interpreted_attention.py in a process of its own, because TRITON_INTERPRET=1 holds for a whole process.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import relative
from torch import Tensor

pytest.importorskip("triton", minversion="3.6")

from interpreter import run_interpreted
from test_triton_compiles import compiled, resources

from dsv3fp8.config import load_config
from dsv3fp8.kernels import backend
from dsv3fp8.kernels.attention import choice, cudnn, reference
from dsv3fp8.kernels.attention import triton as attention
from dsv3fp8.kernels.explain import explain
from dsv3fp8.ops.attention import attention as attention_op
from dsv3fp8.ops.quantizers import LinearQuantizers
from dsv3fp8.precision.ledger import observe_ops

__all__ = ["compiled"]  # the fixture
V3 = (192, 128)


def run(tensors: list[Tensor], scale: float, documents: Tensor | None) -> list[Tensor]:
    """Output, lse and gradients by our kernels."""
    *qkv, dout = tensors
    out, lse = attention.attention_forward(*qkv, scale, documents)
    return [out, lse, *attention.attention_backward(dout, *qkv, out, lse, scale, documents)]


COMPILED = [(V3, 4096), (V3, 200), ((96, 64), 4096), ((40, 24), 200), ((24, 16), 4096), ((8, 2), 200)]


@pytest.mark.parametrize("isolated", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize(("widths", "length"), COMPILED, ids=str)
def test_nothing_spills_and_shared_memory_fits(
    widths: tuple[int, int], length: int, isolated: bool, compiled: list[Any], tmp_path: Path
) -> None:
    qk, v = (torch.zeros(1, length, 2, width).bfloat16() for width in widths)
    run([qk, qk, v, v], 0.1, torch.zeros(1, length, dtype=torch.int32) if isolated else None)
    assert len(compiled) == 4
    for kernel in compiled:
        used = resources(kernel, tmp_path)
        assert (used["STACK"], used["LOCAL"]) == (0, 0), kernel.metadata.name
        assert kernel.metadata.shared <= 227 * 1024
        products = "wgmma.mma_async.sync.aligned.m64" in kernel.asm["ptx"]
        assert products == (kernel.metadata.name != "_attention_rows_kernel")
        assert not re.search(r"\b(atom|red)\.", kernel.asm["ptx"])


def test_lengths_share_kernels(compiled: list[Any]) -> None:
    """One for whole blocks of keys, one for all others."""
    for length in (1, 100, 127, 128, 1000, 1024, 4096):
        x = torch.zeros(1, length, 2, 32).bfloat16()
        run([x] * 4, 0.1, None)
    assert len({id(kernel) for kernel in compiled}) == 5


def test_every_width_up_to_the_widest_is_taken(compiled: list[Any]) -> None:
    for qk in (1, 130):
        x, y = torch.zeros(1, 8, 1, qk).bfloat16(), torch.zeros(1, 8, 1, min(qk, 128)).bfloat16()
        run([x, x, y, y], 0.1, None)
    assert len(compiled) == 8
    assert attention.reason_against(torch.bfloat16, *V3) is None
    for widths in ((193, 128), (192, 129)):
        assert "heads of up to 192 and 128 values" in str(attention.reason_against(torch.bfloat16, *widths))


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


GPU = torch.device("cuda", 0)


def as_on(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    for room in (backend, choice):
        monkeypatch.setattr(room, "device_capability", lambda _: capability)


def test_cudnn_is_taken_for_plain_causal_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on(monkeypatch, (9, 0))
    taken = choice.choose(GPU, torch.bfloat16, V3, masked=False)
    assert str(taken) == "cudnn: cuDNN through PyTorch"
    assert choice.choose(GPU, torch.bfloat16, (300, 300), masked=False).backend == "cudnn"
    masked = choice.choose(GPU, torch.bfloat16, V3, masked=True)
    assert (masked.backend, masked.reason.startswith("isolated documents ")) == ("triton", True)
    for device, dtype, said in (
        (GPU, torch.float32, "take bf16, not float32"),
        (torch.device("cpu"), torch.bfloat16, "cpu: torch"),
    ):
        for isolated in (False, True):
            taken = choice.choose(device, dtype, V3, isolated)
            assert (taken.backend, said in taken.reason) == ("reference", True)


@pytest.mark.usefixtures("deterministic")
def test_deterministic_training_takes_our_kernels_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on(monkeypatch, (9, 0))
    taken = choice.choose(GPU, torch.bfloat16, V3, masked=False)
    assert str(taken).startswith("triton: training.deterministic=true: cuDNN's backward adds in whatever order")
    assert choice.choose(GPU, torch.bfloat16, V3, masked=True).backend == "triton"


@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.usefixtures("deterministic")
def test_the_reference_is_taken_with_both_reasons(isolated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    first = "isolated documents" if isolated else "training.deterministic=true"
    as_on(monkeypatch, (9, 0))
    wide = choice.choose(GPU, torch.bfloat16, (256, 256), isolated)
    assert (wide.backend, wide.reason.startswith(first)) == ("reference", True)
    assert "heads of up to 192 and 128 values, not 256 and 256" in wide.reason
    as_on(monkeypatch, (8, 0))
    old = choice.choose(GPU, torch.bfloat16, V3, isolated)
    assert (old.backend, old.reason.startswith(first), "sm_80" in old.reason) == ("reference", True, True)


def test_the_manifest_asks_with_the_widths_of_the_models_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def choose(device: torch.device, dtype: torch.dtype, widths: tuple[int, int], masked: bool) -> backend.Choice:
        asked.append((dtype, widths, masked))
        return backend.Choice("pretended", "")

    monkeypatch.setattr(choice, "choose", choose)
    config = load_config(["recipe=dsv3", "model=nano"])
    rows = dict(explain(config.recipe, torch.device("cpu"), None, True, (48, 32)))
    assert asked == [(torch.bfloat16, (48, 32), True)]
    assert rows["attention"].backend == "pretended"


def test_backward_runs_where_forward_ran_and_the_ledger_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever would be chosen by then."""
    ran = []

    class Kernels:
        @staticmethod
        def attention_forward(*given: Any) -> tuple[Tensor, Tensor]:
            ran.append("forward")
            return reference.attention_forward(*given)

        @staticmethod
        def attention_backward(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
            ran.append("backward")
            return reference.attention_backward(*given)

    monkeypatch.setattr(choice, "triton_kernels", lambda _: Kernels)
    monkeypatch.setattr(choice, "choose", lambda *_: backend.Choice("triton", "pretended"))
    given = load_config(["recipe=dsv3"]).recipe
    q, k, v = (torch.randn(1, 20, 2, width).bfloat16().requires_grad_() for width in (24, 24, 64))
    with observe_ops() as ledger:
        made = attention_op(q, k, v, 0.2, None, given, LinearQuantizers(given, "out"))
        monkeypatch.setattr(choice, "choose", lambda *_: backend.Choice("cudnn", "pretended"))
        made.edge.backward(torch.ones_like(made.edge))
    assert ran == ["forward", "backward"]
    assert [ledger.find("attention", column)[0].backend for column in ("forward", "backward")] == ["triton"] * 2


def test_attention_in_the_interpreter() -> None:
    run_interpreted("interpreted_attention.py")


def on_gpu(length: int, widths: tuple[int, int], batch: int = 2, heads: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    qk, v = widths
    return [torch.randn(batch, length, heads, width, generator=generator).bfloat16().cuda() for width in (qk, qk, v, v)]


@pytest.mark.gpu
@pytest.mark.parametrize("isolated", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize(("length", "widths"), [(2048, V3), (2000, V3), (300, (24, 16)), (129, (40, 24)), (1, V3)], ids=str)
def test_on_a_gpu_the_kernels_give_what_the_reference_gives(length: int, widths: tuple[int, int], isolated: bool) -> None:
    tensors, documents = on_gpu(length, widths), None
    if isolated:
        documents = (torch.arange(2 * length, device="cuda").view(2, length) // 300).int()
        documents[1, length // 2 :] = -1
    *qkv, dout = tensors
    scale = widths[0] ** -0.5
    got = run(tensors, scale, documents)
    out, lse = reference.attention_forward(*qkv, scale, documents)
    want = [out, lse, *reference.attention_backward(dout, *qkv, got[0], lse, scale, documents)]
    assert torch.equal(torch.isneginf(got[1]), torch.isneginf(lse))
    assert torch.allclose(got[1], lse, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip((got[0], *got[2:]), (want[0], *want[2:]), strict=True):
        assert torch.isfinite(ours).all()
        if documents is not None:
            assert torch.count_nonzero(ours[documents < 0]) == 0
        if length > 1:  # of one token the gradients of q and k are zeros, up to rounding
            assert relative(ours.float(), theirs.float()) < 2.0**-7
        assert (ours - theirs).abs().max() <= 0.02 * theirs.abs().max() + 1e-5


@pytest.mark.gpu
def test_on_a_gpu_the_kernels_are_as_close_to_the_reference_as_cudnn() -> None:
    tensors, scale = on_gpu(2048, V3), 192**-0.5
    *qkv, dout = tensors
    wide = [x.float() for x in tensors]
    exact, exact_lse = reference.attention_forward(*wide[:3], scale, None)
    want = [exact, *reference.attention_backward(wide[3], *wide[:3], exact, exact_lse, scale, None)]
    out, _, *gradients = run(tensors, scale, None)
    theirs, lse = cudnn.attention_forward(*qkv, scale)
    beside = [theirs, *cudnn.attention_backward(dout, *qkv, theirs, lse, scale)]
    for ours, other, true in zip([out, *gradients], beside, want, strict=True):
        assert relative(ours.float(), true) < 2 * relative(other.float(), true)


@pytest.mark.gpu
@pytest.mark.parametrize("isolated", [False, True], ids=["causal", "documents"])
def test_on_a_gpu_repeats_have_the_same_bits(isolated: bool) -> None:
    """At a size at which many programs run at once."""
    tensors = on_gpu(2048, V3, batch=4, heads=16)
    documents = (torch.arange(4 * 2048, device="cuda").view(4, 2048) // 700).int() if isolated else None
    first = run(tensors, 192**-0.5, documents)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, run(tensors, 192**-0.5, documents), strict=True))


@pytest.mark.gpu
def test_on_a_gpu_offsets_beyond_two_billion_elements_are_reached() -> None:
    """q and k of one window, laid out so that its last tokens lie beyond 2^31 elements."""
    length, apart = 300, 2**31 // 256
    q, k, v, dout = on_gpu(length, (24, 16), batch=1, heads=1)
    far = torch.empty((length - 1) * apart + 24, dtype=torch.bfloat16, device="cuda").as_strided(
        (1, length, 1, 24), (1, apart, 1, 1)
    )
    want = run([q, k, v, dout], 0.2, None)
    for which in range(2):
        far.copy_((q, k)[which])
        got = run([far, k, v, dout] if which == 0 else [q, far, v, dout], 0.2, None)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
