"""`dsv3fp8 bench`: every kind at tiny sizes on a CPU, what it writes, and what it refuses."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv3fp8 import cli
from dsv3fp8.kernels import te
from dsv3fp8.kernels.backend import FASTER_UP_TO_K
from dsv3fp8.observe.bench import casts, command, hopper, linears, peers, timing
from dsv3fp8.observe.bench.operands import Setting, recipe_named
from dsv3fp8.observe.bench.rates import Case, Way
from dsv3fp8.observe.bench.sizes import TINY
from dsv3fp8.observe.bench.timing import Clock, race, run_case
from dsv3fp8.precision.recipe import Recipe
from dsv3fp8.schema import field_notes

CPU = Clock(torch.device("cpu"), rounds=2)
TABLES = {
    "kernels": {
        "casts", "fused", "exchange", "exchange, decided", "outer", "grouped fprop", "grouped dgrad", "grouped wgrad",
        "grouped wgrad, bytes", "dense fprop", "dense dgrad", "dense wgrad", "attention",
    },
    "linear": {"linear", "linear, launched by the host", "weight casts"},
    "layer": {
        "layer", "layer, weight casts", "layer, dense", "layer, grouped", "layer, attention", "layer, copy",
    },
    "step": {"step"},
}  # fmt: skip


def run(kind: str, out: Path, *words: str) -> dict[str, Any]:
    assert cli.main(["bench", kind, "device=cpu", "sizes=tiny", "rounds=1", f"out={out}", *words]) == 0
    data: dict[str, Any] = json.loads((out / f"{kind}.json").read_text(encoding="utf-8"))
    return data


@pytest.fixture(autouse=True)
def not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda layer: layer)  # compiling takes longer than all tests


@pytest.mark.parametrize("kind", ["kernels", "linear", "layer", "step"])
def test_each_kind_writes_its_tables(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = run(kind, tmp_path / "new" / "bench")
    assert set(data) == {"about", "notes", "tables", "roofline", "breakdowns"}
    about = data["about"]
    assert {"started", "device", "packages", "cuda", "commit", "command", "seconds", "recipes"} < set(about)
    assert (about["kind"], about["rounds"], about["sizes"]) == (kind, 1, "tiny")
    assert about["command"].startswith(f"dsv3fp8 bench {kind} device=cpu")
    assert {table["name"] for table in data["tables"]} == TABLES[kind]
    for table in data["tables"]:
        assert set(table) == {"name", "title", "unit", "peer", "about", "cases"}
        for case in table["cases"]:
            assert (set(case), case["failed"]) == ({"case", "ways", "failed"}, "")
            for name, way in case["ways"].items():
                assert way["failed"] == "", (table["name"], case["case"], name)
                assert len(way["samples"]) == 1
                assert way["ms"] > 0
                assert way["rate"] > 0
                assert (way["ratio"] is None) == (table["peer"] == "")
    page, text = (tmp_path / "new" / "bench" / f"{kind}.md").read_text(encoding="utf-8"), capsys.readouterr().out
    assert page.startswith(f"# bench {kind}\n")
    assert all(f"## {table['title']}\n" in page for table in data["tables"])
    assert "the figures mean nothing" in page
    assert f"see {tmp_path}" in text
    breaks = data["breakdowns"]
    subjects = {"layer": ["dsv3", "bf16", "torch BF16", "torch.compile BF16"], "step": ["dsv3", "bf16"]}.get(kind, [])
    assert list(breaks) == subjects
    assert list(data["roofline"].get("shares", [])) == (subjects if kind == "layer" else [])
    for name, found in breaks.items():
        assert found["launches"] > 50
        assert sum(part["share"] for part in found["kinds"].values()) == pytest.approx(1.0)
        assert f"## {name}: time by kernel" in page


def test_some_parts_alone_and_other_recipes(tmp_path: Path) -> None:
    assert {table["name"] for table in run("kernels", tmp_path, "only=attention")["tables"]} == {"attention"}
    data = run("linear", tmp_path, "recipes=rowwise", "only=graph")
    (table,) = data["tables"]
    assert "rowwise" in table["cases"][0]["ways"]


@pytest.mark.parametrize(
    ("only", "ways", "peer"),
    [
        ("recipes", ["bf16"], "bf16"),
        ("eager,recipes", ["bf16", "torch BF16"], "torch BF16"),
        ("compiled", ["torch.compile BF16"], "torch.compile BF16"),
    ],
)
def test_the_layer_beside_plain_torch(only: str, ways: list[str], peer: str, tmp_path: Path) -> None:
    data = run("layer", tmp_path, "recipes=bf16", f"only={only}")
    (table,) = data["tables"]
    assert table["peer"] == peer
    assert [list(case["ways"]) for case in table["cases"]] == [ways] * 2
    assert (data["breakdowns"], data["roofline"]) == ({}, {})


def test_a_layer_that_cannot_be_built_costs_no_other(tmp_path: Path) -> None:
    """Transformer Engine's, on a CPU."""
    data = run("layer", tmp_path, "recipes=te_blockwise,bf16", "only=recipes")
    assert data["notes"][-1] == f"te_blockwise is left out: recipe.linears=te: cpu has no FP8 tensor cores: {te.REMEDY}"
    assert [list(case["ways"]) for case in data["tables"][0]["cases"]] == [["bf16"]] * 2


