"""Loss curves of several runs in one picture."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dsv3fp8.errors import UserError
from dsv3fp8.observe.curves import draw_curves, main, records_of, smoothed

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Four steps, one of them skipped with a loss that is not finite, one validation, and a line cut short."""
    directory = tmp_path / "bf16"
    directory.mkdir()
    records = [{"step": step, "loss": 4.0 / step, "validation_loss": 3.0 if step == 2 else None} for step in (1, 2, 4)]
    records.insert(2, {"step": 3, "loss": None, "nonfinite": {"loss": "nan"}})
    lines = [json.dumps(record) + "\n" for record in records]
    (directory / "metrics.jsonl").write_text("".join(lines) + '{"step": 5, "lo')
    return directory


def test_an_average_has_no_bias_at_its_start() -> None:
    assert smoothed([2.0, 2.0, 2.0], 0.9) == pytest.approx([2.0, 2.0, 2.0])
    assert smoothed([1.0, 4.0], 0.5) == pytest.approx([1.0, (0.25 * 1 + 0.5 * 4) / 0.75])


def test_a_run_directory_and_its_metrics_file_are_the_same(run: Path) -> None:
    records = records_of(run)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert str(records_of(run / "metrics.jsonl")) == str(records)


def test_a_picture_is_drawn_with_and_without_validation_and_differences(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    both, alone = tmp_path / "both.png", tmp_path / "alone.png"
    assert main([f"out={both}", str(run), f"again={run}/metrics.jsonl", "compare=again:bf16"]) == 0
    draw_curves({"x": [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]}, alone)
    assert both.read_bytes()[:8] == alone.read_bytes()[:8] == PNG


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{run}"], "give out=PICTURE.png and at least one run directory"),
        (["out=a.png"], "give out=PICTURE.png and at least one run directory"),
        (["out=a.png", "{run}/none"], "none does not exist: give a run directory or a metrics.jsonl"),
        (["out=a.png", "{run}/empty.jsonl"], "empty.jsonl holds no step yet: let the run log one"),
        (["out=a.png", "{run}/broken.jsonl"], "broken.jsonl, line 1 is no JSON object: delete the line"),
        (["out=a.png", "{run}", "compare=bf16:dsv3"], "compare=bf16:dsv3: there is no run 'dsv3'; give NAME:OTHER of bf16"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_one_line(run: Path, words: list[str], message: str) -> None:
    (run / "empty.jsonl").write_text("")
    (run / "broken.jsonl").write_text("{\n")
    with pytest.raises(UserError) as caught:
        main([word.format(run=run) for word in words])
    assert str(caught.value).endswith(message)


def test_an_error_is_one_line_and_an_exit_status() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dsv3fp8.observe.curves", "out=a.png"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "dsv3fp8: error: give out=PICTURE.png and at least one run directory\n"
