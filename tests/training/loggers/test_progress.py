"""What a person sees: plain lines where there is no terminal, a bar where there is one."""

import sys
import time
from typing import Any

import pytest

from dsv3fp8.training.loggers import progress
from dsv3fp8.training.loggers.progress import Progress


def record(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": 3.25, "lr": 1e-3, "grad_norm": 1.5, "tokens_per_second": 1234.0, **more}


def test_the_first_step_shows_at_once_and_later_ones_when_it_is_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    now = [10.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    logger = Progress("auto", total=100, start=0)  # not a terminal here: plain lines
    for step in range(1, 101):
        now[0] += 1
        logger.log(record(step, validation_loss=2.5) if step == 50 else record(step))
    logger.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 1/100  loss 3.2500  lr 1.00e-03  norm 1.5  1,234 tokens/s  0:01:39 left"
    steps = [int(line.split()[1].split("/")[0]) for line in lines]
    assert steps == [1, *range(6, 50, 5), 50, *range(55, 100, 5), 100]
    assert "validation 2.5000" in lines[steps.index(50)]
    assert lines[-1].endswith("0:00:00 left")


def test_the_time_left_counts_only_the_steps_of_this_session(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    logger = Progress("plain", total=4100, start=500)
    now[0] = 20.0
    logger.log(record(510))
    assert capsys.readouterr().out.endswith("1:59:40 left\n")


def test_skipped_steps_and_nan_are_shown(capsys: pytest.CaptureFixture) -> None:
    logger = Progress("plain", total=10, start=0)
    logger.log(record(3, loss=float("nan"), grad_norm=float("inf"), skipped=2))
    line = capsys.readouterr().out
    assert "loss nan" in line
    assert "norm inf" in line
    assert "2 skipped" in line


def test_none_is_silent_but_for_messages(capsys: pytest.CaptureFixture) -> None:
    logger = Progress("none", total=10, start=0)
    logger.log(record(1))
    logger.advance(2)
    logger.say("done")
    logger.close()
    assert capsys.readouterr().out == "done\n"


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    logger = Progress("auto", total=10, start=4)
    logger.log(record(5, validation_loss=2.5))
    logger.log(record(6))
    logger.say("a message [with brackets]")
    logger.advance(7)
    assert logger._bar.tasks[0].completed == 7
    assert "validation 2.5000" in logger._bar.tasks[0].fields["text"]  # the latest one stays in sight
    logger.close()
    assert "a message [with brackets]" in capsys.readouterr().out


def test_the_share_of_the_peak_shows_where_it_is_known() -> None:
    assert "41.5% of BF16 peak" in progress.describe(record(1, bf16_peak_share=0.415))
    assert "peak" not in progress.describe(record(1, bf16_peak_share=None))
