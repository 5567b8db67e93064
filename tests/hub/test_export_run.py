"""Exported directories: what `transformers` makes of them, what lies in the files, and what is refused."""

import json
import logging
import os
import re
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decoding import without_codes
from published import under_our_names
from safetensors.torch import save_file
from support import recipe, relative
from torch import Tensor
from trained import NANO, V2, make_run, tensors_in
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from dsv3fp8.config import load_config
from dsv3fp8.errors import UserError
from dsv3fp8.hub import files as hub_files
from dsv3fp8.hub.export_run import ExportConfig, main
from dsv3fp8.hub.import_run import main as import_main
from dsv3fp8.model.transformer import Transformer
from dsv3fp8.training.checkpoint import Checkpoint
from dsv3fp8.training.generate import GenerateConfig, load, stream
from dsv3fp8.training.loop import train

FRESH = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
prompt = tokenizer("line 4 of", return_tensors="pt")
with torch.no_grad():
    torch.save({"prompt": prompt["input_ids"], "logits": model(prompt["input_ids"]).logits}, sys.argv[2])
text = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0]
print(tokenizer.decode(text[prompt["input_ids"].shape[1]:], skip_special_tokens=True), end="")
"""


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)


def export(run: Path, out: Path, *words: str) -> Path:
    assert main([str(run), f"out={out}", *words]) == 0
    return out


def loaded(directory: Path) -> tuple[Any, set[str]]:
    """(their model, the keys it did not take); nothing may be missing."""
    model, report = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", output_loading_info=True)
    assert not [key for key in report["missing_keys"] if model.state_dict()[key].numel()]
    assert not report["mismatched_keys"]
    return model.eval(), set(report["unexpected_keys"])


def logits_of(theirs: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return theirs(ids).logits


def ids_for(model: Transformer, length: int = 24) -> Tensor:
    return torch.randint(model.vocab_size, (2, length), generator=torch.Generator().manual_seed(1))


def test_a_trained_run_says_the_same_in_a_fresh_process_and_trains_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Train, export, load with transformers, import again, train: the loss goes on where it was."""
    for file in range(4):
        (tmp_path / f"{file}.txt").write_text("".join(f"line {line * file % 97} of file {file}\n" for line in range(300)))
    common = [f"data.paths={tmp_path}/*.txt", f"data.cache_dir={tmp_path}/cache", "data=files", "logging=quiet", "recipe=fp32"]
    common += ["training.batch=2", "training.context=32", "training.validation_batches=2", "schedule.warmup=1"]
    sizes = ["model.vocab_size=null", "model.groups=4", "model.kept_groups=2", "optimizer.lr=0.01"]
    words = [word for word in NANO if word.startswith("model.")] + sizes
    run, out = tmp_path / "run", tmp_path / "out"
    assert train(load_config([*words, *common, "training.steps=12", f"run_dir={run}"])) == 0
    export(run, out, "format=fp32")

    done = subprocess.run(
        [sys.executable, "-c", FRESH, str(out), str(tmp_path / "theirs.pt")],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    theirs = torch.load(tmp_path / "theirs.pt")
    config = GenerateConfig(run=str(run), prompt="line 4 of", temperature=0.0, tokens=20)
    model, tokenizer, window = load(config)
    assert theirs["prompt"].tolist() == [[tokenizer.eod, *tokenizer.encode("line 4 of").tolist()]]
    assert relative(model.logits(theirs["prompt"]), theirs["logits"]) < 1e-5
    assert done.stdout == "".join(stream(model, tokenizer, config, window))
    assert len(done.stdout) > 5

    # The same weights over the same new stream of windows: as a fork of the run, and imported.
    more = ["optimizer.lr=0.01", "training.seed=3", "training.steps=13"]
    fork = load_config([*words, *common, *more, "resume=fork", f"run_dir={run}"])
    assert import_main([str(out), f"run_dir={tmp_path}/again", *common, *more, "training.steps=1"]) == 0
    assert train(load_config([f"config={tmp_path}/again/config.yaml"])) == 0
    assert train(fork) == 0
    metrics = [json.loads((path / "metrics.jsonl").read_text().splitlines()[-1]) for path in (tmp_path / "again", run)]
    assert metrics[0]["loss"] == metrics[1]["loss"]
    assert metrics[0]["grad_norm"] == metrics[1]["grad_norm"]


MODELS = {
    "untied, with MTP": (),
    "tied": ("model.tied_head=true",),
    "no MTP, no query latent": ("model.mtp_depth=0", "model.q_latent=null"),
    "two MTP modules": ("model.mtp_depth=2",),
    "all dense": ("model.dense_layers=2", "model.mtp_depth=0"),
    "all MoE, no shared expert": ("model.dense_layers=0", "model.shared_experts=0"),
    "V2, two shared experts": (*V2, "model.shared_experts=2", "model.route_scale=1.5"),
    "yarn": ("model.context=256", "model.yarn.factor=8", "model.yarn.original_context=64", "model.yarn.mscale=0.707"),
    "576, 1408 and 200": (
        "model.dim=200", "model.kv_latent=512", "model.head_rope=64", "model.expert_ffn=1408", "model.ffn=301",
        "model.experts=4", "model.groups=2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_same_logits(name: str, tmp_path: Path) -> None:
    """FP32 from several shards, and FP8 decoded by the published rule: every tensor is taken, those of MTP apart."""
    model = make_run(tmp_path / "run", "recipe=fp32", *MODELS[name])
    ids = ids_for(model)
    want = model.logits(ids)
    theirs, unexpected = loaded(export(tmp_path / "run", tmp_path / "fp32", "format=fp32", "shard=0.0002"))
    assert len(list((tmp_path / "fp32").glob("*.safetensors"))) > 1
    assert {key.split(".")[2] for key in unexpected} == {str(2 + depth) for depth in range(model.config.mtp_depth)}
    assert relative(logits_of(theirs, ids), want) < 1e-5

    decoded = without_codes(tensors_in(export(tmp_path / "run", tmp_path / "fp8", "format=fp8")))
    theirs, _ = loaded(plain_copy(tmp_path / "fp8", tmp_path / "decoded", decoded))
    rounded = make_like(model, decoded)
    assert relative(logits_of(theirs, ids), rounded.logits(ids)) < 1e-5
    assert relative(rounded.logits(ids), want) > 1e-3  # it is FP8 that was compared


@pytest.mark.parametrize("name", ["untied, with MTP", "V2, two shared experts"])
def test_transformers_turns_fp8_files_into_the_values_that_they_stand_for(name: str, tmp_path: Path) -> None:
    """As they are, with accelerate, on a CPU: the decoded values, rounded to BF16."""
    make_run(tmp_path / "run", *MODELS[name])
    out = export(tmp_path / "run", tmp_path / "fp8", "format=fp8")
    got, _ = loaded(out)
    want, _ = loaded(plain_copy(out, tmp_path / "decoded", without_codes(tensors_in(out))))
    values = want.state_dict()
    assert got.state_dict().keys() == values.keys()
    for key, tensor in got.state_dict().items():
        torch.testing.assert_close(tensor, values[key].to(tensor.dtype), rtol=0, atol=0, msg=key)


def plain_copy(source: Path, target: Path, tensors: dict[str, Tensor]) -> Path:
    """A directory of the same model with other tensors, none of them FP8."""
    target.mkdir()
    settings = json.loads((source / "config.json").read_text())
    del settings["quantization_config"]
    (target / "config.json").write_text(json.dumps(settings | {"torch_dtype": "float32"}))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors", {"format": "pt"})
    return target


def make_like(model: Transformer, tensors: dict[str, Tensor]) -> Transformer:
    """The model with these published tensors."""
    copy = Transformer(model.config, recipe("fp32"))
    copy.load_state_dict(dict(model.state_dict()) | under_our_names(tensors, model.config))
    return copy.eval()


def test_multi_token_prediction_is_under_its_published_names_and_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own MTP module from the file, fed the hidden state before the final norm, gives our loss.

    It looks for such modules in layer 61, where V3 has its one.
    """
    monkeypatch.setattr(MtpModel, "get_mtp_weights_regex", classmethod(lambda *_: re.compile(r"model\.layers\.2\.")))
    model = make_run(tmp_path / "run", "recipe=fp32")
    theirs, _ = loaded(export(tmp_path / "run", tmp_path / "out", "format=fp32"))
    module = MtpModel.from_pretrained(theirs)
    hidden: list[Tensor] = []
    theirs.model.norm.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    tokens = ids_for(model, 25)
    logits_of(theirs, tokens[:, :-1])
    with torch.no_grad():
        positions = torch.arange(23)[None].expand(2, -1)
        out = module.forward_layer(0, hidden[0][:, :-1], positions, None, input_ids=tokens[:, 1:-1])
        logits = theirs.lm_head(out)
        want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 2:].flatten(), reduction="sum")
        got = model(tokens).mtp[0]
    assert relative(got, want) < 1e-5
    files = tensors_in(tmp_path / "out")
    assert torch.equal(files["model.layers.2.embed_tokens.weight"], files["model.embed_tokens.weight"])
    assert torch.equal(files["model.layers.2.shared_head.head.weight"], files["lm_head.weight"])


def header_of(path: Path) -> dict[str, dict[str, Any]]:
    """A safetensors header, read by its definition: eight bytes of length, then JSON."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(length))


@pytest.mark.parametrize("trained", ["bf16", "fp32"])
@pytest.mark.parametrize("number_format", ["bf16", "fp8", "fp32"])
def test_types_on_disk_are_those_asked_for(trained: str, number_format: str, tmp_path: Path) -> None:
    """K18, T09: whatever the recipe; router and its bias are FP32 in every one."""
    make_run(tmp_path / "run", f"recipe={trained}")
    out = export(tmp_path / "run", tmp_path / "out", f"format={number_format}")
    header = header_of(out / "model.safetensors")
    assert header.pop("__metadata__") == {"format": "pt"}
    high = {"bf16": "BF16", "fp8": "BF16", "fp32": "F32"}[number_format]
    for name, entry in header.items():
        linear = "_proj" in name and "eh_proj" not in name
        if name.endswith("_scale_inv") or ".mlp.gate." in name:
            wanted = "F32"
        else:
            wanted = "F8_E4M3" if linear and number_format == "fp8" else high
        assert entry["dtype"] == wanted, name
        assert (f"{name}_scale_inv" in header) == (wanted == "F8_E4M3"), name
    settings = json.loads((out / "config.json").read_text())
    assert settings["torch_dtype"] == {"BF16": "bfloat16", "F32": "float32"}[high]
    assert ("quantization_config" in settings) == (number_format == "fp8")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shards", [True, False])
def test_flag_keys_and_index_agree_about_the_head(tied: bool, shards: bool, tmp_path: Path) -> None:
    """K17: a tied head is not in the files, and an index names what is there."""
    make_run(tmp_path / "run", f"model.tied_head={tied}")
    out = export(tmp_path / "run", tmp_path / "out", *(["shard=0.0001"] if shards else []))
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is tied
    files = {file.name: set(header_of(file)) - {"__metadata__"} for file in out.glob("*.safetensors")}
    names = set().union(*files.values())
    assert ("lm_head.weight" in names) is not tied
    assert len(files) > 1 if shards else set(files) == {"model.safetensors"}
    if shards:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == {name: file for file, inside in files.items() for name in inside}
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors_in(out).values())
        largest = max(tensor.nbytes for tensor in tensors_in(out).values())
        sizes = [
            sum(b - a for a, b in (e["data_offsets"] for n, e in header_of(out / f).items() if n[0] != "_")) for f in files
        ]
        assert max(sizes) <= max(100_000, largest)
    else:
        assert not (out / "model.safetensors.index.json").exists()


def test_shards_hold_what_one_file_holds(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "recipe=dsv3")
    one = tensors_in(export(tmp_path / "run", tmp_path / "one", "format=fp8"))
    many = tensors_in(export(tmp_path / "run", tmp_path / "many", "format=fp8", "shard=0.00005"))
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name].view(torch.uint8), many[name].view(torch.uint8)) for name in one)


