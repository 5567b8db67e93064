"""The command line: dispatch, help, and one line for what a person can put right."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import dsv3fp8
from dsv3fp8 import cli
from dsv3fp8.config import RunConfig
from dsv3fp8.errors import UserError


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[RunConfig]:
    """A training loop that notes the settings it was given; `raising` makes it fail."""
    monkeypatch.chdir(tmp_path)
    seen: list[RunConfig] = []
    module = ModuleType("dsv3fp8.training.loop")

    def train(config: RunConfig) -> int:
        seen.append(config)
        return 0

    module.train = train  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dsv3fp8.training.loop", module)
    return seen


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def train(config: RunConfig) -> int:
        raise error

    monkeypatch.setattr(sys.modules["dsv3fp8.training.loop"], "train", train)


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in ("train", "generate", "export", "import", "map", "doctor"))
    assert cli.main([]) == cli.USER_ERROR
    assert cli.main(["--version"]) == 0
    assert dsv3fp8.__version__ in capsys.readouterr().out


def test_an_unknown_command_is_answered_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian"]) == 2
    commands = "train, compare, generate, consolidate, export, import, map, drift, bench, plan, doctor"
    assert error_line(capsys) == f"dsv3fp8: error: trian: no such command; there are {commands}"
    assert cli.main(["recipe=bf16"]) == 2
    assert "did you mean `train recipe=bf16`?" in error_line(capsys)


def test_train_help_lists_groups_choices_keys_and_comments(
    loop: list[RunConfig], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert cli.main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    assert "  recipe      bf16, bf16_cache, " in text
    assert "dsv3*, " in text
    assert "  training.accumulate=1 " in text
    assert "Initial weights and data order." in text
    assert max(len(line) for line in text.splitlines()) <= 100
    assert loop == []


def test_train_hands_the_settings_to_the_loop(loop: list[RunConfig]) -> None:
    assert cli.main(["train", "training.steps=3", "recipe=bf16"]) == 0
    assert (loop[0].training.steps, loop[0].recipe.name) == (3, "bf16")


def test_a_wrong_setting_is_one_line_and_status_2(loop: list[RunConfig], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "training.stepz=3"]) == 2
    assert error_line(capsys) == "dsv3fp8: error: training.stepz: no such key; did you mean training.steps?"
    assert loop == []


def test_user_errors_of_the_loop_are_one_line(
    loop: list[RunConfig], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    raising(monkeypatch, UserError("data.paths: nothing\nthere"))
    assert cli.main(["train"]) == 2
    assert error_line(capsys) == "dsv3fp8: error: data.paths: nothing there"


def test_an_interrupt_is_one_line(
    loop: list[RunConfig], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    raising(monkeypatch, KeyboardInterrupt())
    assert cli.main(["train"]) == 130
    assert error_line(capsys) == "dsv3fp8: error: interrupted"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nGPU 0 has …"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried …"),
        torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported …"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_out_of_memory_is_one_line_with_what_to_change(
    loop: list[RunConfig], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    raising(monkeypatch, error)
    assert cli.main(["train", "training.batch=7", "training.context=129", "model=tiny"]) == 1
    line = error_line(capsys)
    assert line.startswith("dsv3fp8: error: out of memory: lower training.batch=7 and raise training.accumulate=1")
    for advice in ("training.context=129", "model=tiny", "optimizer.moments=bf16", "recipe.recompute=norms_and_up"):
        assert advice in line
    assert cli.main(["train", "recipe.recompute=norms_and_up"]) == 1
    assert "recompute" not in error_line(capsys)


def test_a_map_without_memory_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(arguments: list[str]) -> int:
        raise MemoryError

    monkeypatch.setattr("dsv3fp8.observe.map.command.main", no_memory)
    assert cli.main(["map", "model=v3_671b"]) == 1
    line = error_line(capsys)
    assert line.startswith("dsv3fp8: error: out of memory in `map model=v3_671b`: lower tokens or model.experts")


def test_a_full_disk_is_one_line_with_the_file(
    loop: list[RunConfig], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    raising(monkeypatch, OSError(errno.ENOSPC, "No space left on device", "runs/x/checkpoint"))
    assert cli.main(["train"]) == 1
    assert error_line(capsys).startswith("dsv3fp8: error: runs/x/checkpoint: No space left on device; free some space")


def test_a_reader_that_has_gone_ends_the_command_in_one_line(tmp_path: Path) -> None:
    """As in `dsv3fp8 doctor | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-u", "-P", "-m", "dsv3fp8", "train", "--help"]
    done = subprocess.run(
        command, cwd=tmp_path, env=_environment(), stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "dsv3fp8: error: nobody reads the output any more\n")


def test_our_own_bugs_keep_their_traceback(loop: list[RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    for bug in (RuntimeError("shape mismatch"), AssertionError(), OSError(errno.EIO, "Input/output error")):
        raising(monkeypatch, bug)
        with pytest.raises(type(bug)):
            cli.main(["train"])


@pytest.mark.parametrize("words", [["--local-rank=1"], ["--local_rank=1"], ["--local-rank", "1"], ["--local_rank", "1"]])
def test_the_local_rank_of_old_launchers_is_taken_unless_the_environment_has_it(
    loop: list[RunConfig], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """H07"""
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert cli.main([*words, "train", "training.steps=3"]) == 0
    assert os.environ["LOCAL_RANK"] == "0"
    monkeypatch.delenv("LOCAL_RANK")
    assert cli.main(["train", *words, "training.steps=3"]) == 0
    assert os.environ["LOCAL_RANK"] == "1"
    assert [config.training.steps for config in loop] == [3, 3]


def test_a_local_rank_that_is_no_number_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """H07: with torchrun as the remedy."""
    assert cli.main(["train", "--local-rank=x"]) == 2
    assert "--local-rank=x: expected a number; or launch with torchrun" in error_line(capsys)


def test_the_local_rank_of_torch_distributed_launch_reaches_us(tmp_path: Path) -> None:
    """H07: the real launcher passes --local-rank where it is asked to, and sets LOCAL_RANK."""
    command = [
        sys.executable, "-P", "-W", "ignore", "-m", "torch.distributed.launch", "--nproc_per_node=1", "--master_port=0",
        "--module", "dsv3fp8", "--version",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, env=_environment(), capture_output=True, text=True, timeout=120, check=False)
    assert f"dsv3fp8 {dsv3fp8.__version__}" in done.stdout, done.stderr


def test_threads_spin_less_unless_the_user_has_said_how_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    cli.share_cores()
    assert "GOMP_SPINCOUNT" not in os.environ
    monkeypatch.delenv("OMP_WAIT_POLICY")
    cli.share_cores()
    assert os.environ["GOMP_SPINCOUNT"] == "1000"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    cli.share_cores()
    assert os.environ["GOMP_SPINCOUNT"] == "7"


def test_help_needs_no_torch(tmp_path: Path) -> None:
    """I01: commands import what they need when they run."""
    code = "import sys; from dsv3fp8.cli import main; main(['--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], env=_environment(), cwd=tmp_path, capture_output=True)
    assert done.returncode == 0


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(dsv3fp8.__file__).parents[1])}
