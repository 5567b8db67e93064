"""The experts' GEMMs in BF16: compiled for Hopper without a GPU, and against a product per expert on one.

Triton's interpreter multiplies no BF16, so that only a GPU shows what they compute.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", minversion="3.6")

from test_triton_compiles import compiled, resources

from dsv3fp8.kernels.gemm.bf16 import triton as grouped_bf16

__all__ = ["compiled"]  # the fixture


@pytest.mark.parametrize(("n", "k"), [(1024, 512), (48, 80)])
def test_wgrad_runs_on_tensor_cores_without_spills(n: int, k: int, compiled: list[Any], tmp_path: Path) -> None:
    blocks = torch.zeros(4, dtype=torch.int32)
    grouped_bf16.grouped_wgrad(torch.zeros(256, n).bfloat16(), torch.zeros(256, k).bfloat16(), blocks)
    (kernel,) = compiled
    used = resources(kernel, tmp_path)
    assert (used["STACK"], used["LOCAL"]) == (0, 0)
    assert re.search(r"wgmma\.mma_async\.sync\.aligned\.m64n256k16\.f32\.bf16\.bf16", kernel.asm["ptx"])


@pytest.mark.parametrize(
    ("a", "b", "gemm", "dtype", "reason"),
    [
        ((256, 64), (2, 48, 64), "fprop", torch.bfloat16, None),
        ((256, 64), (256, 48), "wgrad", torch.float32, None),
        ((256, 64), (256, 40), "wgrad", torch.float32, "multiples of 16, not 64 and 40"),
        ((256, 64), (2, 40, 64), "dgrad", torch.bfloat16, "multiples of 16, not 64 and 40"),
        ((256, 64), (2, 48, 64), "fprop", torch.float32, "gives bf16, and wgrad fp32, not float32"),
    ],
)
def test_what_one_launch_takes(
    a: tuple[int, ...], b: tuple[int, ...], gemm: str, dtype: torch.dtype, reason: str | None
) -> None:
    x, y = torch.empty(a, dtype=torch.bfloat16), torch.empty(b, dtype=torch.bfloat16)
    against = grouped_bf16.reason_against(x, y, dtype, gemm)
    assert against is None if reason is None else reason in (against or "")
    assert grouped_bf16.reason_against(x.float(), y, dtype, gemm) is not None


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(1024, 512), (48, 80)])
@pytest.mark.parametrize("counts", [[2, 0, 3], [0, 0, 0], [1, 7, 0]])
def test_on_a_gpu_groups_are_multiplied_apart(n: int, k: int, counts: list[int]) -> None:
    """Empty groups, and rows that belong to none: zeros there, whatever lay in memory. Two runs give equal bits."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").bfloat16()

    rows, experts = 128 * (sum(counts) + 2), len(counts)
    blocks = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    x, dy, weights = draw(rows, k), draw(rows, n), draw(experts, n, k)
    ends = [128 * int(end) for end in blocks]
    torch.full((2 * rows, max(n, k)), torch.nan, device="cuda")
    for a, w in ((x, weights), (dy, weights.mT)):
        got = grouped_bf16.grouped_rows(a, w, blocks)
        assert torch.equal(got, grouped_bf16.grouped_rows(a, w, blocks))
        assert not got[ends[-1] :].any()
        for e in range(experts):
            part = slice(ends[e], ends[e + 1])
            torch.testing.assert_close(got[part].float(), a[part].float() @ w[e].float().mT, rtol=0.02, atol=0.1)
    got = grouped_bf16.grouped_wgrad(dy, x, blocks)
    want = torch.stack([dy[ends[e] : ends[e + 1]].float().mT @ x[ends[e] : ends[e + 1]].float() for e in range(experts)])
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-2)
    assert torch.equal(got, grouped_bf16.grouped_wgrad(dy, x, blocks))
