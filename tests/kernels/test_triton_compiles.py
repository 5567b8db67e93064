"""The Triton kernels compiled for Hopper, without a GPU, by real launches: tensor cores, no spills, exact arithmetic."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", minversion="3.6")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from dsv3fp8.kernels.gemm import triton as gemm  # noqa: E402
from dsv3fp8.kernels.quantize import reference  # noqa: E402
from dsv3fp8.kernels.quantize import triton as kernels  # noqa: E402
from dsv3fp8.precision.formats import E4M3, E5M2, E5M6  # noqa: E402
from dsv3fp8.precision.tiles import BLOCK_128, COLUMN_128, ROW_128, Tile  # noqa: E402

BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
ROW, TENSOR = Tile(1, None), Tile(None, None)


class Hopper:
    """What Triton asks of a driver to compile a launch, and no more."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> str:
        return "compiled for, not run"

    def get_current_stream(self, _device: str) -> int:
        return 0


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Launches compile and do not run; the compiled kernels are in this list."""
    kernels_of_launches: list[Any] = []

    def launch(kernel: JITFunction, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: kernels_of_launches.append(kernel.run(*args, grid=grid, warmup=True, **options))

    monkeypatch.setattr(JITFunction, "__getitem__", launch)
    monkeypatch.setattr(driver, "_active", Hopper())
    return kernels_of_launches


def resources(kernel: Any, folder: Path) -> dict[str, int]:
    """Registers, stack and local memory of the machine code, in what `cuobjdump` calls them."""
    (folder / "kernel.cubin").write_bytes(kernel.asm["cubin"])
    command = [BINARIES / "cuobjdump", "-res-usage", folder / "kernel.cubin"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", text)}


CASTS = {
    "1x128": lambda x: kernels.quantize(x, E4M3, ROW_128),
    "128x1": lambda x: kernels.quantize(x, E4M3, COLUMN_128, "pow2"),
    "128x1 of FP32": lambda x: kernels.quantize(x.float(), E4M3, COLUMN_128),
    "1x128 and 128x1": lambda x: kernels.quantize_both(x, E4M3, col_parts=2),
    "128x128": lambda x: kernels.quantize(x.float(), E4M3, BLOCK_128, row_parts=2),
    "128x128 and transposed": lambda x: kernels.quantize_mirrored(x.float(), E4M3, row_parts=2),
    "E5M2": lambda x: kernels.quantize(x, E5M2, ROW_128),
    "E5M6": lambda x: kernels.quantize(x, E5M6, ROW_128, "pow2"),
    "re-tile": lambda x: kernels.retile(reference.quantize(x, E4M3, ROW_128), COLUMN_128),
    "re-tile E5M6": lambda x: kernels.retile(reference.quantize(x, E5M6, ROW_128, "pow2"), COLUMN_128, fmt=E4M3),
    "re-tile E5M6 to 1x128": lambda x: kernels.retile(reference.quantize(x, E5M6, ROW_128, "pow2"), ROW_128, fmt=E4M3),
}
LOADS = {"re-tile": "v2.b32", "re-tile E5M6": "b32", "re-tile E5M6 to 1x128": "b32"}  # of 16 bytes unless said


@pytest.mark.parametrize("case", CASTS)
@pytest.mark.parametrize("shape", [(256, 512), (208, 576)], ids=["whole tiles", "tail tiles"])
def test_casts_divide_and_round_as_ieee_has_it(case: str, shape: tuple[int, int], compiled: list[Any], tmp_path: Path) -> None:
    CASTS[case](torch.randn(shape).bfloat16())
    (kernel,) = compiled
    used, ptx = resources(kernel, tmp_path), kernel.asm["ptx"]
    assert (used["STACK"], used["LOCAL"]) == (0, 0)
    # Quotients are IEEE's by correction (kernels/quantize/device.py): no approximate division, and fma only there and where
    # E5M6 is rounded.
    assert set(re.findall(r"\bdiv[.\w]*\.f32|\brcp[.\w]*", ptx)) == {"rcp.approx.ftz.f32"}
    assert set(re.findall(r"[.\w]+\.ftz\.f32", ptx)) == {"rcp.approx.ftz.f32"}
    approximate, corrections = ptx.count("rcp.approx.ftz.f32"), len(re.findall(r"\bfma\.rn\.f32", ptx))
    corrections -= 2 * len(re.findall(r"\bcvt\.rn\.f16x2\.f32", ptx)) * 2  # two of each of two numbers
    assert corrections in (2 * approximate, 4 * approximate)  # of the reciprocal, and of amax / max where scales are fp32
    assert re.search(rf"\bld\.global\.{LOADS.get(case, 'v4.b32')}", ptx)
    assert not re.search(r"\b(ld|st)\.global\.(v\d\.)?b(8|16)\b", ptx)


@pytest.mark.parametrize("tile", [ROW, ROW.transposed(), TENSOR], ids=str)
@pytest.mark.parametrize("shape", [(256, 512), (208, 576)], ids=["whole tiles", "tail tiles"])
def test_wide_casts_read_twice_and_do_not_spill(
    tile: Tile, shape: tuple[int, int], compiled: list[Any], tmp_path: Path
) -> None:
    kernels.quantize(torch.randn(shape).bfloat16(), E4M3, tile)
    assert len(compiled) == 2
    for kernel in compiled:
        used = resources(kernel, tmp_path)
        assert (used["STACK"], used["LOCAL"]) == (0, 0)
        assert re.search(r"\bld\.global\.v4\.b32", kernel.asm["ptx"])


def test_codes_of_an_expert_are_cast_again_without_spills(compiled: list[Any], tmp_path: Path) -> None:
    kept, groups = reference.quantize(torch.randn(256, 512), E4M3, ROW_128), torch.zeros(2, dtype=torch.int64)
    for tile in (ROW.transposed(), TENSOR):
        kernels.retile(kept, tile, groups=groups)
    assert len(compiled) == 4
    for kernel in compiled:
        used = resources(kernel, tmp_path)
        assert (used["STACK"], used["LOCAL"]) == (0, 0)


def test_decoding_reads_and_writes_words(compiled: list[Any], tmp_path: Path) -> None:
    for fmt, load in ((E4M3, "v2.b32"), (E5M6, "b32")):
        kernels.decode(reference.quantize(torch.randn(200, 576), fmt, ROW_128, "pow2"), torch.bfloat16)
        kernel = compiled.pop()
        used, ptx = resources(kernel, tmp_path), kernel.asm["ptx"]
        assert (used["STACK"], used["LOCAL"]) == (0, 0)
        assert re.search(rf"\bld\.global\.{load}", ptx)
        assert re.search(r"\bst\.global\.v4\.b32", ptx)


@pytest.mark.parametrize("case", ["128x1", "1x128 and 128x1", "E5M6", "re-tile", "re-tile E5M6"])
def test_odd_sizes_compile_without_spills(case: str, compiled: list[Any], tmp_path: Path) -> None:
    CASTS[case](torch.randn(202, 406).bfloat16())
    used = resources(compiled[0], tmp_path)
    assert (used["STACK"], used["LOCAL"]) == (0, 0)


GEMMS = {  # tiles of a and of b, promotion, output, parts of b
    "fprop": (ROW_128, BLOCK_128, 128, torch.bfloat16, {}),
    "wgrad": (ROW_128, ROW_128, 128, torch.float32, {}),
    "weights 1x128": (ROW_128, ROW_128, 128, torch.bfloat16, {}),
    "every 64": (ROW_128, BLOCK_128, 64, torch.bfloat16, {}),
    "every 32": (ROW_128, BLOCK_128, 32, torch.bfloat16, {}),
    "wgrad every 32": (ROW_128, ROW_128, 32, torch.float32, {}),
    "halves": (ROW_128, BLOCK_128, 128, torch.bfloat16, {"row_parts": 2}),
    "rowwise every 128": (ROW, ROW, 128, torch.bfloat16, {}),
    "rowwise every 256": (ROW, ROW, 256, torch.bfloat16, {}),
    "rowwise never": (ROW, ROW, "never", torch.bfloat16, {}),
    "tensorwise never": (TENSOR, TENSOR, "never", torch.float32, {}),
}
CHAIN_ENDS = {32: 4, 64: 2, 128: 1}  # in a block of 128


@pytest.mark.parametrize("case", GEMMS)
def test_gemms_run_on_tensor_cores_and_promote_as_asked(case: str, compiled: list[Any], tmp_path: Path) -> None:
    left, right, promote, dtype, parts = GEMMS[case]
    k = 576 if case in ("fprop", "every 32") else 512
    a = reference.quantize(torch.randn(256, k), E5M2 if case == "wgrad" else E4M3, left)
    b = reference.quantize(torch.randn(400, k), E4M3, right, **parts)
    gemm.matmul_nt(a, b, dtype, promote)
    (kernel,) = compiled
    used, ptx = resources(kernel, tmp_path), kernel.asm["ptx"]
    assert (used["STACK"], used["LOCAL"]) == (0, 0)
    steps = re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k32\.f32\.(e\dm\d)\.(e\dm\d)", ptx)
    assert len(steps) == 4  # of 32 codes in a block of 128
    (columns, *formats), *_ = set(steps)
    assert formats == [a.format.name, b.format.name]
    a_thread = 64 * int(columns) // 128  # sums of one thread of a warp group
    adds, fmas = (len(re.findall(rf"\b{name}\.rn\.f32", ptx)) for name in ("add", "fma"))
    if left.cols is None:
        ends = 0 if promote == "never" else CHAIN_ENDS.get(promote, 1)
        assert (adds, fmas) == (ends * a_thread, 0)
    else:
        assert (adds, fmas) == ((CHAIN_ENDS[promote] - 1) * a_thread, a_thread)


def test_numbers_of_rows_share_kernels(compiled: list[Any]) -> None:
    """Of activations, expert loads and gradients: one kernel for whole blocks, one for all others."""
    for rows in (1, 2, 127, 128, 1000, 1024):
        x = torch.randn(rows, 640)
        kernels.quantize(x, E4M3, ROW_128)
        a, b = reference.quantize(x, E4M3, ROW_128), reference.quantize(torch.randn(400, 640), E4M3, BLOCK_128)
        gemm.matmul_nt(a, b, torch.bfloat16, 128)
    assert len({id(kernel) for kernel in compiled}) == 3