@pytest.mark.parametrize(("number_format", "times"), [("fp32", 1), ("fp8", 3)])
def test_weights_are_read_when_their_turn_comes_and_not_kept(
    number_format: str, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a pass over the file, which has wider elements first; embedding and head once more, for MTP's copies."""
    make_run(tmp_path / "run")
    reads: Counter[str] = Counter()
    read = Checkpoint.read
    monkeypatch.setattr(Checkpoint, "read", lambda self, name: reads.update([name]) or read(self, name))
    export(tmp_path / "run", tmp_path / "out", f"format={number_format}")
    assert set(reads.values()) <= set(range(1, times + 2))
    assert {name for name, count in reads.items() if count > times} <= {"model.embedding", "model.head"}
    assert {name.partition(".")[0] for name in reads} == {"model"}


def test_the_card_says_what_was_trained_and_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "run", "recipe=tensorwise", "optimizer.lr=0.003")
    records = [
        {"step": 4, "loss": 3.25, "validation_loss": 3.5, "validation_bits_per_byte": 5.0494},
        {"step": 5, "loss": 3.125, "validation_loss": None},
        {"step": 6, "loss": 1.0},
    ]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    corpus = {"source": "/home/me/text", "sha256": "ab" * 32, "train": {"tokens": 5000}, "validation": {"tokens": 600}}
    (tmp_path / "run" / "corpus.json").write_text(json.dumps(corpus))
    card = (export(tmp_path / "run", tmp_path / "out", "format=fp8") / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    for part in (
        "# tiny, tensorwise", "| training loss | 3.1250 nats a token (step 5) |",
        "| validation loss | 3.5000 nats a token, 5.0494 bits a byte (step 4) |", "| steps | 5 |", "| tokens | 1,280;",
        "synthetic: 5,000 train tokens, 600 validation tokens; sha256 abababababab", "lr 0.003", "name: tensorwise",
        "codes made for this export, not those of tensorwise",
    ):  # fmt: skip
        assert part in card
    assert "/home/me" not in card
    assert "needs the package `accelerate`" in card
    assert "recipe=tensorwise trains on other codes than these" in capsys.readouterr().out
    card = (export(tmp_path / "run", tmp_path / "two", "format=bf16") / "README.md").read_text()
    assert "| weights | BF16; router and its bias FP32 |" in card
    assert "accelerate" not in card


@pytest.mark.parametrize(("dim", "told"), [(96, False), (256, False), (200, True)])
def test_the_card_warns_of_blocks_that_transformers_cuts_elsewhere(dim: int, told: bool, tmp_path: Path) -> None:
    """K14: on a CPU it divides a dimension by its number of scales."""
    make_run(tmp_path / "run", f"model.dim={dim}")
    card = (export(tmp_path / "run", tmp_path / "out", "format=fp8") / "README.md").read_text()
    assert ("cuts a dimension that is no multiple of 128 into other blocks" in card) is told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["out={tmp}/out", "format=int4"], "format=int4: expected one of bf16, fp8, fp32"),
        (["out={tmp}/out", "step=7"], "step=7: run={tmp}/run has checkpoints of steps 5"),
        (["out={tmp}/out", "shard=0"], "shard=0.0 must be above 0 (GB)"),
        (["out={tmp}/out", "fromat=fp8"], "fromat: no such key; did you mean format?"),
        ([], "out: no value given"),
        (["out={tmp}/full"], "out={tmp}/full is there already: name a new directory"),
        (["out={tmp}/file"], "out={tmp}/file is there already"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_written(words: list[str], said: str, tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError) as error:
        main([str(tmp_path / "run"), *(word.format(tmp=tmp_path) for word in words)])
    assert said.format(tmp=tmp_path) in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full", "run"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model.norm_eps=1e-5"], "model.norm_eps=1e-05: transformers' norms of the latents"),
        ([*V2, "model.normalize=true"], "model.normalize=true with model.score=softmax"),
    ],
)
def test_models_without_a_place_in_the_layout_are_refused(words: list[str], said: str, tmp_path: Path) -> None:
    make_run(tmp_path / "run", *words)
    with pytest.raises(UserError, match=said):
        main([str(tmp_path / "run"), f"out={tmp_path}/out"])
    assert not (tmp_path / "out").exists()