def test_a_model_that_cannot_be_built_costs_no_other(tmp_path: Path) -> None:
    data = run("step", tmp_path, "recipes=dsv3,te_blockwise,bf16", "only=rates")
    assert data["notes"][-1].startswith("te_blockwise is left out: recipe.linears=te: cpu has no FP8 tensor cores: take ")
    (table,) = data["tables"]
    assert (list(table["cases"][0]["ways"]), table["peer"]) == (["dsv3", "bf16"], "bf16")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["layer", "recipes=te_blockwise", "only=recipes"], "te_blockwise is left out: recipe.linears=te: cpu has no FP8"),
        (["layer", "recipes=te_blockwise", "only=recipes,breakdown,weights"], "te_blockwise is left out: "),
        (["step", "recipes=te_blockwise"], "te_blockwise is left out: recipe.linears=te: cpu has no FP8"),
        (["linear", "recipes=fp32", "only=weights"], "256 → 128: fp32 casts no weight; give another recipe"),
    ],
)
def test_nothing_measured_is_an_error_that_writes_nothing(
    words: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / f"{words[0]}.json").write_text("of before")
    assert cli.main(["bench", *words, "device=cpu", "sizes=tiny", "rounds=1", f"out={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"dsv3fp8: error: bench {words[0]}: nothing could be measured, and nothing is written: {why}")
    assert error.count("\n") == 1
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(f"{words[0]}.json", "of before")]


@pytest.mark.parametrize(
    ("name", "said", "upstream"),
    [
        ("dsv3", ": both casts of dY, the cast of x and its re-tile are counted, weight casts are not", True),
        ("blockwise_grad", ": the cast of dY, the cast of x and its re-tile are counted, weight casts are not", True),
        ("tensorwise", ": the cast of dY and the cast of x are counted, weight casts are not", True),
        ("bf16", " quantizes neither x nor dY: there is no cast of theirs to count, and weights are ready beforehand", False),
    ],
)
def test_a_linear_says_which_casts_its_recipe_counts(name: str, said: str, upstream: bool) -> None:
    tables = linears.linear_tables(Setting(TINY, CPU, recipe_named(name)))
    arrive = f"; {linears.UPSTREAM}: x and dY arrive as codes" if upstream else ""
    retiled = ", the re-tile of x is counted" if "re-tile" in said else ""
    assert tables["graph"].about == f"256 tokens; {name}{said}{arrive}{retiled}"
    ways = [way.name for way in tables["graph"].cases[0].build()]
    assert ways == [name, linears.PEER, *([linears.UPSTREAM] if upstream else [])]
    written = "a copy in BF16" if name == "bf16" else "codes for fprop and for dgrad"
    assert f"read once, {written} written" in tables["weights"].about


def test_what_was_measured_before_an_interruption_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(setting: Setting) -> list[Any]:
        raise KeyboardInterrupt

    monkeypatch.setitem(command.KERNELS, "dense", interrupt)
    words = ["device=cpu", "sizes=tiny", "rounds=1", f"out={tmp_path}", "only=attention,dense,casts"]
    assert cli.main(["bench", "kernels", *words]) == 1
    data = json.loads((tmp_path / "kernels.json").read_text(encoding="utf-8"))
    assert [table["name"] for table in data["tables"]] == ["attention"]
    assert data["notes"][-1] == "interrupted: this is what was measured until then"


def test_the_roofline_alone_needs_no_layer(tmp_path: Path) -> None:
    data = run("layer", tmp_path, "only=roofline")
    assert {table["name"] for table in data["tables"]} == {"layer, dense", "layer, grouped", "layer, attention", "layer, copy"}
    assert data["roofline"]["shares"] == {}
    assert data["roofline"]["ms"] == pytest.approx(sum(part["ms"] for part in data["roofline"]["parts"]))
    page = (tmp_path / "layer.md").read_text(encoding="utf-8")
    assert "## Roofline of the layer\n\nA yardstick, not a bound: " in page


def test_pages_are_written_again_from_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("linear", tmp_path, "only=weights")
    page = (tmp_path / "linear.md").read_text(encoding="utf-8")
    (tmp_path / "linear.json").rename(tmp_path / "linear_of_today.json")
    (tmp_path / "other.json").write_text("[1]")
    (tmp_path / "linear.md").unlink()
    capsys.readouterr()
    assert cli.main(["bench", "page", f"out={tmp_path}"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/linear_of_today.md\n"
    assert (tmp_path / "linear_of_today.md").read_text(encoding="utf-8") == page
    assert not (tmp_path / "other.md").exists()
    (tmp_path / "linear_of_today.json").unlink()
    assert cli.main(["bench", "page", f"out={tmp_path}"]) == 2
    assert "there is no JSON of a bench in it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{broken", "is not JSON: Expecting property name"),
        ("", "is not JSON: Expecting value"),
        ("\udcff", "is not JSON: 'utf-8' codec can't decode"),
        ("[" * 100_000, "is not JSON: "),
        ('{"about": {"kind": "kernels"}}', "is no whole bench kernels: it has no 'packages'; "),
        ('{"about": {"kind": "step", "packages": []}}', "is no whole bench step: 'list' object has no attribute 'items'; "),
    ],
)
def test_damaged_json_is_named_before_any_page_is_written(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("linear", tmp_path, "only=weights")
    (tmp_path / "linear.md").write_text("of before")
    (tmp_path / "torn.json").write_text(text, encoding="utf-8", errors="surrogateescape")
    capsys.readouterr()
    assert cli.main(["bench", "page", f"out={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"dsv3fp8: error: {tmp_path}/torn.json {said}")
    assert error.endswith("; measure it again, or move the file to another directory\n")
    assert error.count("\n") == 1
    assert (tmp_path / "linear.md").read_text() == "of before"


def test_a_run_that_lost_one_number_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = run("linear", tmp_path, "only=weights")
    for damaged in ({"rate": "fast"}, {}, {"rate": 10**400}):
        data["tables"][0]["cases"][0]["ways"]["ours"] = damaged
        (tmp_path / "linear.json").write_text(json.dumps(data))
        capsys.readouterr()
        assert cli.main(["bench", "page", f"out={tmp_path}"]) == 2
        assert f"{tmp_path}/linear.json is no whole bench linear: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["[1]", "null", '{"about": null}', '{"about": {"kind": ["kernels"]}}', '{"about": {"kind": "x"}}']
)
def test_json_of_other_things_is_left_alone(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text(text)
    (tmp_path / "folder.json").mkdir()
    assert cli.main(["bench", "page", f"out={tmp_path}"]) == 2
    assert capsys.readouterr().err == (
        f"dsv3fp8: error: out={tmp_path}: there is no JSON of a bench in it; give the directory that one was written to\n"
    )


def test_the_commit_is_given_where_the_source_has_no_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv3fp8.training.run_directory.source_commit", lambda directory: None)
    assert run("kernels", tmp_path, "only=attention", "commit=abc1234")["about"]["commit"] == "abc1234"
    assert run("kernels", tmp_path, "only=attention")["about"]["commit"] is None


def test_peers_that_are_not_there_get_one_line_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "MODULES", {peers.TRANSFORMER_ENGINE: "no_such_module", peers.DEEP_GEMM: "no_other"})
    data = run("linear", tmp_path, "peers=true")
    assert data["notes"][:2] == [
        "Transformer Engine is left out: No module named 'no_such_module'",
        "DeepGEMM is left out: No module named 'no_other'",
    ]
    assert all("Transformer Engine" not in case["ways"] for table in data["tables"] for case in table["cases"])


def test_a_way_that_fails_leaves_its_reason_and_the_others() -> None:
    def no() -> list[Any]:
        raise ValueError("no kernel\nfor this")

    calls = {"late": 0}

    def late() -> None:
        calls["late"] += 1
        if calls["late"] > 2:
            raise RuntimeError("gone")

    ways = [Way("good", lambda: [lambda: None]), Way("bad", no), Way("late", lambda: [late])]
    found = race(ways, CPU)
    assert found["good"].ms is not None
    assert (found["bad"].ms, found["bad"].failed) == (None, "ValueError: no kernel for this")
    assert (found["late"].ms, found["late"].failed) == (None, "RuntimeError: gone")


def test_a_case_whose_operands_fail_is_one_line() -> None:
    def build() -> list[Way]:
        raise torch.OutOfMemoryError("no room")

    assert run_case(Case("c", 1.0, build), CPU) == ([], {}, "OutOfMemoryError: no room")


def test_buffers_rotate_until_they_are_larger_than_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        L2_cache_size = 60_000_000

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    cuda = Clock(torch.device("cuda", 0))
    assert [cuda.sets(size) for size in (200_000_000, 90_000_000, 45_000_000, 1)] == [1, 2, 4, 8]
    assert CPU.sets(1) == 1
    assert [timing._calls_in_a_sample(each, 6.0, sets) for each, sets in ((1.0, 1), (100.0, 1), (1.0, 4), (1e-9, 3))] == [
        6, 1, 8, 63,
    ]  # fmt: skip


def test_each_part_names_its_bytes_as_the_tensors_have_them() -> None:
    """The bytes that the casts' rows state are those of the tensors that go in and come out."""
    setting = Setting(TINY, CPU, recipe_named("dsv3"))
    for case in casts.cast_tables(setting)[0].cases:
        ours = case.build()[0]
        (call,) = ours.make()
        sources = [cell.cell_contents for cell in call.__closure__ or ()]
        tensors = [x for x in sources if isinstance(x, torch.Tensor) or hasattr(x, "codes")]
        made: Any = call()
        results = made if isinstance(made, tuple) else (made,)
        assert case.work == sum(x.nbytes for x in (*tensors, *results)), case.name


@pytest.mark.parametrize(("kind", "needed"), [("kernels", "a Hopper GPU"), ("scale", "Hopper GPUs")])
def test_without_a_hopper_gpu_one_line_says_what_is_needed(
    kind: str, needed: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hopper, "hopper_reason", lambda device: "cpu has no FP8 tensor cores")
    assert cli.main(["bench", kind, f"out={tmp_path}/out"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        f"dsv3fp8: error: bench {kind} needs {needed} (H100, H200) and torch for CUDA 12.9 or later: "
        "cpu has no FP8 tensor cores; device=cpu sizes=tiny tries the command out\n"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["kernel"], "bench kernel: there are kernels, linear, layer, step, scale, page"),
        (["kernels", "fast"], "fast: expected key=value, such as rounds=3 out=runs/bench"),
        (["kernels", "round=3"], "round: no such key; did you mean rounds?"),
        (["kernels", "rounds=0"], "rounds=0 must be at least 1"),
        (["kernels", "only=gemms"], "only=gemms: kernels has casts, fused, exchange, outer, grouped, dense, attention"),
        (["layer", "only=casts"], "only=casts: layer has recipes, eager, compiled, weights, roofline, breakdown"),
        (["layer", "recipes="], "recipes is empty; give names with commas, such as recipes=dsv3,bf16"),
        (["layer", "recipes=bf16,bf16"], "recipes=bf16,bf16 names one twice"),
        (["layer", "recipes=dsv4", "device=cpu", "sizes=tiny"], "recipe=dsv4"),
        (["step", "model=large"], "model=large: expected one of small, medium"),
        (["step", "device=cpu"], "device=cpu measures nothing of use at full size: add sizes=tiny"),
        (["step", "device=tpu"], "device=tpu must be one of"),
        (["step", "peers=maybe"], "peers=maybe: expected true or false"),
        (["page", "only=foo"], "only=foo has no effect on bench page: leave it out"),
        (
            ["page", "rounds=3", "device=cpu", "sizes=tiny"],
            "rounds=3 has no effect on bench page: leave it out; device=cpu has",
        ),
        (["layer", "model=small"], "model=small has no effect on bench layer: leave it out"),
        (["layer", "only=weights,eager"], "only=weights: it is of layers that run, so pick them too: only=recipes,weights"),
        (["layer", "only=breakdown"], "only=breakdown: it is of layers that run, so pick them too: only=recipes,breakdown"),
        (["linear", "recipes=te_blockwise"], "is a column beside another recipe's: recipes=dsv3 peers=true"),
        (["linear", "recipes=dsv3,te_blockwise"], "bench linear recipes=te_blockwise: Transformer Engine's Linear is a column"),
        (["kernels", "recipes=te_blockwise"], "its linears are Transformer Engine's, kernels are ours: leave it out"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    words: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *words, f"out={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("dsv3fp8: error: ")
    assert complaint in error
    assert error.count("\n") == 1


def test_what_fast_means_is_said_as_the_rule_that_chooses() -> None:
    """Not as the fastest for each shape, which `bench kernels only=dense` shows that it is not."""
    rule = f"Gluon for BF16 results up to K = {FASTER_UP_TO_K}, else cuBLASLt"
    root = Path(__file__).parents[3]
    texts = [(root / name).read_text(encoding="utf-8") for name in ("configs/recipe/base.yaml", "docs/recipes.md")]
    assert all(rule in text for text in (*texts, field_notes(Recipe)["gemm"]))


def test_a_place_that_cannot_be_written_to_is_named_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["bench", "kernels", "device=cpu", "sizes=tiny", f"out={tmp_path}/file"]) == 2
    captured = capsys.readouterr()
    assert f"out={tmp_path}/file: " in captured.err
    assert captured.out == ""


def test_help_lists_every_kind_and_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {word} " in text for word in (*command.KINDS, "out", "rounds", "peers", "only", "recipes", "model"))
    assert cli.main(["bench"]) == 2
    assert cli.main(["--help"]) == 0
    assert re.search(r"^  bench +Time kernels, a linear", capsys.readouterr().out, re.MULTILINE)
