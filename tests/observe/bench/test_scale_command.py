"""`dsv3fp8 bench scale`: two gloo ranks at tiny size, what it writes, and what it does when a layout fails."""

import json
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv3fp8 import cli
from dsv3fp8.config import load_config
from dsv3fp8.errors import UserError
from dsv3fp8.model.transformer import Transformer
from dsv3fp8.observe.bench.scale import command
from dsv3fp8.observe.bench.scale.config import parse
from dsv3fp8.observe.bench.scale.launch import Outcome, Report, on_ranks
from dsv3fp8.observe.bench.scale.layouts import rows

TRIED = ("device=cpu", "sizes=tiny", "rounds=1")


def run(out: Path, *words: str, status: int = 0) -> dict[str, Any]:
    assert cli.main(["bench", "scale", *TRIED, f"out={out}", *words]) == status
    data: dict[str, Any] = json.loads((out / "scale.json").read_text(encoding="utf-8"))
    return data


def test_two_ranks_are_measured_beside_one_and_beside_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = run(tmp_path, "recipes=dsv3", "only=data,expert,exchange", "gpus=2", "limit=250", "model.layers=2")
    about = data["about"]
    assert {"started", "device", "packages", "commit", "seconds"} < set(about)
    assert about["command"].startswith("dsv3fp8 bench scale device=cpu")
    one, both, dealt = data["rows"]
    assert [row["name"] for row in data["rows"]] == ["1 GPU", "2 GPUs, data parallel", "2 GPUs, 2 expert ranks"]
    for row in data["rows"]:
        assert row["failed"] == ""
        found = row["modes"]["launched"]
        assert found["tokens_per_second"] == pytest.approx(row["tokens"] / found["seconds"])
        assert row["modes"]["graph"]["failed"].startswith("not recorded: there are CUDA graphs on a CUDA GPU alone")
        assert row["plan"]["memory"] > 0
    assert (one["tokens"], both["tokens"]) == (32, 64), "each rank has as many tokens as one alone"
    assert one["traffic"] == {}

    settings = load_config(["model=nano", "model.experts=8", "model.mtp_depth=0", "model.vocab_size=512", "model.layers=2"])
    with torch.device("meta"):
        sizes = {name: p.numel() for name, p in Transformer(settings.model, settings.recipe).named_parameters()}
    of_experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert both["traffic"]["all-reduce gradients"]["payload"] == 2 * 4 * sum(sizes.values())
    assert dealt["traffic"]["all-reduce gradients"]["payload"] == 2 * 4 * (sum(sizes.values()) - of_experts)
    widths = {"dispatch": 128 + 4, "combine's backward": 128 + 4, "combine": 256, "dispatch's backward": 256}
    for what, row_bytes in widths.items():
        assert dealt["traffic"][what]["payload"] == 32 * 2 * row_bytes  # one MoE layer, 32 tokens to 2 experts each
    for row in (both, dealt):  # plan counts the same
        assert {what: row["traffic"][what]["payload"] for what in row["plan"]["payload"]} == row["plan"]["payload"]
    assert 1 <= dealt["imbalance"] <= 2

    (exchange,) = data["exchange"]
    ways = exchange["ways"]
    assert ways["dispatch in BF16"]["sent"] == pytest.approx(ways["dispatch in E4M3"]["sent"] * 2 * 256 / (256 + 8))
    page, said = (tmp_path / "scale.md").read_text(encoding="utf-8"), capsys.readouterr().out
    assert "the figures mean nothing" in page
    assert "| dsv3, 2 GPUs, 2 expert ranks: dispatch | 2 | 8,448 | 8,448 | +0.0 % |" in page
    assert f"see {tmp_path}" in said
    (tmp_path / "scale.md").unlink()
    assert cli.main(["bench", "page", f"out={tmp_path}"]) == 0
    assert (tmp_path / "scale.md").read_text(encoding="utf-8") == page


def test_a_failing_layout_costs_no_other_and_an_interrupted_run_leaves_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = {"seconds": [0.5], "peak": 3 * 10**9, "reserved": 4 * 10**9, "failed": ""}
    slower = steps | {"seconds": [0.8], "peak": 5 * 10**9}
    outcomes = iter(
        [
            Outcome([{"launched": steps}]), Outcome([{"launched": steps}, {}], "rank 1 died (exit code -9)"),
            Outcome([{"launched": steps}, {"launched": slower}]),
        ]
    )  # fmt: skip

    def given(count: int, *_: object) -> Outcome:
        found = next(outcomes, None)
        if found is None:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(command, "on_ranks", given)
    data = run(tmp_path, "recipes=dsv3,bf16", "only=data,expert", "gpus=2", status=1)
    assert [(row["name"], row["failed"]) for row in data["rows"]] == [
        ("1 GPU", ""), ("2 GPUs, data parallel", "rank 1 died (exit code -9)"), ("2 GPUs, 2 expert ranks", ""),
    ]  # fmt: skip
    slowest = data["rows"][2]["modes"]["launched"]
    assert (slowest["seconds"], slowest["peak"]) == (0.8, 5 * 10**9), "the slowest rank and the fullest GPU count"
    page = (tmp_path / "scale.md").read_text(encoding="utf-8")
    assert "- dsv3, 2 GPUs, data parallel: rank 1 died (exit code -9)" in page
    assert "- interrupted: this is what was measured until then" in page
    assert "| dsv3, 2 GPUs, 2 expert ranks | 80 | 62 % |" in page  # 64 tokens in 0.8 s on two, 32 in 0.5 s on one
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_what_there_is_no_time_for_is_left_out_and_named(tmp_path: Path) -> None:
    data = run(tmp_path, "budget=1e-6", "gpus=2", "only=data", "recipes=dsv3", status=1)
    assert data["rows"] == []
    assert [note for note in data["notes"] if note.endswith("were over: 2 GPUs, data parallel, dsv3")]


