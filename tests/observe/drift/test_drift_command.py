"""`dsv3fp8 drift`: what it writes, that it repeats itself, and what it refuses."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from small_study import SIZE, fewer_draws, study

from dsv3fp8 import cli
from dsv3fp8.observe.drift import command, sums
from dsv3fp8.observe.drift.experiments import EXPERIMENTS
from dsv3fp8.observe.drift.page import page
from dsv3fp8.observe.drift.tables import tables_of


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    fewer_draws(monkeypatch)
    monkeypatch.setattr(command, "size_for", lambda name, device: SIZE)


def test_it_writes_the_page_the_data_and_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "drift"
    assert cli.main(["drift", f"out={out}", "device=cpu", "seed=3"]) == 0
    text = capsys.readouterr().out
    figures = ["cause", "interval", "length", "mechanisms", "outliers"]
    assert sorted(path.name for path in out.iterdir()) == sorted(["drift.json", "drift.md", *(f"{n}.png" for n in figures)])
    assert all((out / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in figures)
    data = json.loads((out / "drift.json").read_text(encoding="utf-8"))
    assert set(data) == {"about", "notes", "rows", "known", "claims"}
    assert list(data["rows"]) == list(EXPERIMENTS)
    assert (data["about"]["seed"], data["about"]["size"]) == (3, "small")
    assert {"date", "device", "torch", "commit", "command", "seconds", "sizes", "threads"} < set(data["about"])
    written = (out / "drift.md").read_text(encoding="utf-8")
    shown = tables_of(data)
    assert {table.name for table in shown} == {*EXPERIMENTS, "known"} - {"operands"}
    for table in shown:
        assert f"## {table.title}\n" in written
        assert table.markdown() in written
        assert table.title in " ".join(text.split())
    for claim in data["claims"]:
        assert f"**{claim['name']}: {claim['verdict']}.**" in written
    assert all(written.count(f"]({name}.png)") == 1 for name in figures)
    assert "emulated sums only: cpu has no FP8 tensor cores" in text
    assert text.count("are left out: run=RUN_DIR") == 1


def test_every_number_in_the_data_is_finite_and_repeats(capsys: pytest.CaptureFixture[str]) -> None:
    first, again = command.measure_all(study()), command.measure_all(study())
    for key in ("rows", "known", "claims"):
        assert first[key] == again[key]
    numbers = [value for rows in first["rows"].values() for row in rows for value in row.values() if isinstance(value, float)]
    assert len(numbers) > 200
    assert all(map(math.isfinite, numbers))
    assert capsys.readouterr().out.count("\n") == 2 * len(EXPERIMENTS)


def test_rows_of_a_gpu_stand_beside_the_emulated_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A GPU played by the emulation, and cuBLASLt by torch's CPU GEMM, which sums in fp32."""

    def on_chip(promote: Any, device: torch.device) -> tuple[sums.Way | None, str]:
        if promote == 64:
            return None, "no 64"
        return sums.Way(f"GPU (x), {promote}", "gpu", promote, sums.emulation(promote).products), ""

    monkeypatch.setattr("dsv3fp8.kernels.backend.hopper_reason", lambda device: None)
    monkeypatch.setattr(sums, "on_chip", on_chip)
    monkeypatch.setattr("dsv3fp8.observe.drift.experiments.length.on_chip", on_chip)
    data = command.measure_all(study())
    data["about"] |= {"date": "2026-11-30", "command": "dsv3fp8 drift", "size": "small", "seconds": 1.0}
    gpu = [row for row in data["rows"]["length"] if row["where"] == "gpu"]
    assert {row["way"] for row in gpu} == {
        "GPU (x), never", "GPU (x), 128", "cuBLASLt, fast accumulation", "cuBLASLt, no fast accumulation",
    }  # fmt: skip
    assert all(row["equal"] == 1.0 for row in gpu if row["promote"] is not None)
    assert all(row["rms"] < 1e-5 for row in gpu if row["promote"] is None)
    tables = tables_of(data)
    assert any(table.title == "Error against K, N(0,1), on the GPU" for table in tables)
    lengths = {name: rows if name == "length" else [] for name, rows in data["rows"].items()}
    assert command.draw_figures(lengths, tmp_path) == ["length"]
    names = ["length"]
    assert "100 %" in page(data, tables, names)
    measured = {row["what"]: row for row in data["known"] if row["ours"] is not None}
    assert measured["U(0,1), one chain, K 1024, GPU"]["within"]
    assert not measured["U(0,1), cuBLASLt, K 1024, GPU"]["within"]
    assert "“U(0,1), cuBLASLt, K 1024, GPU” (0.00 times)" in page(data, tables, names)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["sized=full"], "sized"),
        (["size=huge"], "size=huge"),
        (["seed=-1"], "seed=-1 must be at least 0"),
        (["fast"], "fast: expected key=value, such as run=runs/tiny-dsv3 out=runs/drift"),
        (["device=tpu"], "device=tpu must be one of"),
        (["run=nowhere"], "run=nowhere has no checkpoint: give the run directory of `dsv3fp8 train`"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    words: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["drift", f"out={tmp_path}", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("dsv3fp8: error: ")
    assert complaint in error
    assert error.count("\n") == 1


def test_a_place_that_cannot_be_written_to_is_named_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["drift", f"out={tmp_path}/file"]) == 2
    captured = capsys.readouterr()
    assert f"out={tmp_path}/file: " in captured.err
    assert captured.out == ""


def test_help_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["drift", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {key} " in text for key in ("run", "out", "size", "seed", "device"))
    assert cli.main(["--help"]) == 0
    assert "\n  drift     Measure how far FP8 sums stray" in capsys.readouterr().out
