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


def types(name: str, once: bool, a: str, b: str) -> dict[str, str]:
    """Types of a kernel's arguments where they are no int32. a, b: of the codes."""
    if name == "rows":
        return {
            "a": descriptor(a, (128, 128), grouped.CODES),
            "b": descriptor(b, (rows.TILE_N, 128), grouped.CODES),
            "out": descriptor("bf16", (64, 64), grouped.BF16_OUT),
            "groups": "*i64",
            "a_scale": "*fp32",
            "b_scale": "*fp32",
        }
    return {
        "dy": descriptor(a, (128, 128), grouped.CODES),
        "x": descriptor(b, (wgrad.TILE_K, 128), grouped.CODES),
        "out": descriptor("fp32", (64, 32), grouped.FP32_OUT),
        "dy_scale": "*fp32" if once else f"tensordesc<fp32[128],{grouped.SCALES!r}>",
        "x_scale": "*fp32" if once else f"tensordesc<fp32[{wgrad.TILE_K}],{grouped.SCALES!r}>",
        "out_ptr": "*fp32",
        "starts": "*i32",
    }


KERNELS = {"rows": (rows.rows_kernel, rows.OPTIONS), "wgrad": (wgrad.wgrad_kernel, wgrad.OPTIONS)}
FORMATS = {"fp8e4nv": "e4m3", "fp8e5": "e5m2"}
CASES = {  # the flags of each kernel, and the formats of its operands
    f"{name} {' '.join(f'{flag}={value}' for flag, value in flags.items())} {a} {b}": (name, flags, a, b)
    for name, flags, a, b in [
        ("rows", {"GROUPED": False, "A_TILE": 1, "ONCE": False}, "fp8e4nv", "fp8e4nv"),
        ("rows", {"GROUPED": True, "A_TILE": 1, "ONCE": False}, "fp8e4nv", "fp8e4nv"),
        ("rows", {"GROUPED": True, "A_TILE": 128, "ONCE": False}, "fp8e5", "fp8e4nv"),
        ("rows", {"GROUPED": True, "A_TILE": 1, "ONCE": True}, "fp8e4nv", "fp8e4nv"),
        ("rows", {"GROUPED": True, "A_TILE": 128, "ONCE": True}, "fp8e5", "fp8e4nv"),
        ("wgrad", {"ADD": False, "ONCE": False}, "fp8e4nv", "fp8e4nv"),
        ("wgrad", {"ADD": True, "ONCE": False}, "fp8e5", "fp8e4nv"),
        ("wgrad", {"ADD": False, "ONCE": True}, "fp8e4nv", "fp8e4nv"),
        ("wgrad", {"ADD": True, "ONCE": True}, "fp8e4nv", "fp8e4nv"),
    ]
}


def compiled(name: str, flags: dict[str, Any], a: str, b: str) -> Any:
    """The kernel as a launch compiles it: pointers to multiples of 16 bytes, no integer specialized."""
    kernel, options = KERNELS[name]
    names, known = kernel.arg_names, types(name, flags["ONCE"], a, b)
    signature = {n: "constexpr" if n in flags else known.get(n, "i32") for n in names}
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n, t in known.items() if t.startswith("*")}
    constants = {(names.index(flag),): value for flag, value in flags.items()}
    source = GluonASTSource(kernel, signature, constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize("case", CASES)
def test_it_runs_on_tensor_cores_without_spills_in_the_memory_there_is(case: str, tmp_path: Path) -> None:
    name, flags, a, b = CASES[case]
    built = compiled(name, flags, a, b)
    assert built.metadata.shared <= SHARED_MEMORY
    ptx = built.asm["ptx"]
    wgmma = re.findall(rf"wgmma\.mma_async\.sync\.aligned\.m64n128k32\.f32\.{FORMATS[a]}\.{FORMATS[b]}", ptx)
    assert len(wgmma) % (2 * 4) == 0  # in both warp groups, steps of 32 codes in a block of 128
    assert len(wgmma) > 0
    assert "wgmma.wait_group.sync.aligned 1" in ptx  # a block is in flight while another is promoted
    assert re.search(r"cp\.async\.bulk\.tensor\.2d\.shared::\w+\.global", ptx)  # TMA in
    assert re.search(r"cp\.async\.bulk\.tensor\.2d\.global\.shared::cta", ptx)  # and out
    assert len(re.findall(r"setmaxnreg\.(?:inc|dec)", ptx)) >= 2
    assert "atom.global" not in ptx
    (tmp_path / "kernel.ptx").write_text(ptx, encoding="utf-8")
    command = [BINARIES / "ptxas", "-v", "--gpu-name=sm_90a", tmp_path / "kernel.ptx", "-o", tmp_path / "kernel.cubin"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in said, said
    assert "C75" not in said, said  # ptxas serializes wgmma, or ignores setmaxnreg
