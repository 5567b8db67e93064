"""What `doctor` reports, and what is said at the start on a GPU from before FP8."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import recipe

import dsv3fp8
from dsv3fp8 import cli, doctor
from dsv3fp8.config import load_config
from dsv3fp8.kernels import backend
from dsv3fp8.kernels.attention import choice as attention
from dsv3fp8.kernels.backend import Choice
from dsv3fp8.kernels.explain import explain
from dsv3fp8.model.manifest import precision_manifest
from dsv3fp8.precision.recipe import LINEAR_OPS

# Stands before everything else on sys.meta_path: the optional packages cannot be imported, as if they were not there.
BLOCK_OPTIONAL = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"triton", "wandb", "datasets", "transformers", "transformer_engine"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""
IMPORT_ALL = """
import importlib, pkgutil, dsv3fp8
names = [module.name for module in pkgutil.walk_packages(dsv3fp8.__path__, "dsv3fp8.")]
for name in names:
    triton = ".triton" in name or ".gluon" in name or ".quantize." in name and not name.endswith(".reference")
    if name != "dsv3fp8.__main__" and not triton:
        importlib.import_module(name)
print(len(names))
"""


@pytest.fixture(autouse=True)
def launch_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_doctor_reports_machine_packages_and_backends(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "training.device=cpu", "recipe=dsv3"]) == 0
    text = capsys.readouterr().out
    for part in ("Machine\n", "GPU\n", "Packages\n", "Backends of recipe dsv3 on cpu\n", "Python 3.", "GiB free"):
        assert part in text
    assert f"torch               {torch.__version__}" in text


@pytest.mark.parametrize("recipe", ["fp32", "dsv3", "delayed"])
def test_every_op_is_listed_once_with_its_backend_and_reason(recipe: str) -> None:
    config = load_config([f"recipe={recipe}"])
    device = torch.device("cpu")
    lines = doctor.backends(config.recipe, device)
    listed = [op.split(".")[0] for line in lines if line.startswith("    ") for op in line.strip().rstrip(",").split(", ")]
    assert set(LINEAR_OPS) <= set(listed)
    assert "attention" in listed
    for _, choice in explain(config.recipe, device):
        assert str(choice) in lines


def test_sizes_and_settings_that_decide_a_backend_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on Hopper: V2-Lite's dense FFN of 10944 has half a tile in its fused projection, its experts have not."""
    monkeypatch.setattr(backend, "hopper_reason", lambda device: None)
    monkeypatch.setattr(backend, "triton_reason", lambda: "no Triton")
    rows = dict(explain(recipe("dsv3"), torch.device("cpu"), {"gate_up": (2048, 2 * 10944)}))
    for gemm, where in (("fprop", "the rows"), ("dgrad", "K")):
        assert rows[f"gate_up.{gemm}"].backend == "reference"
        assert f"cut inside {where}" in rows[f"gate_up.{gemm}"].reason
    whole = ("gate_up.wgrad", "expert_gate_up.fprop", "shared_gate_up.dgrad", "down.dgrad")
    assert {rows[op].backend for op in whole} == {"cublaslt"}

    model = load_config(["model=v2_lite_16b"]).model
    manifest = precision_manifest(model, recipe("dsv3"), torch.device("cpu"))
    assert {row["op"] for row in manifest["backends"] if "cut inside" in row["reason"]} == {"gate_up.fprop", "gate_up.dgrad"}
    monkeypatch.setattr(
        attention, "choose", lambda device, dtype, widths, masked: Choice("reference", f"{widths}, masked={masked}")
    )
    assert doctor.main(["model=v2_lite_16b", "data.isolate_documents=true"]) == 0
    assert "cut inside the rows" in (text := capsys.readouterr().out)
    assert "(192, 128), masked=True" in text


