"""`dsv3fp8 plan`: what it prints and writes, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from dsv3fp8 import cli

V3 = [
    "model=v3_671b",
    "gpus=2048",
    "parallel.dp_shard=2048",
    "parallel.expert=64",
    "training.batch=1",
    "training.context=4096",
]


def planned(tmp_path: Path, *words: str) -> dict[str, Any]:
    assert cli.main(["plan", f"out={tmp_path}", *words]) == 0
    data: dict[str, Any] = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    return data


def test_671_b_on_thousands_of_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = planned(tmp_path, *V3)
    assert (data["gpus"], data["tokens"], data["tokens_of_gpu"]) == (2048, 2048 * 4096, 4096)
    assert data["exchange_of_layer"]["dispatch"] == 4096 * 8 * (7168 + 4 * 56)
    assert sum(data["memory"]["peak"].values()) == data["memory"]["total"] < data["memory"]["limit"]
    assert data["time"]["tokens_per_second"] == pytest.approx(data["tokens"] / data["time"]["step"])
    text = capsys.readouterr().out
    assert "682.64 B parameters on 2048 GPUs" in text
    assert "\ndispatch " in text
    assert "\nstep " in text


def test_a_vocabulary_and_the_gpus_are_filled_in(tmp_path: Path) -> None:
    data = planned(tmp_path, "model=medium", "parallel.dp_replicate=2")
    assert data["gpus"] == 2
    assert data["notes"] == ["model.vocab_size=null: 32,000 assumed"]
    assert round(data["parameters"] / 1e9, 2) == 1.99


def test_a_batch_is_what_each_gpu_reads_as_in_training(tmp_path: Path) -> None:
    data = planned(tmp_path, "model.vocab_size=257", "training.batch=5", "training.context=64", "parallel.dp_replicate=2")
    assert (data["tokens_of_gpu"], data["tokens"]) == (5 * 64, 2 * 5 * 64)


def test_rates_by_hand_and_of_another_page(tmp_path: Path) -> None:
    page = Path(__file__).parents[3] / "docs" / "results" / "fast_h200" / "layer.json"
    shipped, read = planned(tmp_path), planned(tmp_path, f"layer={page}")
    assert read["time"]["step"] == pytest.approx(shipped["time"]["step"], rel=1e-3)
    assert read["rates"]["source"] == str(page)
    twice = planned(tmp_path, f"rates.gemm={2 * shipped['rates']['gemm']}", "rates.network=100")
    assert twice["rates"]["source"].startswith("rates.gemm and ")
    assert twice["time"]["gemm"] < shipped["time"]["gemm"]
    assert twice["rates"]["network"] == 100
    by_hand = planned(tmp_path, "recipe=fp32", "rates.gemm=50", "rates.attention=50", "rates.passes=400")
    assert by_hand["rates"]["source"] == "rates.gemm, rates.attention, rates.passes"
    assert by_hand["rates"]["head"] == 50


def test_what_does_not_fit_is_shown_and_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "model=v3_671b"]) == 2
    shown = capsys.readouterr()
    assert "peak, at the " in shown.out
    (line,) = shown.err.splitlines()
    assert "memory=141 GB of a GPU is less than the 12,285.7 GB of this plan's peak (moments 5,461.1, " in line
    assert "raise parallel.dp_shard=1, or set optimizer.moments=bf16" in line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gpus=4"], "make 1 ranks, not 4: set parallel.dp_replicate=4"),
        (["parallel.dp_shard=4", "parallel.expert=8"], "parallel.expert=8 exceeds the 4 GPUs"),
        (["parallel.dp_shard=3", "parallel.expert=3"], "parallel.expert=3 does not divide model.experts=8: set it to 2"),
        (["parallel.dp_shard=12"], "gpus=12 do not fill nodes of node=8 GPUs: take 8 or 16"),
        (["training.context=4096"], "training.context=4096 is longer than model.context=1024"),
        (["training.context=1"], "training.context=1 leaves nothing to predict at model.mtp_depth=1"),
        (["parallel.dp_replicate=2", "parallel.expert=2", "recipe=tensorwise"], "parallel.expert=2: recipe=tensorwise keeps"),
        (["memory=0.1"], "memory=0.1 GB of a GPU is less than the "),
        (["memory=0.1"], "set recipe.recompute=norms_and_up, or lower training.batch=8"),
        (["recipe=te_blockwise"], "recipe=te_blockwise: what Transformer Engine keeps is not known"),
        (["recipe=fp32"], "recipe=fp32 computes in FP32, of which nothing was measured: give rates.gemm"),
        (["parallel.shard=2"], "parallel.shard: no such key; did you mean parallel.dp_shard?"),
        (["parallel=single2"], "parallel=single2: no such parallel"),
        (["gpu=2"], "gpu: no such key; did you mean gpus?"),
        (["gpus=two"], "gpus=two: expected a whole number or null"),
        (["gpus=0"], "gpus=0 must be at least 1"),
        (["imbalance=0.5"], "imbalance=0.5 must be at least 1"),
        (["imbalance=1.5"], "receives 1 times the mean under parallel.expert=1; lower it to 1"),
        (["parallel.dp_shard=4", "parallel.expert=4", "imbalance=4.5"], "under parallel.expert=4; lower it to 4"),
        (["node=0"], "node=0 must be at least 1"),
        (["memory=0"], "memory=0.0 must be above 0"),
        (["rates.copy=0"], "rates.copy=0.0 must be above 0"),
        (["layer=no.json"], "layer=no.json: No such file or directory; give the layer.json"),
        ([f"layer={__file__}"], "no breakdown of dsv3 and bf16 in it"),
        (["v3_671b"], "v3_671b: expected key=value"),
        (["model=v4"], "model=v4: no such model"),
    ],
)
def test_mistakes_are_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_nothing_is_written_without_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan"]) == 0
    assert list(tmp_path.iterdir()) == []


def test_keys_without_effect_change_nothing(tmp_path: Path) -> None:
    """Those that docs/plan.md names."""
    plain = planned(tmp_path)
    assert planned(tmp_path, "training.steps=7", "training.cuda_graph=true", "recipe.gemm=exact") == plain


def test_help_lists_the_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {key} " in text for key in ("gpus", "parallel.expert", "rates.network", "memory", "out"))
