"""metrics.jsonl through kills and non-finite values, and the two numbers of expert load."""

import json
import math
from pathlib import Path

import pytest
import torch

from dsv3fp8.errors import UserError
from dsv3fp8.training.metrics import MetricsFile, expert_balance, read_metrics


def test_a_value_that_is_not_finite_is_visible_in_valid_json(tmp_path: Path) -> None:
    """W05: strict readers take every line, and NaN and inf come back."""
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, after_step=0)
    file.append({"step": 1, "loss": math.nan, "grad_norm": math.inf, "lr": 0.1})
    text = path.read_text()  # on disk before the file is closed

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    assert json.loads(text, parse_constant=refuse) == {
        "step": 1, "loss": None, "grad_norm": None, "lr": 0.1, "nonfinite": {"loss": "nan", "grad_norm": "inf"},
    }  # fmt: skip
    file.close()
    (record,) = read_metrics(path)
    assert math.isnan(record["loss"])
    assert record["grad_norm"] == math.inf
    assert record["lr"] == 0.1


def test_floats_come_back_with_all_their_bits(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    values = torch.randn(50, dtype=torch.float64).tolist()
    file = MetricsFile(path, after_step=0)
    for step, value in enumerate(values, 1):
        file.append({"step": step, "loss": value})
    file.close()
    assert [record["loss"] for record in read_metrics(path)] == values


def test_resuming_drops_later_lines_and_a_half_written_one(tmp_path: Path) -> None:
    """W01: logged to 12, checkpoint of step 10, killed while writing line 13."""
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, after_step=0)
    for step in range(1, 13):
        file.append({"step": step, "loss": 1.0 / step})
    file.close()
    with path.open("a") as half:
        half.write('{"step": 13, "lo')
    file = MetricsFile(path, after_step=10)
    assert [record["step"] for record in file.history] == list(range(1, 11))
    for step in (11, 12, 13):
        file.append({"step": step, "loss": 1.0 / step})
    file.close()
    assert [record["step"] for record in read_metrics(path)] == list(range(1, 14))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("not json", "is no JSON object"),
        ("[1, 2]", "is no JSON object"),
        ('{"loss": 2.0}', "has no step"),
        ('{"step": "2"}', "has no step"),
        ('{"step": 2, "loss": "abc"}', 'loss="abc" is no number'),
        ('{"step": 2, "loss": [1.0]}', r"loss=\[1\.0\] is no number"),
    ],
)
def test_a_broken_line_in_the_middle_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(UserError, match=rf"metrics\.jsonl, line 2:? {complaint}"):
        MetricsFile(path, after_step=5)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the disk that is always full is Linux's")
def test_a_full_disk_is_named_and_closing_says_nothing_more(tmp_path: Path) -> None:
    """K10."""
    file = MetricsFile(tmp_path / "metrics.jsonl", after_step=0)
    file.close()
    file._file = Path("/dev/full").open("w")  # noqa: SIM115
    with pytest.raises(UserError, match=r"cannot write .*metrics\.jsonl: No space left on device; free some space"):
        file.append({"step": 1})
    file.close()


def test_expert_load_is_that_of_the_worst_layer() -> None:
    even, skewed, one = [4, 4, 4, 4], [10, 2, 2, 2], [16, 0, 0, 0]
    balance = expert_balance(torch.tensor([even, skewed]))
    assert balance["expert_load_max"] == pytest.approx(10 / 4)
    shares = [10 / 16, 2 / 16, 2 / 16, 2 / 16]
    assert balance["expert_load_entropy"] == pytest.approx(-sum(p * math.log(p) for p in shares) / math.log(4))
    assert expert_balance(torch.tensor([even])) == {"expert_load_max": 1.0, "expert_load_entropy": pytest.approx(1.0)}
    assert expert_balance(torch.tensor([one, even])) == {"expert_load_max": 4.0, "expert_load_entropy": 0.0}


@pytest.mark.parametrize("load", [torch.zeros(0, 8, dtype=torch.int64), torch.zeros(2, 8, dtype=torch.int64)])
def test_no_tokens_have_no_expert_load(load: torch.Tensor) -> None:
    assert expert_balance(load) == {"expert_load_max": None, "expert_load_entropy": None}
