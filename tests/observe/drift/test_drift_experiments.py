"""Every experiment's rows: what has to hold at any size, and what follows from the formats alone."""

import shutil
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save_checkpoint
from small_study import fewer_draws, study

from dsv3fp8 import cli
from dsv3fp8.config import load_config
from dsv3fp8.data.tokenizer import ByteTokenizer, IdTokenizer
from dsv3fp8.errors import UserError
from dsv3fp8.kernels import backend
from dsv3fp8.kernels.quantize.reference import quantize
from dsv3fp8.observe.drift import sums
from dsv3fp8.observe.drift.capture import capture, describe_run, live_along_k
from dsv3fp8.observe.drift.experiments import EXPERIMENTS
from dsv3fp8.observe.drift.tables import tables_of
from dsv3fp8.precision import accumulator, ledger
from dsv3fp8.precision.formats import E4M3
from dsv3fp8.precision.tiles import QuantizedTensor, Tile
from dsv3fp8.training.setup import build
from dsv3fp8.training.state import TrainingState

Rows = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def rows() -> Rows:
    with pytest.MonkeyPatch.context() as patch:
        fewer_draws(patch)
        given = study()
        return {name: experiment(given) for name, experiment in EXPERIMENTS.items()}


def one(rows: list[dict[str, Any]], **where: Any) -> dict[str, Any]:
    (found,) = [row for row in rows if all(row[name] == value for name, value in where.items())]
    return found


def test_sums_are_measured_for_every_k_and_grow_worse_unless_promoted(rows: Rows) -> None:
    for data in ("uniform", "normal"):
        chain, promoted = (
            [row for row in rows["length"] if (row["data"], row["promote"]) == (data, p)] for p in ("never", 128)
        )
        assert [row["k"] for row in chain] == [row["k"] for row in promoted] == [128, 256, 512, 1024]
        names = {"way": "", "promote": "", "against": ""}
        assert chain[0] | names == promoted[0] | names  # one chain of 128
        assert chain[-1]["rms"] > 3 * promoted[-1]["rms"]
        assert all(row["samples"] == 16 * 16 for row in chain)


def test_an_error_is_that_of_the_operands_drawn(rows: Rows) -> None:
    """From the draw to the figure in numpy, but for the accumulator."""
    given = study()
    generator = given.generator("uniform 512")
    a, b = (given.codes("uniform", 16, 512, generator) for _ in range(2))
    want = a.float().numpy().astype(float) @ b.float().numpy().astype(float).T
    error = accumulator.products(a, b, "never").numpy().astype(float) - want
    row = one(rows["length"], data="uniform", k=512, promote="never")
    assert row["rms"] == pytest.approx(((error**2).sum() / (want**2).sum()) ** 0.5, rel=1e-9)
    assert row["signed"] == pytest.approx(error.sum() / want.sum(), rel=1e-9)
    assert error.max() <= 0  # truncated toward zero, every one


def test_the_interval_ends_where_k_does(rows: Rows) -> None:
    for data in ("uniform", "normal"):
        mine = [row for row in rows["interval"] if row["data"] == data]
        assert [row["promote"] for row in mine] == [32, 64, 128, 256, 512, 1024, "never"]
        assert mine[-1]["rms"] == mine[-2]["rms"]
        assert [row["rms"] for row in mine[:-1]] == sorted(row["rms"] for row in mine[:-1])


def test_truncation_is_worse_than_rounding(rows: Rows) -> None:
    for data in ("uniform", "normal"):
        cut, nearest = (one(rows["cause"], data=data, k=1024, rounding=r) for r in ("truncate", "nearest"))
        assert cut["rms"] > nearest["rms"]
    assert one(rows["cause"], data="uniform", k=1024, rounding="truncate")["signed"] < 0