def test_which_gemm_takes_which_kernels_goes_by_size_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """V3's, as on Hopper: ours where K is short and the result BF16, none but ours under gemm=exact."""
    monkeypatch.setattr(backend, "hopper_reason", lambda device: None)
    model = load_config(["model=v3_671b"]).model

    def taken(*words: str) -> dict[str, str]:
        rows = precision_manifest(model, recipe("dsv3", *words), torch.device("cpu"))["backends"]
        return {row["op"]: row["backend"] for row in rows if "." in row["op"]}

    fast = taken()
    ours = {op for op, kernels in fast.items() if kernels == "gluon"}
    assert ours == {
        "q_b.fprop", "kv_b.fprop", "shared_down.fprop",  # K = 1536, 512, 2048
        *(f"{op}.{gemm}" for op in ("expert_gate_up", "expert_down") for gemm in ("fprop", "dgrad", "wgrad")),
    }  # fmt: skip
    assert fast["kv_a.dgrad"] == "cublaslt"  # K = 576, but summed with q_a's in FP32
    assert set(fast.values()) == {"gluon", "cublaslt"}
    exact = taken("gemm=exact")
    assert set(exact.values()) == {"gluon", "triton"}
    assert {op for op, kernels in exact.items() if kernels == "triton" and not op.endswith("wgrad")} == {
        "out.fprop", "q_a.dgrad", "kv_a.dgrad"
    }  # fmt: skip


def test_tested_versions_are_those_of_the_constraints() -> None:
    tested = doctor.tested_versions()
    assert tested["torch"] == "2.13.0"
    assert set(doctor.SHOWN) <= set(tested)


def test_a_package_of_another_version_or_a_missing_one_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"torch": "2.13.0+cu130", "numpy": "1.26.0", "triton": "3.7.0", "wandb": None}
    monkeypatch.setattr(doctor, "_installed", lambda name: installed.get(name, "0"))
    lines = {line.split()[0]: line for line in doctor.packages()}
    assert lines["torch"].endswith("2.13.0+cu130    as tested")
    assert f"tested with {doctor.tested_versions()['numpy']}" in lines["numpy"]
    assert f"tested with {doctor.tested_versions()['triton']}" in lines["triton"]
    assert "not installed: Weights & Biases logs" in lines["wandb"]


@pytest.mark.parametrize(
    ("driver", "cuda", "message"),
    [
        (None, None, "none that torch"),
        ("580.1", None, "driver 580.1 answers, but torch"),
        ("470.2", "13.0", "CUDA 13.0 does not start: update the driver"),
    ],
)
def test_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch, driver: str | None, cuda: str | None, message: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(doctor, "_driver", lambda: driver)
    assert message in doctor.gpus()[0]


def mock_gpu(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)


def test_a_gpu_from_before_fp8_is_told_in_one_line_that_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """I02: sm_80."""
    mock_gpu(monkeypatch, "NVIDIA A100", (8, 0))
    notice = doctor.old_gpu_notice(load_config(["recipe=dsv3"]))
    assert notice is not None
    assert "\n" not in notice
    assert notice.startswith("NVIDIA A100 (sm_80) has no FP8 tensor cores, which begin with sm_89: recipe=dsv3 runs on the")
    assert doctor.old_gpu_notice(load_config(["recipe=bf16"])) is None
    assert doctor.old_gpu_notice(load_config(["recipe=dsv3", "training.device=cpu"])) is None


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0)])
def test_a_gpu_with_fp8_has_no_such_line(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """I02"""
    mock_gpu(monkeypatch, "NVIDIA H200", capability)
    assert doctor.old_gpu_notice(load_config(["recipe=dsv3"])) is None


def python(code: str, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(Path(dsv3fp8.__file__).parents[1]), **variables}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("variables", [{}, {"TRITON_INTERPRET": "1"}], ids=["plain", "interpret"])
def test_everything_imports_without_gpu_and_optional_packages(variables: dict[str, str]) -> None:
    """I01: kernels are resolved when they are used."""
    assert int(python(BLOCK_OPTIONAL + IMPORT_ALL, CUDA_VISIBLE_DEVICES="", **variables)) > 10


def test_doctor_runs_without_gpu_and_optional_packages() -> None:
    """I01"""
    run = "from dsv3fp8.cli import main; sys.exit(main(['doctor', 'recipe=dsv3']))"
    text = python(BLOCK_OPTIONAL + run, CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1")
    assert "Backends of recipe dsv3 on cpu" in text
