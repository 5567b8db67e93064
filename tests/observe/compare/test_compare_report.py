"""`compare report`: what it refuses, what it writes, and that its page needs nothing else."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from made_up import CORPUS, falling, make_run
from wandb_files import history, sessions

from dsv3fp8 import cli
from dsv3fp8.errors import UserError
from dsv3fp8.observe.compare.command import report
from dsv3fp8.observe.compare.group import log_group
from dsv3fp8.observe.compare.report import KeptBytes
from dsv3fp8.observe.compare.runs import find_runs, read_runs, refuse_unlike
from dsv3fp8.observe.kept_bytes import contract_bytes
from dsv3fp8.training.config import LoggingConfig

QUIET = "wandb=disabled"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three recipes, two seeds; tensorwise diverges in one of them."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        make_run(folder / f"bf16-seed{seed}", "bf16", seed)
        make_run(folder / f"dsv3-seed{seed}", "dsv3", seed, falling(seed, offset=0.002))
        bad = falling(seed)
        make_run(folder / f"tensorwise-seed{seed}", "tensorwise", seed, lambda s, f=bad: f(s) * (1 + (s > 150)))
    return folder


@pytest.fixture(scope="module")
def written(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report")
    assert report([str(runs), f"out={out}", QUIET]) == 0
    return out


def complaint(*paths: Path) -> str:
    with pytest.raises(UserError) as caught:
        refuse_unlike(read_runs(paths))
    return str(caught.value)


# what is refused


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"corpus": {"sha256": "ee" * 32}}, "corpus sha256 abababab and eeeeeeee"),
        ({"corpus": {"tokenizer": {**CORPUS["tokenizer"], "sha256": "ff" * 32}}}, "tokenizer sha256 cdcdcdcd and ffffffff"),
        ({"words": ("model.ffn=64",)}, "model.ffn 32 and 64"),
        ({"steps": 100}, "training.steps 200 and 100"),
        ({"words": ("training.batch=4",)}, "training.batch 2 and 4, tokens a step 64 and 128"),
        ({"words": ("schedule=cosine",)}, "schedule.name v3 and cosine, schedule.constant 0.67 and 0.0"),
        ({"words": ("training.validation_batches=3",)}, "training.validation_batches 12 and 3"),
    ],
)
def test_runs_that_were_not_trained_alike_are_refused_in_one_line(tmp_path: Path, other: dict[str, Any], named: str) -> None:
    first, second = make_run(tmp_path / "a"), make_run(tmp_path / "b", "dsv3", **other)
    assert complaint(first, second).startswith(f"{first} and {second} cannot be compared ({named}")


def test_what_bends_no_curve_may_differ(tmp_path: Path) -> None:
    words = (
        "training.validate_every=7",
        "training.log_every=2",
        "logging.project=other",
        "data.cache_dir=/elsewhere",
        "recipe.gemm=exact",
    )
    refuse_unlike(read_runs([make_run(tmp_path / "a"), make_run(tmp_path / "b", "dsv3", 5, words=words)]))


def test_the_same_run_twice_is_refused(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / name, "dsv3", 1) for name in "ab"]
    with pytest.raises(UserError, match=r"a and .*b are both dsv3 with seed 1: leave one of them out"):
        read_runs(paths)


def test_a_second_run_of_the_same_seed_says_so_in_its_directorys_name(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / name) for name in ("bf16-seed0", "bf16-seed0-again")]
    assert [run.recipe for run in read_runs(paths)] == ["bf16", "bf16 again"]
    with pytest.raises(UserError, match="are both bf16 again with seed 0"):
        read_runs([*paths, make_run(tmp_path / "third-again")])


def test_recipes_of_one_name_are_told_apart_by_the_keys_that_differ(tmp_path: Path) -> None:
    common = ("recipe.accumulator=hopper",)
    runs = read_runs(
        [
            make_run(tmp_path / "a", "dsv3", words=common),
            make_run(tmp_path / "b", "dsv3", words=(*common, "recipe.attention_cache=compute")),
            make_run(tmp_path / "c", "bf16", words=common),
        ]
    )
    assert [run.recipe for run in runs] == ["dsv3", "dsv3:attention_cache=compute", "bf16"]


@pytest.mark.parametrize("missing", ["corpus.json", "environment.json"])
def test_a_file_that_is_missing_or_broken_is_named(tmp_path: Path, missing: str) -> None:
    path = make_run(tmp_path / "a") / missing
    path.write_text("{half")
    with pytest.raises(UserError, match=f"{missing} is no JSON"):
        read_runs([tmp_path / "a"])
    path.unlink()
    with pytest.raises(UserError, match=f"{missing}: No such file or directory; a comparison needs"):
        read_runs([tmp_path / "a"])


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("corpus.json", lambda content: {}, "source is no value, not a text"),
        ("corpus.json", lambda content: content | {"sha256": 7}, "sha256 is 7, not a text"),
        ("corpus.json", lambda content: content | {"train": 5}, "train.tokens is no value, not a whole number"),
        ("corpus.json", lambda content: content | {"train": {"tokens": True}}, "train.tokens is true, not a whole number"),
        ("corpus.json", lambda content: content | {"bigram": []}, "bigram is [], not an object"),
        ("environment.json", lambda content: content | {"packages": None}, "packages is no value, not an object"),
        ("environment.json", lambda content: content | {"commit": 12}, "commit is 12, not a text"),
    ],
)
def test_a_file_without_what_a_run_writes_there_is_named_with_the_key(
    tmp_path: Path, name: str, damage: Callable[[dict[str, Any]], Any], said: str
) -> None:
    path = make_run(tmp_path / "a", steps=20) / name
    path.write_text(json.dumps(damage(json.loads(path.read_text()))))
    with pytest.raises(UserError, match=re.escape(f"{path}: {said}: restore the file, or leave the run out")):
        read_runs([tmp_path / "a"])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"step": 21, "loss": 2.0, "grad_norm": 1.0}', "line 21 has no skipped: delete the line"),
        ('{"step": 21}', "line 21 has no loss: delete the line"),
        ('{"step": 21, "loss": null, "grad_norm": 1.0, "skipped": 0}', "line 21 has no loss: delete the line"),
        ('{"step": 21, "loss": "abc", "grad_norm": 1.0, "skipped": 0}', 'line 21: loss="abc" is no number: delete the line'),
    ],
)
def test_a_record_without_what_training_logs_is_named_with_its_line(tmp_path: Path, line: str, said: str) -> None:
    path = make_run(tmp_path / "a", steps=20) / "metrics.jsonl"
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(UserError, match=re.escape(f"{path}, {said}")):
        read_runs([tmp_path / "a"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give run directories"),
        (["nowhere"], "nowhere: no run directory and none directly below it"),
        (["ou=x"], "ou: no such key; did you mean out?"),
        (["nonsense=3"], "nonsense: no such key; there are out, baseline, window, wandb, project, group, and run directories"),
        (["{runs}", "baseline=hybrid"], "baseline=hybrid: no run has that recipe; there are bf16, dsv3, tensorwise"),
        (["{runs}", "window=1000"], "window=1000: give the steps to smooth over, from 1 to the 200 of the runs"),
        (["{runs}", "wandb=maybe"], "wandb=maybe: expected one of"),
    ],
)
def test_a_report_that_cannot_be_made_is_one_line(
    runs: Path, words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = [word.format(runs=runs) for word in words]
    assert cli.main(["compare", "report", *told, f"out={tmp_path}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in " ".join(line.split())


@pytest.mark.parametrize("words", [["report", "windw=3"], ["recipes=bf16", "windw=3"]])
def test_the_key_that_was_meant_is_all_that_is_proposed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", *words]) == 2
    assert capsys.readouterr().err.strip().endswith("windw: no such key; did you mean window?")


def test_run_directories_are_found_in_a_directory_of_them(runs: Path) -> None:
    assert find_runs([runs]) == sorted(path for path in runs.iterdir())
    for paths in ([runs, runs / "bf16-seed0"], [runs / "bf16-seed0", runs / ".." / runs.name / "bf16-seed0"]):
        with pytest.raises(UserError, match="bf16-seed0 is given twice: give each run once"):
            find_runs(paths)


# what is written


def test_the_json_holds_the_study_and_no_nan(written: Path) -> None:
    data = json.loads((written / "report.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert [(r["name"], r["verdict"]) for r in data["recipes"]] == [
        ("bf16", "baseline"), ("dsv3", "within the band"), ("tensorwise", "diverged"),
    ]  # fmt: skip
    assert data["settings"]["tokens"] == 200 * 64
    assert data["settings"]["epochs"] == pytest.approx(200 * 64 / 30_000)
    assert data["settings"]["window"] == 10
    assert data["curves"]["training"]["step"][-1] == 200
    assert data["timings"][0]["tokens_per_second"] == pytest.approx(1003, abs=1)
    dsv3 = data["recipes"][1]
    assert dsv3["training"]["error_by_seed"].keys() == {"0", "1"}
    assert dsv3["training"]["error"] == pytest.approx(0.002, abs=1e-4)
    assert dsv3["kept_bytes_per_token"] < data["recipes"][0]["kept_bytes_per_token"]


def test_a_report_on_a_report_s_runs_is_the_same_but_for_the_machine(runs: Path, written: Path, tmp_path: Path) -> None:
    assert report([*map(str, sorted(runs.iterdir(), reverse=True)), f"out={tmp_path}", QUIET]) == 0
    again, before = (json.loads((folder / "report.json").read_text()) for folder in (tmp_path, written))
    assert again["recipes"][0] == before["recipes"][0]
    assert {r["name"]: r for r in again["recipes"]} == {r["name"]: r for r in before["recipes"]}


def test_kept_bytes_are_those_that_a_layer_of_the_run_s_model_keeps(runs: Path) -> None:
    bf16, dsv3, *_ = read_runs([runs / "bf16-seed0", runs / "dsv3-seed0"])
    kept = KeptBytes()
    for run in (bf16, dsv3):
        assert kept(run) == (contract_bytes(run.config.model, run.config.recipe), "")


def test_the_markdown_has_every_table(written: Path) -> None:
    text = (written / "report.md").read_text()
    for title in ("Verdicts", "Cost and behaviour", "Runs"):
        assert f"## {title}\n" in text
    assert re.search(r"\| tensorwise seed 1 \| diverged \| 200 of 200 \|", text)


def test_the_picture_is_a_png(written: Path) -> None:
    assert (written / "report.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_without_matplotlib_the_rest_is_written(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dsv3fp8.observe.compare.report.importlib.util.find_spec", lambda name: None)
    assert report([str(runs / "bf16-seed0"), f"out={tmp_path}", QUIET]) == 0
    assert "report.png is left out: matplotlib is not installed" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"report.json", "report.html", "report.md"}


class Page(HTMLParser):
    """Tags with their attributes, and the text within each table."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def count(self, tag: str, **attributes: str) -> int:
        return sum(name == tag and attributes.items() <= has.items() for name, has in self.tags)