def test_the_two_mechanisms_each_cut_their_own_error(rows: Rows) -> None:
    cells = rows["mechanisms"]
    assert [(r["scales"], r["promote"]) for r in cells if not r["reachable"]] == [("tile", "never")] * 3
    for data in ("normal", "outliers", "uniform"):
        for scales in ("tile", "tensor"):
            promoted, never = (one(cells, data=data, scales=scales, promote=p) for p in (128, "never"))
            assert never["sum"]["rms"] > promoted["sum"]["rms"]
    for promote in (128, "never"):
        tile, tensor = (one(cells, data="outliers", scales=s, promote=promote) for s in ("tile", "tensor"))
        assert tensor["total"]["rms"] > 5 * tile["total"]["rms"]
    together = one(cells, data="uniform", scales="tile", promote=128)["total"]["rms"]
    assert one(cells, data="uniform", scales="tile", promote="never")["total"]["rms"] > 5 * together


def test_an_outlier_flushes_what_shares_its_scale(rows: Rows) -> None:
    shares = {scales: [row["flushed"] for row in rows["outliers"] if row["scales"] == scales] for scales in ("tile", "tensor")}
    assert all(tile <= tensor for tile, tensor in zip(shares["tile"], shares["tensor"], strict=True))
    assert shares["tensor"] == sorted(shares["tensor"])
    # One scale and 10^6: all below 2^-10 of 10^6 · max / 448, which no N(0,1) value here reaches.
    last = one(rows["outliers"], scales="tensor", factor=1e6)
    assert (last["flushed"], last["values"]) == (1.0, 1.0)
    # Under tiles only the outlier's own tile can be flushed: 127 of K - 1 values a row.
    assert 0.01 < one(rows["outliers"], scales="tile", factor=1e6)["flushed"] <= 127 / 1023


def test_casts_change_what_the_formats_say(rows: Rows) -> None:
    double, fp32, pow2, product = rows["casts"]
    assert 0.05 < double["changed"] < 0.075
    assert double["after"] > double["before"]
    assert fp32["changed"] > 0.9
    assert fp32["after"] > 1.2 * fp32["before"]
    assert pow2["changed"] < 1e-3
    assert pow2["after"] == pytest.approx(pow2["before"], rel=1e-3)
    assert product["after"] == pytest.approx(2**0.5 * product["before"], rel=0.1)


def test_only_scales_of_their_own_serve_tokens_of_unequal_size(rows: Rows) -> None:
    tile, block, one_scale = rows["gradient_scales"]
    assert tile["token"] < block["token"] < one_scale["token"]
    assert tile["lost"] == 0
    assert all(row["overall"] < 0.03 for row in (tile, block, one_scale))  # which hides it


