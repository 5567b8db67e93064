"""The compiled emulator: where it cannot be made the torch definition runs, and the choice says why."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import recipe

from dsv3fp8.kernels import backend
from dsv3fp8.kernels.backend import Choice, choose_gemm
from dsv3fp8.kernels.compiled import compiled
from dsv3fp8.kernels.gemm import emulated
from dsv3fp8.kernels.quantize.reference import quantize
from dsv3fp8.precision import accumulator
from dsv3fp8.precision.formats import E4M3, E5M2
from dsv3fp8.precision.recipe import GemmSpec
from dsv3fp8.precision.tiles import BLOCK_128, ROW_128, QuantizedTensor, Tile

CPU = torch.device("cpu")
SOURCE = Path(emulated.__file__).with_suffix(".c")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of its own, and no memory of an earlier library."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compiled.cache_clear()
    yield tmp_path / "cache" / "dsv3fp8" / "kernels"
    compiled.cache_clear()


def operands(tile: Tile = BLOCK_128) -> tuple[QuantizedTensor, QuantizedTensor]:
    x, w = (torch.randn(rows, 200, generator=torch.Generator().manual_seed(rows)) for rows in (5, 130))
    return quantize(x, E4M3, ROW_128 if tile is BLOCK_128 else tile), quantize(w, E4M3, tile)


def a_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / "mycc"
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    monkeypatch.setenv("CC", str(path))


def test_it_compiles_once_and_leaves_one_whole_library(cache: Path) -> None:
    assert emulated.reason_against_compiled(CPU) is None
    (library,) = cache.iterdir()
    assert library.suffix == ".so"
    before = library.stat().st_mtime_ns
    compiled.cache_clear()
    assert emulated.reason_against_compiled(CPU) is None
    assert library.stat().st_mtime_ns == before


def test_processes_that_start_at_once_find_each_a_whole_library(cache: Path) -> None:
    code = "import torch; from dsv3fp8.kernels.gemm.emulated import reason_against_compiled as r; print(r(torch.device('cpu')))"
    started = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate(timeout=120)[0].strip() for process in started] == ["None"] * 3
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("kept", [0, 1000, 4096, 9000, -1])
def test_a_library_that_was_cut_short_is_compiled_again(kept: int, cache: Path) -> None:
    """In a process of its own: loading such a file ends with SIGBUS."""
    assert emulated.reason_against_compiled(CPU) is None
    (library,) = cache.iterdir()
    whole = library.read_bytes()
    # Unlinked first: this process runs the code of the old file.
    library.unlink()
    library.write_bytes(whole[:kept])
    code = "import torch; from dsv3fp8.kernels.gemm.emulated import reason_against_compiled as r; print(r(torch.device('cpu')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "None"), done.stderr
    assert len(library.read_bytes()) == len(whole)


def test_a_compiler_may_come_with_options(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "cc -g0")
    assert emulated.reason_against_compiled(CPU) is None
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("lacking", ["compiler", "a compiler that works", "a cache to write to", "a library that loads"])
def test_what_a_machine_lacks_is_said_and_the_torch_definition_runs(
    lacking: str, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if lacking == "compiler":
        monkeypatch.setenv("CC", "no-such-cc")
        reason = "there is no C compiler (no-such-cc)"
    elif lacking == "a compiler that works":
        a_compiler(
            tmp_path / "bin", monkeypatch, '[ "$1" = --version ] && exit 0\necho "x.c:1: error: no such thing" >&2; exit 1'
        )
        reason = "failed: x.c:1: error: no such thing"
    elif lacking == "a cache to write to":
        cache.parent.parent.write_text("a file", encoding="utf-8")
        reason = "the compiled kernel cannot be kept or loaded"
    else:
        a_compiler(
            tmp_path / "bin", monkeypatch, '[ "$1" = --version ] && exit 0\nwhile [ "$1" != -o ]; do shift; done; echo x >"$2"'
        )
        reason = "the compiled kernel cannot be kept or loaded"
    a, b = operands()
    choice = choose_gemm(a, b, recipe("dsv3", "accumulator=hopper").linear("out"), torch.float32)
    assert choice.backend == "emulated"
    assert choice.exact
    assert reason in choice.reason
    assert "in torch, slowly" in choice.reason
    assert "\n" not in choice.reason
    assert torch.equal(emulated.block_scaled(a, b, 128), accumulator.block_scaled(a, b, 128))
    assert torch.equal(emulated.products(a.codes, b.codes, 64), accumulator.products(a.codes, b.codes, 64))
    left_over = [path.name for path in cache.iterdir() if path.name.startswith(".")] if cache.is_dir() else []
    assert left_over == []


def test_the_job_has_the_same_fields_in_c_and_in_python() -> None:
    """In the same order: ctypes would not notice."""
    text = SOURCE.read_text(encoding="utf-8")
    struct = re.sub(r"/\*.*?\*/", "", text[text.index("typedef struct {\n    int64_t m") : text.index("} job;")], flags=re.S)
    declared = [name for line in struct.split(";") for name in re.findall(r"\*?(\w+)(?=,|$)", line.strip())]
    assert declared == [name for name, _ in emulated._Job._fields_]


CHOICES = {  # accumulator and promotion, tiles -> backend, exact
    "plain sums unless asked": (("dsv3",), BLOCK_128, "reference", False),
    "plain sums when asked": (("dsv3", "accumulator=fp32"), BLOCK_128, "reference", False),
    "the tensor core's": (("dsv3", "accumulator=hopper"), BLOCK_128, "emulated", True),
    "its short chains": (("dsv3", "accumulator=hopper", "promote_every=32"), BLOCK_128, "emulated", True),
    "its long chain": (("no_promotion",), Tile(1, None), "emulated", True),
}


@pytest.mark.parametrize("case", CHOICES)
def test_the_choice_on_a_cpu(case: str) -> None:
    named, tile, taken, exact = CHOICES[case]
    a, b = operands(tile)
    spec = recipe(*named).linear("out")
    choice = choose_gemm(a, b, spec, torch.float32)
    assert (choice.backend, choice.exact) == (taken, exact)
    assert str(choice).endswith("; to the bit") == exact
    if exact:
        said = "never promoted" if spec.promote_every == "never" else f"promoted every {spec.promote_every}"
        assert said in choice.reason
    for dtype in (torch.float32, torch.bfloat16):
        got = backend.matmul_nt(a, b, dtype, spec, "fprop")
        want = accumulator.block_scaled(a, b, spec.promote_every) if exact else a.decode() @ b.decode().mT
        assert got.dtype == dtype
        assert torch.equal(got, want.to(dtype)) if exact else torch.allclose(got.float(), want, rtol=1e-2, atol=1e-2)


def test_one_plain_operand_takes_the_reference_and_says_so() -> None:
    a, b = operands()
    spec = recipe("dsv3", "accumulator=hopper").linear("out")
    for left, right in ((a.decode(), b), (a, b.decode())):
        choice = choose_gemm(left, right, spec, torch.float32)
        assert choice == Choice("reference", "one operand only is quantized: plain FP32 sums, whatever the accumulator")
    assert choose_gemm(a.decode(), b.decode(), spec, torch.float32).backend == "torch"


def chosen(spec: GemmSpec, out_dtype: torch.dtype, k: int = 4096, tile: Tile = BLOCK_128) -> str:
    """The backend of [256, K] times [256, K]^T."""
    values = torch.zeros(256, k)
    a = quantize(values, E4M3, ROW_128 if tile is BLOCK_128 else tile)
    return choose_gemm(a, quantize(values, E4M3, tile), spec, out_dtype).backend


def test_the_choice_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice alone, on a CPU that says it is one: fast takes ours where it is faster, exact only what has defined bits."""
    monkeypatch.setattr(backend, "hopper_reason", lambda device: None)
    fast, exact = (recipe("dsv3", f"gemm={word}").linear("out") for word in ("fast", "exact"))
    bf16, fp32 = torch.bfloat16, torch.float32
    assert recipe("dsv3").linear("out") == fast
    assert [chosen(fast, bf16, k) for k in (512, 2048, 2176)] == ["gluon", "gluon", "cublaslt"]
    assert [chosen(exact, bf16, k) for k in (512, 2176, 7168)] == ["gluon"] * 3
    for tile in (Tile(1, None), Tile(None, None)):
        assert [chosen(spec, bf16, 512, tile) for spec in (fast, exact)] == ["gluon", "gluon"]
    for tile in (BLOCK_128, ROW_128):
        assert [chosen(spec, fp32, 512, tile) for spec in (fast, exact)] == ["cublaslt", "triton"]
    e5m2 = quantize(torch.zeros(256, 4096), E5M2, ROW_128), quantize(torch.zeros(256, 4096), E4M3, BLOCK_128)
    assert [choose_gemm(*e5m2, fast, dtype).backend for dtype in (bf16, fp32)] == ["gluon", "triton"]
    hopper = recipe("dsv3", "accumulator=hopper").linear("out")  # which sums, not which kernel
    assert [chosen(hopper, bf16, k) for k in (512, 4096)] == ["gluon", "cublaslt"]
    every_32 = recipe("dsv3", "accumulator=hopper", "promote_every=32").linear("out")
    assert chosen(every_32, bf16, 512) == "triton"
    asked = recipe("dsv3", "accumulator=fp32", "gemm=exact").linear("out")
    assert chosen(asked, bf16) == "reference"
    a, b = operands()
    assert [choose_gemm(a, b, spec, fp32).exact for spec in (fast, exact)] == [False, True]  # cuBLASLt may split K
    assert choose_gemm(a, b, exact, bf16).exact