def test_a_bias_that_deepseek_v2_cannot_hold_is_not_dropped(tmp_path: Path) -> None:
    make_run(tmp_path / "run", *V2, biased=True)
    with pytest.raises(UserError, match=r"router\.bias is not zero, and with model\.score=softmax"):
        main([str(tmp_path / "run"), f"out={tmp_path}/out"])
    assert not (tmp_path / "out").exists()


def test_a_run_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"run={tmp_path} has no checkpoint"):
        main([str(tmp_path), f"out={tmp_path}/out"])


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_nothing_half_written_stays(error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second file fails: neither the directory nor a temporary one is left, and a full disk is one line."""
    make_run(tmp_path / "run")
    written: list[str] = []
    write_file = hub_files.write_file

    def failing(path: Path, *arguments: Any) -> bytes:
        if written:
            raise error
        written.append(path.name)
        return write_file(path, *arguments)

    monkeypatch.setattr(hub_files, "write_file", failing)
    kind = UserError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(kind) as raised:
        main([str(tmp_path / "run"), f"out={tmp_path}/out", "shard=0.00005"])
    if kind is UserError:
        assert str(raised.value).startswith(f"out={tmp_path}/out cannot be written: No space left on device")
    assert written[0].startswith("model-00001-of-")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_disk_without_room_is_told_before_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K10"""
    make_run(tmp_path / "run")
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(UserError, match=f"out={tmp_path}/out needs .* has 0.001 MB free"):
        main([str(tmp_path / "run"), f"out={tmp_path}/out"])
    assert not (tmp_path / "out").exists()


def test_help_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    output = capsys.readouterr().out
    assert all(f"  {key} " in output for key in ExportConfig.__dataclass_fields__)
