"""The kernels outside the layers: compiled for Hopper, on a GPU, and in the interpreter.

The interpreter runs interpreted_outer.py in a process of its own, because TRITON_INTERPRET=1 holds for a whole process.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", minversion="3.6")

from interpreter import run_interpreted
from test_triton_compiles import compiled, resources

from dsv3fp8.kernels.cross_entropy import reference as cross_entropy_reference
from dsv3fp8.kernels.cross_entropy import triton as cross_entropy
from dsv3fp8.kernels.cross_entropy.reference import IGNORED
from dsv3fp8.kernels.embedding import reference as embedding_reference
from dsv3fp8.kernels.embedding import triton as embedding
from dsv3fp8.kernels.optimizer import reference as optimizer_reference
from dsv3fp8.kernels.optimizer import triton as optimizer

__all__ = ["compiled"]  # the fixture


def launches(width: int) -> dict[str, Callable[[], object]]:
    """Every kernel, at a vocabulary or a width."""
    logits, targets, per_row = torch.zeros(8, width), torch.zeros(8, dtype=torch.int64), torch.zeros(8)
    ids, x, weight = torch.zeros(64, dtype=torch.int64), torch.zeros(64, width).bfloat16(), torch.zeros(16, width)
    return {
        "cross-entropy": lambda: cross_entropy.forward(logits, targets),
        "cross-entropy backward": lambda: cross_entropy.backward(logits, per_row, targets, per_row, torch.bfloat16),
        "embedding": lambda: embedding.forward(ids, weight, torch.bfloat16),
        "embedding backward": lambda: embedding.backward(ids, x, 16),
    }


@pytest.mark.parametrize("width", [1, 200, 1024, 32000])
@pytest.mark.parametrize("case", launches(1))
def test_nothing_spills_and_wide_rows_are_read_in_vectors(case: str, width: int, compiled: list[Any], tmp_path: Path) -> None:
    launches(width)[case]()
    assert len(compiled) == (2 if case == "embedding backward" else 1)
    for kernel in compiled:
        used = resources(kernel, tmp_path)
        assert (used["STACK"], used["LOCAL"]) == (0, 0)
        if width % 16 == 0:
            assert re.search(r"\bld\.global\.v4\.b32", kernel.asm["ptx"])


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_adamw_spills_nothing_and_divides_and_takes_roots_as_ieee_has_it(
    moments: torch.dtype, compiled: list[Any], tmp_path: Path
) -> None:
    w, m = torch.zeros(5000), torch.zeros(5000, dtype=moments)
    tensors = optimizer.Tensors([5000], [True], w.device)
    optimizer.update(tensors, [w], [w], [m], [m], torch.zeros(5), (0.9, 0.95), 1e-8)
    (kernel,) = compiled
    used, ptx = resources(kernel, tmp_path), kernel.asm["ptx"]
    assert (used["STACK"], used["LOCAL"]) == (0, 0)
    assert set(re.findall(r"\b(?:div|sqrt)\.\w+", ptx)) == {"div.rn", "sqrt.rn"}
    assert re.search(r"\bld\.global\.v4\.b32", ptx)


@pytest.mark.gpu
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.25, 0.999)])
def test_on_a_gpu_adamw_is_torchs_operations_to_the_bit(moments: torch.dtype, betas: tuple[float, float]) -> None:
    """Weights and moments of ordinary sizes, and gradients from 1e-12 to 1e12."""
    sizes, decayed, steps = [3, 1 << 20, (1 << 20) + 5], [True, False, True], 3

    def draw() -> list[torch.Tensor]:
        return [torch.randn(size, device="cuda") for size in sizes]

    weights, first = draw(), [t.to(moments) for t in draw()]
    gradients = [t * torch.exp(8 * torch.randn_like(t)) for t in draw()]
    second = [(t * t).to(moments) for t in draw()]
    want = [[t.clone() for t in group] for group in (weights, first, second)]
    factor, lr, decay, eps = torch.tensor(0.3, device="cuda", dtype=torch.float64), 1e-2, 0.1, 1e-8
    tensors = optimizer.Tensors(sizes, decayed, torch.device("cuda"))
    root, rate = (1 - betas[1] ** steps) ** 0.5, -lr / (1 - betas[0] ** steps)
    scalars = torch.tensor([1.0, float(factor), 1 - lr * decay, 1 / root, rate], device="cuda")
    optimizer.update(tensors, weights, gradients, first, second, scalars, betas, eps)
    for i in range(len(sizes)):
        rates = optimizer_reference.Rates(lr, decay if decayed[i] else 0.0, betas, eps, steps)
        scaled = torch._foreach_mul([gradients[i]], float(factor))
        optimizer_reference.update([want[0][i]], scaled, [want[1][i]], [want[2][i]], rates)
    for name, ours, theirs in zip(("weights", "first", "second"), (weights, first, second), want, strict=True):
        differing = [int((a != b).sum()) for a, b in zip(ours, theirs, strict=True)]
        assert differing == [0, 0, 0], name


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (5, 200), (300, 32000), (7, 129280)])
def test_on_a_gpu_cross_entropy_is_the_reference(rows: int, cols: int) -> None:
    """Backward to the bit, forward but for the order of its sum, and both alike in two runs."""
    logits, targets = 4 * torch.randn(rows, cols, device="cuda"), torch.randint(cols, (rows,), device="cuda")
    targets[rows // 2] = IGNORED
    loss, lse = cross_entropy.forward(logits, targets)
    want_loss, want_lse = cross_entropy_reference.forward(logits.double(), targets)
    assert torch.allclose(lse.double(), want_lse, rtol=1e-6, atol=1e-6)
    assert torch.allclose(loss.double(), want_loss, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip((loss, lse), cross_entropy.forward(logits, targets), strict=True))
    for dtype in (torch.bfloat16, torch.float32):
        for dloss in (torch.tensor(0.3, device="cuda").expand(rows), torch.randn(rows, device="cuda")):
            got, want = (k.backward(logits, lse, targets, dloss, dtype) for k in (cross_entropy, cross_entropy_reference))
            assert torch.equal(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("repeated", [False, True])
def test_on_a_gpu_the_embedding_is_the_reference(repeated: bool) -> None:
    weight = torch.randn(1000, 328, device="cuda")
    ids = torch.randint(3 if repeated else 1000, (5000,), device="cuda")
    dx = torch.randn(5000, 328, device="cuda").bfloat16()
    got, want = (k.forward(ids, weight, torch.bfloat16) for k in (embedding, embedding_reference))
    assert torch.equal(got, want)
    got = embedding.backward(ids, dx, 1000)
    assert torch.equal(got, embedding.backward(ids, dx, 1000))
    want = embedding_reference.backward(ids, dx.double(), 1000)
    assert torch.allclose(got.double(), want, rtol=1e-5, atol=1e-4)
    assert torch.equal(got == 0, want == 0)


def test_kernels_in_the_interpreter() -> None:
    run_interpreted("interpreted_outer.py")
