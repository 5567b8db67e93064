"""`dsv3fp8 map`: what it writes, what it refuses, and its page in a browser."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from observed_block import TOKENS, drawing, observed, records_of

from dsv3fp8 import cli
from dsv3fp8.observe.map import command
from dsv3fp8.observe.map.difference import compare
from dsv3fp8.observe.map.geometry import arrange
from dsv3fp8.observe.map.html import page
from dsv3fp8.observe.map.observed import Observed
from dsv3fp8.observe.map.run import observe_block
from dsv3fp8.precision.ledger import Ledger

SMALL = ["model.dim=64", "model.ffn=64", "model.expert_ffn=64", "model.q_latent=64", "model.kv_latent=64", "tokens=16"]


def test_it_writes_a_table_and_three_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "map"
    assert cli.main(["map", "against=bf16", f"out={out}", *SMALL]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^  expert_quantize +e4m3 +bf16 +e4m3 1×128 ", text, re.MULTILINE)
    assert re.search(r"^router +", text, re.MULTILINE) is None  # fp32 under both
    assert re.search(r"^out +wgrad +e4m3 → fp32 +bf16 → fp32", text, re.MULTILINE)
    assert sorted(path.name for path in out.iterdir()) == ["map.html", "map.json", "map.svg"]
    data = json.loads((out / "map.json").read_text(encoding="utf-8"))
    assert (data["recipe"], data["against"]["recipe"], data["layer"], data["tokens"]) == ("dsv3", "bf16", "moe", 16)
    assert data["missing"] == []
    ledger = Ledger.from_dict(data["ledger"])
    assert ledger.kept_bytes() / 16 == data["kept_bytes_per_token"]
    assert ledger.find("router")[0].computes_in == "fp32"
    changed = {(change["node"], change["column"]): change for change in data["difference"]}
    assert changed["q_b", "forward"]["here"].startswith("e4m3 →")
    assert changed["q_b", "forward"]["there"].startswith("bf16 →")
    assert ("router", "forward") not in changed


def test_keys_of_the_recipe_and_the_layer_reach_the_block(tmp_path: Path) -> None:
    words = [f"out={tmp_path}", "layer=dense", "recipe.attention_cache=compute", *SMALL]
    assert cli.main(["map", *words]) == 0
    data = json.loads((tmp_path / "map.json").read_text(encoding="utf-8"))
    nodes = {record["node"] for record in data["ledger"]["records"]}
    assert "gate_up" in nodes
    assert "router" not in nodes
    kept = [t for record in data["ledger"]["records"] for t in record["kept"] if t["name"] == "attn_cache"]
    assert {tensor["format"] for tensor in kept} == {"bf16"}


def test_a_ledger_with_a_hole_is_said_aloud_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_a_hole(*arguments: Any) -> Ledger:
        ledger = observe_block(*arguments)
        ledger.records = [record for record in ledger.records if record.node != "out.requant"]
        return ledger

    monkeypatch.setattr(command, "observe_block", with_a_hole)
    assert cli.main(["map", f"out={tmp_path}", *SMALL]) == 1
    assert "MISSING from the ledger: w:out.requant." in capsys.readouterr().out
    assert json.loads((tmp_path / "map.json").read_text(encoding="utf-8"))["missing"] == ["w:out.requant"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tokens=0"], "tokens=0 must be at least 1"),
        (["tokens=2000"], "tokens=2000 exceeds model.context=1024"),
        (["against=bf61"], "against=bf61: no such recipe; did you mean bf16?"),
        (["layer=moo"], "layer"),
        (["layer=dense", "model.dense_layers=0"], "layer=dense: model=tiny has no such layer"),
        (["against=nope"], "against=nope: no such recipe; there are bf16"),
        (["token=3"], "token: no such key; did you mean tokens?"),
        (["foo=1"], "foo: no such key; there are against, layer, tokens, out, seed, device, model, recipe"),
        ([f"out={__file__}"], "give a directory that can be written to"),
        (["dsv3"], "dsv3: expected key=value"),
        (["device=cuda:9"], "device=cuda:9 must be one of"),
        (["seed=-1"], "seed=-1 must be at least 0"),
        (["out=/proc/version/map", *SMALL], "out=/proc/version/map: "),
    ],
)
def test_mistakes_are_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["map", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_help_lists_the_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["map", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {key} " in text for key in ("against", "layer", "tokens", "out", "seed", "device"))


def test_the_difference_counts_what_only_one_run_has() -> None:
    changes = {(c.column, c.node): c for c in compare(observed("bf16"), observed("dsv3"))}
    assert changes["backward", "out.cast"].here == ""
    assert changes["backward", "out.cast"].there.startswith("e4m3 →")
    assert changes["forward", "router"].equal
    q_b = changes["forward", "q_b"]
    assert q_b.kept_here == 2 * 24  # the latent, BF16
    assert q_b.kept_there == 24 + 4  # codes and one scale


def test_a_ledger_read_back_from_json_draws_the_same() -> None:
    records = json.loads(json.dumps(records_of("dsv3")))
    again = arrange(Observed.from_records(records, TOKENS, "moe", "dsv3", "nano"))
    assert again.placed == drawing("dsv3").placed


def test_the_page_asks_nothing_of_the_network() -> None:
    text = page(drawing("dsv3", against="bf16"), [])
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r'(src|href)="(?!data:)', text)
    assert "</script" not in text.partition('id="details">')[2].partition("</script>")[0]


PROBE = """
<script>
const seen = {};
for (const cell of document.querySelectorAll(".cell")) {
  cell.focus();
  seen[cell.dataset.id] = document.querySelector("aside").innerText;
}
document.querySelector('[data-id="f:attention"]').dispatchEvent(new MouseEvent("mouseenter"));
const lit = [...document.querySelectorAll(".edge.lit")].map(edge => [edge.dataset.from, edge.dataset.to]);
const fetched = performance.getEntriesByType("resource").map(entry => entry.name);
const result = document.createElement("pre");
result.id = "probe";
result.textContent = JSON.stringify({seen, lit, fetched, errors: window.errors,
  hovered: document.querySelector("aside h2").textContent});
document.body.append(result);
</script>
"""
WATCH = """<script>window.errors = []; window.onerror = message => { window.errors.push(message); };
console.error = (...words) => { window.errors.push(words.join(" ")); };</script>"""


@pytest.mark.browser
def test_a_browser_shows_the_details_of_every_box_and_chip(browser: str, tmp_path: Path) -> None:
    drawn = drawing("dsv3", against="bf16")
    text = page(drawn, compare(drawn.observed, observed("bf16")))
    watched = tmp_path / "map.html"
    watched.write_text(text.replace("<head>", f"<head>{WATCH}").replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--enable-logging=stderr",
    ]
    done = subprocess.run(
        [browser, *flags, "--dump-dom", watched.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr
    result = json.loads(found[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))
    assert result["errors"] == []
    assert ":CONSOLE" not in done.stderr
    assert result["fetched"] == []
    assert result["seen"].keys() == drawn.placed.keys()
    attention = result["seen"]["f:attention"]
    for words in ("attention, forward", "computes in bf16", "backend reference", "keeps attn_cache: e5m6 1×128, pow2 scales",
                  "under bf16:", "DeepSeek-V3 report §3.3.2"):  # fmt: skip
        assert words in attention
    assert "bytes" in result["seen"]["f:x0"]
    assert result["hovered"] == "attention, forward"
    assert ["f:attention", "f:attn_cache"] in result["lit"]