def test_the_page_asks_for_nothing_from_elsewhere(written: Path) -> None:
    text = (written / "report.html").read_text()
    page = Page(text)
    assert not [tag for tag, has in page.tags if has.keys() & {"src", "href", "srcset", "action"}]
    assert "@import" not in text
    assert not re.findall(r"url\((?!#)", text)
    assert not re.findall(r"https?://|fetch\(|XMLHttpRequest", text)


def test_tables_and_charts_are_named_for_those_who_do_not_see_them(written: Path) -> None:
    page = Page((written / "report.html").read_text())
    tables, charts = page.count("table"), page.count("svg", role="img")
    assert (tables, charts) == (3, 8)
    assert page.count("caption") == tables
    assert page.count("th", scope="row") == 3 + 3 + 6
    assert page.count("title") == charts + 1
    assert page.count("desc") == charts
    ids = [has["id"] for _, has in page.tags if "id" in has]
    assert len(ids) == len(set(ids))
    labels = [has["aria-labelledby"] for _, has in page.tags if "aria-labelledby" in has]
    assert {name for label in labels for name in (label or "").split()} <= set(ids)


def test_names_from_the_runs_are_escaped(tmp_path: Path) -> None:
    make_run(tmp_path / "a", words=('model.name="<script>alert(1)</script>"',))
    assert report([str(tmp_path / "a"), f"out={tmp_path / 'out'}", QUIET]) == 0
    text = (tmp_path / "out" / "report.html").read_text()
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text