def test_the_choice_on_hopper_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "hopper_reason", lambda device: None)
    monkeypatch.setattr(backend, "triton_reason", lambda: "no Triton")
    fast, exact = (recipe("dsv3", f"gemm={word}").linear("out") for word in ("fast", "exact"))
    assert chosen(fast, torch.bfloat16, 512) == "cublaslt"
    assert chosen(exact, torch.bfloat16, 512) == "emulated"
    e5m2 = recipe("hybrid").linear("out")
    a, b = (quantize(torch.zeros(256, 256), E5M2, tile) for tile in (ROW_128, BLOCK_128))
    assert choose_gemm(a, b, e5m2, torch.bfloat16).backend == "reference"
    sums = recipe("hybrid", "accumulator=hopper").linear("out")
    assert choose_gemm(a, b, sums, torch.bfloat16).backend == "emulated"


def test_a_cpu_of_another_kind_has_a_library_of_its_own(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One home directory, several machines."""
    assert emulated.reason_against_compiled(CPU) is None
    monkeypatch.setattr("dsv3fp8.kernels.compiled._cpu", lambda: "another")
    compiled.cache_clear()
    assert emulated.reason_against_compiled(CPU) is None
    assert len(list(cache.iterdir())) == 2


def test_large_and_small_codes_of_both_formats_survive_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """All 256 x 256 pairs of finite codes, as sums of one product: exact."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: (os.cpu_count() or 1) * 4)
    for left in (E4M3, E5M2):
        for right in (E4M3, E5M2):
            a, b = (torch.arange(256, dtype=torch.uint8)[:, None].view(fmt.dtype) for fmt in (left, right))
            got, want = emulated.products(a, b, 32), accumulator.products(a, b, 32)
            assert torch.equal(got.view(torch.int32), want.view(torch.int32))
            exact = a.double() @ b.double().mT
            assert torch.equal(got.double().nan_to_num(7), exact.nan_to_num(7))
