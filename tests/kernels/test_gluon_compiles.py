"""The Gluon kernels compiled for Hopper, without a GPU: tensor core instructions, no spills, room in shared memory."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", minversion="3.6")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from dsv3fp8.kernels.gemm.gluon import grouped, rows, wgrad  # noqa: E402

BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHARED_MEMORY = 227 * 1024  # bytes that a block of threads may have


def descriptor(dtype: str, box: tuple[int, int], layout: Any) -> str:
    return f"tensordesc<{dtype}[{box[0]}, {box[1]}],{layout!r}>"


OPERAND = descriptor("fp8e4nv", (128, 128), grouped.CODES)
KERNELS = {  # kernel, its options, types of its arguments where they are no int32, its flag and the values of it
    "rows": (
        rows.rows_kernel,
        rows.OPTIONS,
        {
            "a": OPERAND,
            "b": descriptor("fp8e4nv", (rows.TILE_N, 128), grouped.CODES),
            "out": descriptor("bf16", (64, 64), grouped.BF16_OUT),
            "groups": "*i64",
            "a_scale": "*fp32",
            "b_scale": "*fp32",
        },
        "GROUPED",
    ),
    "wgrad": (
        wgrad.wgrad_kernel,
        wgrad.OPTIONS,
        {
            "dy": OPERAND,
            "x": descriptor("fp8e4nv", (wgrad.TILE_K, 128), grouped.CODES),
            "out": descriptor("fp32", (64, 32), grouped.FP32_OUT),
            "dy_scale": f"tensordesc<fp32[128],{grouped.SCALES!r}>",
            "x_scale": f"tensordesc<fp32[{wgrad.TILE_K}],{grouped.SCALES!r}>",
            "out_ptr": "*fp32",
            "starts": "*i32",
        },
        "ADD",
    ),
}


def compiled(name: str, flag: bool) -> Any:
    """The kernel as a launch compiles it: pointers to multiples of 16 bytes, no integer specialized."""
    kernel, options, types, flag_name = KERNELS[name]
    names = kernel.arg_names
    signature = {n: "constexpr" if n == flag_name else types.get(n, "i32") for n in names}
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n, t in types.items() if t.startswith("*")}
    source = GluonASTSource(kernel, signature, {(names.index(flag_name),): flag}, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("name", KERNELS)
def test_it_runs_on_tensor_cores_without_spills_in_the_memory_there_is(name: str, flag: bool, tmp_path: Path) -> None:
    built = compiled(name, flag)
    assert built.metadata.shared <= SHARED_MEMORY
    ptx = built.asm["ptx"]
    wgmma = re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n128k32\.f32\.e4m3\.e4m3", ptx)
    assert len(wgmma) % (2 * 4) == 0  # in both warp groups, steps of 32 codes in a block of 128
    assert len(wgmma) > 0
    assert "wgmma.wait_group.sync.aligned 1" in ptx  # a block is in flight while another is promoted
    assert re.search(r"cp\.async\.bulk\.tensor\.2d\.shared::\w+\.global", ptx)  # TMA in
    assert re.search(r"cp\.async\.bulk\.tensor\.2d\.global\.shared::cta", ptx)  # and out
    assert len(re.findall(r"setmaxnreg\.(?:inc|dec)", ptx)) >= 2
    assert "atom.global" not in ptx
    (tmp_path / "kernel.ptx").write_text(ptx, encoding="utf-8")
    extra = KERNELS[name][1].get("ptx_options", "").split()
    command = [BINARIES / "ptxas", "-v", *extra, "--gpu-name=sm_90a", tmp_path / "kernel.ptx", "-o", tmp_path / "kernel.cubin"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in said, said
    assert "C75" not in said, said  # ptxas serializes wgmma, or ignores setmaxnreg