def test_another_seed_gives_other_figures_and_the_same_one_the_same() -> None:
    first, again, other = (EXPERIMENTS["length"](study(seed)) for seed in (0, 0, 1))
    assert first == again
    assert first != other


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run of a small model leaves: a checkpoint, of its initial weights, and a tokenizer."""
    directory = tmp_path_factory.mktemp("run")
    sizes = {"vocab_size": 257, "dim": 64, "layers": 2, "heads": 2, "q_latent": 64, "kv_latent": 64, "head_nope": 16,
             "head_rope": 16, "head_v": 16, "ffn": 64, "expert_ffn": 64, "experts": 4, "groups": 2,
             "kept_groups": 1}  # fmt: skip
    words = [f"model.{key}={value}" for key, value in sizes.items()]
    config = load_config(["recipe=delayed", "training.context=32", f"run_dir={directory}", *words])
    model, optimizer = build(config, torch.device("cpu"))
    save_checkpoint(directory / "checkpoints", TrainingState(step=1), model, optimizer, config.to_dict())
    ByteTokenizer().save(directory / "tokenizer.json")
    return directory


@pytest.fixture(scope="module")
def taken(run: Path) -> dict[str, Any]:
    """Captured operands by recipe."""
    return {recipe: capture(run, recipe, 64, torch.device("cpu")) for recipe in ("rowwise", "dsv3")}


def test_operands_are_those_of_the_last_layer_under_the_recipe_asked_for(run: Path, taken: dict[str, Any]) -> None:
    for recipe, cols in (("rowwise", None), ("dsv3", 128)):
        found = taken[recipe]
        linears = {"q_a", "q_b", "kv_a", "kv_b", "out", "shared_gate_up", "shared_down", "expert_gate_up", "expert_down"}
        assert set(found) == {(op, gemm) for op in linears for gemm in ("fprop", "dgrad", "wgrad")}
        assert all(each.a.tile.cols == cols for each in found.values())
        assert found["q_a", "fprop"].a.shape == (64, 64)  # tokens, features
        assert found["q_a", "dgrad"].b.shape == (64, 64)
        assert found["q_b", "wgrad"].a.shape == (64, 64)  # heads' features, tokens
        assert found["expert_down", "wgrad"].a.shape[0] == 64
    assert describe_run(run) == "model tiny, trained under recipe delayed, step 1"


def test_rows_of_real_operands_name_linear_gemm_and_k(
    run: Path, taken: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules[EXPERIMENTS["operands"].__module__]
    monkeypatch.setattr(module, "capture", lambda path, recipe, tokens, device: taken[recipe])
    rows = EXPERIMENTS["operands"](study(run=run))
    assert {(row["recipe"], row["promote"]) for row in rows} == {("rowwise", "never"), ("rowwise", 128), ("dsv3", 128)}
    assert len(rows) == 3 * 27
    assert all(0 < row["rms"] < 0.01 for row in rows if row["k"] >= 64)
    assert all(row["samples"] <= 128 * 128 for row in rows)


def test_real_operands_are_summed_on_the_chip_too(run: Path, taken: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A chip whose first output is off: of sums of equal operands all others are equal."""
    module = sys.modules[EXPERIMENTS["operands"].__module__]
    monkeypatch.setattr(module, "capture", lambda path, recipe, tokens, device: taken[recipe])
    rows = EXPERIMENTS["operands"](study(run=run))
    assert all(row["gpu"] is None for row in rows)
    (table,) = tables_of({"rows": {**dict.fromkeys(EXPERIMENTS, ()), "operands": rows}, "known": []})
    assert not any("GPU" in head for head in table.heads)
    assert "All sums here are emulated." in table.note

    def chip_block_scaled(a: QuantizedTensor, b: QuantizedTensor, promote: Any) -> tuple[str, torch.Tensor]:
        got = accumulator.block_scaled(a, b, promote)
        got[0, 0] += 1
        return "x", got

    monkeypatch.setattr(sums, "chip_block_scaled", chip_block_scaled)
    rows = EXPERIMENTS["operands"](study(run=run))
    assert all(row["gpu"] == {"backend": "x", "equal": pytest.approx(1 - 1 / row["samples"])} for row in rows)
    (table,) = tables_of({"rows": {**dict.fromkeys(EXPERIMENTS, ()), "operands": rows}, "known": []})
    assert sum(head.endswith("GPU: equal") for head in table.heads) == 3
    assert all(len(row) == len(table.heads) for row in table.rows)
    assert "(backend x)" in table.note


@pytest.mark.parametrize("tile", [Tile(1, None), Tile(1, 128)])
def test_padding_at_the_end_of_k_is_no_part_of_it(tile: Tile) -> None:
    x = torch.randn(3, 384)
    x[:, 226:] = 0
    x[:, 225] = 1
    padded = quantize(x, E4M3, tile)
    cut, other = live_along_k(padded, quantize(torch.randn(5, 384) * (x[:1] != 0), E4M3, tile))
    assert cut.shape == (3, 226)
    assert other.shape == (5, 226)
    assert torch.equal(cut.decode(), padded.decode()[:, :226])