def misbehaving(report: Report, how: str) -> None:
    """For `on_ranks`: the second rank does not end well."""
    report("first", how)
    if os.environ["RANK"] == "1":
        if how == "error":
            raise UserError("parallel.expert=3 does not divide model.experts=8: set it to 2")
        if how == "death":
            os.kill(os.getpid(), 9)
    if how != "well":
        time.sleep(60)


@pytest.mark.parametrize(
    ("how", "failed"),
    [
        ("well", ""), ("error", "parallel.expert=3 does not divide model.experts=8: set it to 2"),
        ("death", "rank 1 died (exit code -9)"), ("hanging", "not done within 2 s"),
    ],
)  # fmt: skip
def test_ranks_that_fail_or_hang_are_ended_with_a_reason_and_what_they_told(how: str, failed: str) -> None:
    started = time.monotonic()
    outcome = on_ranks(2, 2.0 if how == "hanging" else 60.0, misbehaving, how)
    assert outcome.failed == failed
    assert how == "hanging" or outcome.found[1]["first"] == how
    assert how != "well" or outcome.all_told("first") == [how, how]
    assert outcome.all_told("second") is None
    assert time.monotonic() - started < 40


def waiting(report: Report, folder: str) -> None:
    """For `on_ranks`: leaves its number in a folder and goes on for ever."""
    Path(folder, str(os.getpid())).touch()
    time.sleep(300)


def test_ranks_are_gone_soon_after_their_parent_is_killed(tmp_path: Path) -> None:
    parent = multiprocessing.get_context("forkserver").Process(target=on_ranks, args=(2, 200.0, waiting, str(tmp_path)))
    parent.start()
    until(lambda: len(list(tmp_path.iterdir())) == 2)
    parent.kill()
    parent.join()
    for path in tmp_path.iterdir():
        until(lambda number=path.name: not Path("/proc", number).exists())


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_most_telling_rows_come_first() -> None:
    found = rows(8, ["data", "expert", "sharded", "exchange"], ["dsv3", "bf16"])
    names = [f"{row.layout}, {row.recipe or 'exchange'}" for row in found]
    assert names[:6] == [
        "1 GPU, dsv3", "8 GPUs, data parallel, dsv3", "8 GPUs, 8 expert ranks, dsv3", "8 GPUs, sharded over 8, dsv3",
        "8 GPUs, 8 expert ranks, exchange", "1 GPU, bf16",
    ]  # fmt: skip
    for count in (2, 4, 8):
        assert {f"{count} GPUs, {count} expert ranks, {what}" for what in ("dsv3", "bf16", "exchange")} < {*names}
    mixed = ("4 expert ranks", "2 expert ranks", "sharded over 8, 8 expert ranks")
    assert {f"8 GPUs, {layout}, {recipe}" for layout in mixed for recipe in ("dsv3", "bf16")} < {*names}
    assert len(set(names)) == len(names)
    assert [str(row.layout) for row in rows(2, ["exchange"], ["dsv3"])] == ["2 GPUs, 2 expert ranks"]
    assert [str(row.layout) for row in rows(1, ["data", "exchange"], ["dsv3"])] == ["1 GPU"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gpus=0"], "gpus=0 must be at least 1"),
        (["gpus=1", "only=exchange"], "gpus=1: there is no exchange on one"),
        (["only=tensor"], "only=tensor: there are data, expert, sharded, exchange"),
        (["modes=eager"], "modes=eager: there are launched, graph"),
        (["recipes="], "recipes is empty"),
        (["budget=0"], "budget=0.0 must be above 0"),
        (["recipe=bf16"], "recipe=bf16: bench scale takes recipes= instead"),
        (["parallel.expert=2"], "parallel.expert=2: bench scale takes only= instead"),
        (["gpu=2"], "gpu: no such key; did you mean gpus?"),
        (["two"], "two: expected key=value"),
        (["training.bach=2"], "training.bach: no such key"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "scale", *TRIED, *words]) == 2
    assert said in capsys.readouterr().err


def test_it_is_not_to_be_started_by_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="without torchrun"):
        parse([])