def test_the_group_in_wandb_has_every_run_and_the_report(
    runs: Path, written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    compared = read_runs([runs / "bf16-seed0", runs / "dsv3-seed0", runs / "dsv3-seed1"])
    compared[2].config.logging.group, compared[2].config.logging.wandb = "mine", "offline"
    monkeypatch.setattr(Path, "is_dir", lambda path, was=Path.is_dir: path.name == "wandb" or was(path))  # it is in the group
    data = json.loads((written / "report.json").read_text())
    for name in ("report.html", "report.png"):
        (tmp_path / name).write_bytes((written / name).read_bytes())
    log_group(LoggingConfig(wandb="offline", group="mine"), compared, data, tmp_path, print)
    found = {}
    for session in sessions(tmp_path, 3):
        (about,) = (record.run for record in session if record.HasField("run"))
        assert about.run_group == "mine"
        found[about.display_name] = about.run_id, history(session)
    assert found.keys() == {"bf16-seed0", "dsv3-seed0", "mine report"}
    _, points = found["dsv3-seed0"]
    assert [point["step"] for point in points] == list(range(1, 201))
    assert points[-1]["loss"] == compared[1].records[-1]["loss"]
    _, points = found["mine report"]
    errors = {
        point["step"]: point["relative_error/training/dsv3"] for point in points if "relative_error/training/dsv3" in point
    }
    curves = data["curves"]["training"]
    want = zip(curves["step"], curves["recipes"]["dsv3"]["error"], strict=True)
    assert errors == {step: error for step, error in want if error is not None}
    assert {key.split("/")[0] for key in points[-1]} >= {"band", "verdicts", "report", "curves"}


def test_without_wandb_a_line_says_so(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    said: list[str] = []
    log_group(LoggingConfig(group="mine"), read_runs([runs / "bf16-seed0"]), {}, tmp_path, said.append)
    (line,) = said
    assert line.startswith("W&B is not installed, so there is no group of the comparison")


PROBE = """
<pre id="probe"></pre><script>
const seen = {errors: window.failures, fetched: performance.getEntriesByType("resource").map(each => each.name)};
const dsv3 = document.querySelectorAll("nav button")[1];
dsv3.click();
seen.pressed = dsv3.getAttribute("aria-pressed");
seen.lit = [...new Set([...document.querySelectorAll(".charts .s.lit")].map(each => each.dataset.series))];
seen.faint = getComputedStyle(document.querySelector(".charts .s.s0")).opacity;
seen.strong = getComputedStyle(document.querySelector(".charts .s.s1")).opacity;
seen.empty = [...document.querySelectorAll("figure svg")].filter(each => each.getBoundingClientRect().height < 100).length;
seen.wide = document.documentElement.scrollWidth > document.documentElement.clientWidth;
seen.colours = [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color];
dsv3.click();
seen.after = document.querySelectorAll(".charts .s.lit").length + document.body.classList.length;
document.getElementById("probe").textContent = JSON.stringify(seen);
</script>
"""


@pytest.mark.browser
@pytest.mark.parametrize(("width", "dark"), [(1400, False), (420, True)])
def test_a_browser_shows_the_charts_and_lets_a_recipe_stand_out(
    browser: str, written: Path, tmp_path: Path, width: int, dark: bool
) -> None:
    text = (written / "report.html").read_text()
    watch = "<head><script>window.failures = []; addEventListener('error', e => window.failures.push(e.message));</script>"
    page = tmp_path / "page.html"
    page.write_text(text.replace("<head>", watch, 1).replace("</body>", PROBE + "</body>", 1))
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--window-size={width},900",
    ]
    flags += ["--blink-settings=preferredColorScheme=0"] if dark else []
    done = subprocess.run(
        [browser, *flags, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    found = re.search(r'<pre id="probe">(\{.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr
    seen = json.loads(found[1])
    assert seen["errors"] == []
    assert seen["fetched"] == []
    assert seen["pressed"] == "true"
    assert seen["lit"] == ["1"]
    assert float(seen["faint"]) < 0.5 < float(seen["strong"])
    assert seen["empty"] == 0
    assert not seen["wide"]
    assert seen["after"] == 0
    ground, ink = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in seen["colours"])
    assert (ground < ink) == dark
    assert math.fabs(ground - ink) > 400


@pytest.mark.parametrize("counted", [True, False])
def test_what_saturates_is_shown_where_it_was_counted(counted: bool, tmp_path: Path) -> None:
    """Records of runs older than the count do not have it."""
    make_run(tmp_path / "bf16-seed0")
    fields = (lambda step: {"saturated_share": 1e-6 * step if step % 10 == 0 else None}) if counted else None
    make_run(tmp_path / "static-seed0", "static", fields=fields)
    assert report([str(tmp_path), f"out={tmp_path / 'out'}", QUIET]) == 0
    data = json.loads((tmp_path / "out" / "report.json").read_text())
    shares = {recipe["name"]: recipe["saturated_share"] for recipe in data["recipes"]}
    assert shares == {"bf16": None, "static": pytest.approx(2e-4) if counted else None}
    assert ("Values beyond the largest code" in (tmp_path / "out" / "report.html").read_text()) == counted
    (row,) = re.findall(r"\| static \| [^\n]*0\.01 %[^\n]*", (tmp_path / "out" / "report.md").read_text())
    assert ("| 0.02 % |" in row) == counted
