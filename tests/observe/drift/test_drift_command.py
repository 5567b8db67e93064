"""`dsv3fp8 drift`: what it writes, that it repeats itself, and what it refuses."""

import json
import math
import re
from dataclasses import replace
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
        return sums.Way(f"GPU (x), {promote}", "gpu", promote, promote, sums.emulation(promote).products), ""

    def chip_block_scaled(a: Any, b: Any, promote: Any) -> tuple[str, torch.Tensor]:
        got = sums.emulated_block_scaled(a, b, promote)
        got[0, 0] += 1
        return "x", got

    monkeypatch.setattr("dsv3fp8.kernels.backend.hopper_reason", lambda device: None)
    monkeypatch.setattr(sums, "on_chip", on_chip)
    monkeypatch.setattr("dsv3fp8.observe.drift.experiments.length.on_chip", on_chip)
    monkeypatch.setattr(sums, "chip_block_scaled", chip_block_scaled)
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
    (interval,) = [table for table in tables if table.name == "interval"]
    assert interval.note.startswith("equal: share of outputs that equal the emulated ones beside them")
    (apart,) = [table for table in tables if table.name == "mechanisms"]
    assert apart.heads[-2:] == ("reachable on the chip", "GPU: equal")
    assert {row[-2:] for row in apart.rows} == {("yes", "< 100 %"), ("no", "")}  # 4095 of 4096
    assert [row["gpu"] for row in data["rows"]["mechanisms"][:2]] == [{"backend": "x", "equal": 1 - 1 / 4096}, None]
    assert "(backend x)" in apart.note
    lengths = {name: rows if name == "length" else [] for name, rows in data["rows"].items()}
    assert command.draw_figures(lengths, tmp_path) == ["length"]
    names = ["length"]
    assert "100 %" in page(data, tables, names)
    measured = {row["what"]: row for row in data["known"] if row["ours"] is not None}
    assert measured["U(0,1), one chain, K 1024, GPU"]["within"]
    assert not measured["U(0,1), cuBLASLt, K 1024, GPU"]["within"]
    assert "“U(0,1), cuBLASLt, K 1024, GPU” (0.00 times)" in page(data, tables, names)
    assert "whose shape was not recorded; ours have 256 outputs." in page(data, tables, names)


def test_cublaslt_is_compared_with_the_sums_that_it_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fast accumulation is one chain, no fast accumulation is promoted every 128; the table says so."""

    def scaled_mm(a: torch.Tensor, b: torch.Tensor, *_: Any, use_fast_accum: bool, **__: Any) -> torch.Tensor:
        return sums.emulated_products(a, b.mT, "never" if use_fast_accum else 128)

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm)
    ways = (*sums.Sums.of(torch.device("cpu")).ways, sums.cublaslt(fast=True), sums.cublaslt(fast=False))
    rows = EXPERIMENTS["length"](replace(study(), sums=sums.Sums(ways, ())))
    library = [row for row in rows if row["way"].startswith("cuBLASLt")]
    assert {row["k"] for row in library} == {128, 256, 512, 1024}
    assert [row["equal"] for row in library] == [1.0] * len(library)
    nothing = dict.fromkeys(EXPERIMENTS, ())
    notes = [table.note for table in tables_of({"rows": {**nothing, "length": rows}, "known": []}) if "GPU" in table.title]
    assert len(notes) == 2
    assert all(
        "in every bit, cuBLASLt, fast accumulation with sums not promoted; "
        "cuBLASLt, no fast accumulation with sums promoted every 128." in note
        for note in notes
    )


def test_a_page_of_a_cpu_claims_nothing_of_a_chip() -> None:
    data = command.measure_all(study())
    shown = {table.name: table for table in tables_of(data)}
    assert not any(
        "GPU" in head or "on the chip" in head.removeprefix("reachable on the chip") for t in shown.values() for head in t.heads
    )
    assert {row[-1] for row in shown["mechanisms"].rows} == {"yes", "no"}
    for name in ("mechanisms", "outliers", "extremes", "cause"):
        assert "emulated" in shown[name].note


@pytest.mark.parametrize("commit", ["0123abc", None])
def test_a_page_names_its_commit_or_says_that_there_is_none(commit: str | None) -> None:
    data = command.measure_all(study())
    data["about"] |= {"date": "2026-11-30", "command": "dsv3fp8 drift", "size": "small", "seconds": 1.0, "commit": commit}
    header = page(data, tables_of(data), []).splitlines()[2]
    assert header.startswith("2026-11-30, ")
    assert ("commit `0123abc`, " if commit else "commit unknown (not run from a git checkout), ") in header


def test_the_largest_seed_draws() -> None:
    largest = command.parse([f"seed={2**63 - 1}"]).seed
    first, other = (study(seed).generator("normal 128").initial_seed() for seed in (largest, largest - 1))
    assert first != other


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["sized=full"], "sized"),
        (["size=huge"], "size=huge"),
        (["seed=-1"], "seed=-1 must be at least 0"),
        (["seed=99999999999999999999"], "seed=99999999999999999999 must be below 2**63"),
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
    assert re.search(r"^  drift +Measure how far FP8 sums stray", capsys.readouterr().out, re.MULTILINE)