def test_experts_in_one_launch_give_the_operands_of_one_expert(
    run: Path, taken: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel for all experts is handed stacked weights and all rows; what is kept is one expert's, as from a loop."""

    def rows_together(a: Any, weights: Any, groups: Any, blocks: Any, out_dtype: Any, spec: Any, gemm: str) -> torch.Tensor:
        if (log := ledger.active()) is not None:
            log.note_kernel(spec.op, gemm, "together", a, weights)
        blocks = [(a.rows(128 * i, 128 * i + 128).decode(), weights[int(e)].decode()) for i, e in enumerate(groups)]
        return torch.cat([left @ right.mT for left, right in blocks]).to(out_dtype)

    def wgrad_together(dy: Any, x: Any, blocks: torch.Tensor, out_dtype: Any, spec: Any, into: None) -> torch.Tensor:
        if (log := ledger.active()) is not None:
            log.note_kernel(spec.op, "wgrad", "together", dy, x)
        ends = [128 * int(block) for block in blocks]
        parts = [dy.decode()[i:j].mT @ x.decode()[i:j] for i, j in pairwise(ends)]
        return torch.stack(parts).to(out_dtype)

    monkeypatch.setattr(backend, "grouped_rows", rows_together)
    monkeypatch.setattr(backend, "grouped_wgrad", wgrad_together)
    together = capture(run, "dsv3", 64, torch.device("cpu"))
    assert set(together) == set(taken["dsv3"])
    for key, found in together.items():
        assert (found.a.shape, found.b.shape) == (taken["dsv3"][key].a.shape, taken["dsv3"][key].b.shape), key


def test_a_damaged_checkpoint_is_refused_before_anything_is_measured(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "run"
    shutil.copytree(run, broken)
    (weights,) = broken.rglob("00000.safetensors")
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    assert cli.main(["drift", f"run={broken}", f"out={tmp_path / 'out'}", "device=cpu"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "00000.safetensors is damaged" in captured.err
    assert captured.err.count("\n") == 1


def test_without_a_run_or_a_checkpoint_there_are_none(tmp_path: Path, rows: Rows) -> None:
    assert rows["operands"] == []
    with pytest.raises(UserError, match=r"run=.* has no checkpoint"):
        describe_run(tmp_path)


def test_a_run_on_ids_without_text_is_refused_in_one_line(run: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").symlink_to(run / "checkpoints")
    IdTokenizer(257, 256).save(tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match=r"run=.* was trained on ids, and no text is known"):
        describe_run(tmp_path)


@pytest.mark.gpu
def test_the_chip_adds_as_the_emulation_says() -> None:
    given = study(device="cuda")
    for name in ("length", "interval"):
        rows = [row for row in EXPERIMENTS[name](given) if row["where"] == "gpu"]
        assert rows
        assert all(row["equal"] == 1.0 for row in rows if row["promote"] is not None)


@pytest.mark.gpu
def test_the_chip_sums_real_and_scaled_operands_as_the_emulation_says(run: Path) -> None:
    for name, count in (("operands", 3 * 27), ("mechanisms", 9)):
        rows = EXPERIMENTS[name](study(device="cuda", run=run))
        measured = [row["gpu"] for row in rows if row.get("reachable", True)]
        assert len(measured) == count
        assert all(found is not None and found["equal"] == 1.0 for found in measured)


@pytest.mark.gpu
def test_a_gpu_runs_the_whole_study_on_the_draws_of_a_cpu(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fewer_draws(monkeypatch)
    for name, experiment in EXPERIMENTS.items():
        here, there = experiment(study(run=run)), experiment(study(device="cuda", run=run))
        assert there, name
        if name in ("extremes", "cause", "mechanisms"):
            assert [row["samples"] for row in here] == [row["samples"] for row in there]
        if name in ("extremes", "cause"):
            assert all(a["rms"] == pytest.approx(b["rms"], rel=1e-6) for a, b in zip(here, there, strict=True))
