"""Imported run directories: every value where it belongs, and one line for every file that is not what it should be."""

import json
import logging
import pickle
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import without_codes
from published import published, under_our_names
from safetensors.torch import load_file, save_file
from torch import Tensor
from trained import V2, make_run, tensors_in
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

from dsv3fp8.config import load_config, load_saved
from dsv3fp8.data.bpe import train_bpe
from dsv3fp8.errors import UserError
from dsv3fp8.hub.export_run import main as export_main
from dsv3fp8.hub.import_run import main
from dsv3fp8.hub.saved import read_saved
from dsv3fp8.hub.settings import parse, to_model
from dsv3fp8.training.generate import GenerateConfig, load, stream

DATA = ("data=files", "data.paths=nothing/*.txt", "training.context=32", "recipe=fp32")


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    monkeypatch.chdir(tmp_path)


Exported = Callable[..., Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Path]:
    """Directories of this module's runs, by how they were made."""
    return {"root": tmp_path_factory.mktemp("made")}


@pytest.fixture
def exported(made: dict[Any, Path], tmp_path: Path) -> Exported:
    """exported("key=value", …, number_format="fp32"): a directory to import, and the run that it is of beside it."""

    def export(*words: str, number_format: str = "fp32", shard: float = 5) -> Path:
        key = (words, number_format, shard)
        if key not in made:
            made[key] = made["root"] / str(len(made))
            make_run(made[key] / "run", *words)
            asked = [f"out={made[key]}/hf", f"format={number_format}", f"shard={shard}"]
            assert export_main([str(made[key] / "run"), *asked]) == 0
        for name in ("run", "hf"):
            shutil.copytree(made[key] / name, tmp_path / name)
        return tmp_path / "hf"

    return export


def imported(source: Path, *words: str) -> Mapping[str, Tensor]:
    """The tensors of the run that the directory becomes."""
    run_dir = source.parent / "imported"
    assert main([str(source), f"run_dir={run_dir}", *DATA, *words]) == 0
    saved = read_saved(str(run_dir))
    assert saved.state.step == 0
    assert saved.config == load_saved(run_dir / "config.yaml")
    return saved.tensors


def same(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> bool:
    assert got.keys() == want.keys()
    return all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize(
    "words", [(), ("model.tied_head=true", "model.mtp_depth=2"), V2, ("model.dense_layers=2", "model.mtp_depth=0")]
)
def test_fp32_comes_back_bit_for_bit(words: tuple[str, ...], exported: Exported, tmp_path: Path) -> None:
    source = exported(*words, shard=0.0001)
    assert same(imported(source), read_saved(str(tmp_path / "run")).tensors)
    before, after = read_saved(str(tmp_path / "run")).config.model, read_saved(str(tmp_path / "imported")).config.model
    assert before == after


def test_every_weight_of_an_fp8_directory_is_its_decoded_one(exported: Exported, tmp_path: Path) -> None:
    """K04: each parameter against the published rule, none left as it was made."""
    source = exported("recipe=dsv3", number_format="fp8")
    got = imported(source)
    model = read_saved(str(tmp_path / "imported")).config.model
    assert same(got, under_our_names(without_codes(tensors_in(source)), model))
    assert all(bool(tensor.any()) for tensor in got.values())


def test_scales_of_eight_bits_are_read(exported: Exported, tmp_path: Path) -> None:
    """Powers of two may be stored as their exponents alone."""
    source = exported("recipe=dsv3_pow2", number_format="fp8")
    want = under_our_names(without_codes(tensors_in(source)), read_saved(str(tmp_path / "run")).config.model)

    def shorten(tensors: dict[str, Tensor]) -> None:
        scales = {name: each.to(torch.float8_e8m0fnu) for name, each in tensors.items() if name.endswith("_scale_inv")}
        assert scales
        tensors.update(scales)

    edit(shorten)(source)
    assert same(imported(source), want)


def test_bf16_is_widened(exported: Exported, tmp_path: Path) -> None:
    got, run = imported(exported(number_format="bf16")), read_saved(str(tmp_path / "run")).tensors
    fp32 = ("router.weight", "router.bias")
    assert same(got, {name: t if name.endswith(fp32) else t.bfloat16().float() for name, t in run.items()})


@pytest.mark.parametrize("kind", ["v2", "v3"])
def test_what_transformers_writes_is_read(kind: str, tmp_path: Path) -> None:
    """It has no multi-token prediction, but may say so in config.json: then the model is taken without."""
    data = {
        "vocab_size": 320, "hidden_size": 48, "intermediate_size": 72, "moe_intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 3, "num_key_value_heads": 3, "n_routed_experts": 8, "kv_lora_rank": 16, "q_lora_rank": 24,
        "qk_rope_head_dim": 8, "v_head_dim": 16, "qk_nope_head_dim": 12, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
        "max_position_embeddings": 64, "n_shared_experts": 1, "n_group": 4 if kind == "v3" else 1,
        "topk_group": 2 if kind == "v3" else 1, "routed_scaling_factor": 1.5,
    }  # fmt: skip
    torch.manual_seed(0)
    theirs = (
        DeepseekV3ForCausalLM(DeepseekV3Config(**data)) if kind == "v3" else DeepseekV2ForCausalLM(DeepseekV2Config(**data))
    )
    theirs.save_pretrained(tmp_path / "hf")
    words = ["data.tokenizer=bytes"]
    if kind == "v3":
        with pytest.raises(UserError, match=r"lacks model\.layers\.2\..*set model\.mtp_depth=0 to import the model without"):
            imported(tmp_path / "hf", *words)
        words.append("model.mtp_depth=0")
    got = imported(tmp_path / "hf", *words)
    model = read_saved(str(tmp_path / "imported")).config.model
    want = under_our_names(published(theirs.state_dict()), model)
    bias = {name: torch.zeros(8) for name in got if name.endswith("router.bias")}
    assert same(got, bias | want)


def test_multi_token_prediction_can_be_left_out(exported: Exported, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    got = imported(exported(), "model.mtp_depth=0")
    want = read_saved(str(tmp_path / "run")).tensors
    assert same(got, {name: tensor for name, tensor in want.items() if not name.startswith("mtp.")})
    assert "left out: model.layers.2." in capsys.readouterr().out


def test_the_package_safetensors_is_not_needed(exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = exported()
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert same(imported(source), read_saved(str(tmp_path / "run")).tensors)
    assert export_main([str(tmp_path / "imported"), f"out={tmp_path}/again", "format=fp32"]) == 0
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_moments_and_data_begin_anew_and_the_command_says_so(
    exported: Exported, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = exported("recipe=delayed")
    got = imported(source, "recipe=delayed", "model.bias_update_speed=0.5", "model.context=48")
    assert not any(tensor.any() for name, tensor in got.items() if ".states." in name)
    saved = read_saved(str(tmp_path / "imported"))
    assert (saved.state.data, saved.state.corpus, saved.state.tokens) == ({}, None, 0)
    assert (saved.config.model.bias_update_speed, saved.config.model.context) == (0.5, 48)
    text = capsys.readouterr().out
    assert "moments, amax histories and the position in the data begin anew" in text
    assert f"dsv3fp8 train config={tmp_path}/imported/config.yaml" in text
    origin = json.loads((tmp_path / "imported" / "imported.json").read_text())
    assert origin == {"from": str(source), "config": json.loads((source / "config.json").read_text())}


def test_the_command_that_import_prints_can_be_pasted(
    exported: Exported, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Into a shell, whatever signs the directory has."""
    run_dir = tmp_path / "my run's; $HOME"
    assert main([str(exported()), f'run_dir="{run_dir}"', *DATA]) == 0
    command = capsys.readouterr().out.splitlines()[-1].removeprefix("train it with: ")
    printed = subprocess.run(["/bin/sh", "-c", f"printf '%s\\n' {command}"], capture_output=True, text=True, check=True)
    first, second, config = printed.stdout.splitlines()
    assert (first, second) == ("dsv3fp8", "train")
    assert load_config([config]) == read_saved(str(run_dir)).config


def test_the_tokenizer_comes_along(exported: Exported, tmp_path: Path) -> None:
    """The byte tokenizer as itself; another as a file in the run directory, with its end of document."""
    imported(exported())
    assert read_saved(str(tmp_path / "imported")).config.data.tokenizer == "bytes"
    bpe = train_bpe(iter(["hello world, hello there " * 40] * 9), 300)
    make_run(tmp_path / "two" / "run", "recipe=fp32", tokenizer=bpe)
    export_main([str(tmp_path / "two" / "run"), f"out={tmp_path}/two/hf", "format=fp32"])
    imported(tmp_path / "two" / "hf")
    run = tmp_path / "two" / "imported"
    data = read_saved(str(run)).config.data
    assert (data.tokenizer, data.eod) == (str(run / "imported_tokenizer.json"), bpe.eod)
    words = {"prompt": "hello w", "temperature": 0.0, "tokens": 8}
    texts = []
    for each in (run, tmp_path / "two" / "run"):
        config = GenerateConfig(run=str(each), **words)
        texts.append("".join(stream(*load(config)[:2], config, 32)))
    shutil.rmtree(tmp_path / "two" / "hf")  # the run directory alone is enough
    assert texts[0] == texts[1]
    assert load(GenerateConfig(run=str(run)))[1].encode("hello w").tolist() == bpe.encode("hello w").tolist()


Damage = Callable[[Path], Any]


def edit(change: Callable[[dict[str, Tensor]], Any]) -> Damage:
    """Change the tensors of model.safetensors."""

    def damage(source: Path) -> None:
        tensors = load_file(source / "model.safetensors")
        change(tensors)
        save_file(tensors, source / "model.safetensors", {"format": "pt"})

    return damage


def edit_json(name: str, change: Callable[[dict[str, Any]], Any]) -> Damage:
    def damage(source: Path) -> None:
        data = json.loads((source / name).read_text())
        change(data)
        (source / name).write_text(json.dumps(data))

    return damage


def edit_header(change: Callable[[dict[str, Any]], Any]) -> Damage:
    """Change what the header of model.safetensors says of its bytes."""

    def damage(source: Path) -> None:
        path = source / "model.safetensors"
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])

    return damage


def cut(source: Path) -> None:
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def foreign(source: Path) -> None:
    (source / "model.safetensors").write_bytes(pickle.dumps({"model.norm.weight": [1.0]}))


Q = "model.layers.0.self_attn.q_b_proj.weight"
NORM = "model.norm.weight"
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("number_format", "damage", "said"),
    [
        ("fp32", cut, "model.safetensors is damaged or no safetensors file"),
        ("fp32", foreign, "model.safetensors is damaged or no safetensors file"),
        ("fp32", edit_header(lambda h: h[NORM].update(shape=[4800])), "no safetensors file .model.norm.weight is cut off"),
        (
            "fp32",
            edit_header(lambda h: h[NORM].update(h["model.layers.0.input_layernorm.weight"])),
            "its tensors overlap, or there",
        ),
        ("fp32", edit_header(lambda h: h[NORM].update(dtype="F4")), "no safetensors file .it lacks 'F4'"),
        ("fp32", edit_header(lambda h: h.update({NORM: 3})), "model.safetensors is damaged or no safetensors file"),
        (
            "fp32",
            lambda s: (s / "model.safetensors").unlink(),
            "has neither model.safetensors nor model.safetensors.index.json",
        ),
        ("fp32", edit(lambda t: t.pop(Q)), f"lacks {Q}, which its config.json promises: get the files again"),
        ("fp32", edit(lambda t: t.pop("lm_head.weight")), "lacks lm_head.weight, .*tie_word_embeddings=false"),
        (
            "fp32",
            edit(lambda t: t.pop("model.layers.2.eh_proj.weight")),
            r"lacks model.layers.2.eh_proj.*set model.mtp_depth=0",
        ),
        (
            "fp32",
            edit(lambda t: t.update({"model.layers.9.x": torch.ones(2)})),
            "has model.layers.9.x, which a model of its config",
        ),
        (
            "fp32",
            edit(lambda t: t.update({Q: t[Q][:-1].clone()})),
            rf"{Q} is \[47, 24\], and by config.json it has to be \[48, 24\]",
        ),
        ("fp32", edit(lambda t: t.update({Q: t[Q].long()})), f"{Q} is stored as I64"),
        ("fp32", edit(lambda t: t[Q].fill_(float("inf"))), f"{Q} holds NaN or inf"),
        ("fp32", edit(lambda t: t["model.layers.2.embed_tokens.weight"].add_(1)), "differs from model.embed_tokens.weight"),
        ("fp32", edit(lambda t: t.update({f"{Q}_scale_inv": torch.ones(1, 1)})), f"{Q} is F32, but there is {Q}_scale_inv"),
        ("fp8", edit(lambda t: t.pop(f"{Q}_scale_inv")), f"{Q} is FP8 and lacks {Q}_scale_inv"),
        (
            "fp8",
            edit(lambda t: t.update({f"{Q}_scale_inv": torch.ones(1, 2)})),
            rf"{Q}_scale_inv is F32 \[1, 2\], and .* \[1, 1\]",
        ),
        ("fp8", edit(lambda t: t[f"{Q}_scale_inv"].zero_()), f"{Q}_scale_inv holds a scale that is not finite and above 0"),
        ("fp8", edit(lambda t: t[Q].view(torch.uint8).fill_(0x7F)), f"{Q} holds NaN or inf"),
        (
            "fp8",
            edit_json("config.json", lambda d: d.pop("quantization_config")),
            "is FP8, but config.json has no quantization_conf",
        ),
        (
            "fp8",
            edit_json("config.json", lambda d: d["quantization_config"].update(scale_fmt="ue8m0")),
            "no powers of two, though quantization_config.scale_fmt=ue8m0",
        ),
        ("fp32", edit_json("config.json", lambda d: d.update(num_hidden_layers=3)), "lacks model.layers.3"),
        ("fp32", edit_json("config.json", lambda d: d.update(tie_word_embeddings=True)), "has lm_head.weight"),
        ("fp32", edit_json("config.json", lambda d: d.update(topk=3)), "config.json: topk: key that neither"),
        ("fp32", lambda s: (s / "tokenizer.json").unlink(), "has no tokenizer.json: name the tokenizer"),
        ("fp32", lambda s: (s / "tokenizer.json").write_text("{"), "tokenizer.json cannot be read"),
        (
            "fp32",
            lambda s: (s / "tokenizer.json").write_text('{"model": 1}'),
            "is not a tokenizer.json of the tokenizers package",
        ),
    ],
)
def test_files_that_are_not_what_they_should_be_are_named_and_nothing_stays(
    number_format: str, damage: Damage, said: str, exported: Exported, tmp_path: Path
) -> None:
    source = exported("model.groups=2", number_format=number_format)
    damage(source)
    refused(source, said)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda s: next(s.glob("model-00002*")).unlink(),
            "model-00002-of-.* is missing, which model.safetensors.index.json names",
        ),
        (
            edit_json(INDEX, lambda d: d["weight_map"].update({"model.x": d["weight_map"]["model.norm.weight"]})),
            "index.json names model.x, which is not in model-000",
        ),
        (
            edit_json(INDEX, lambda d: d["weight_map"].pop("model.norm.weight")),
            "index.json leaves out model.norm.weight of model-0",
        ),
        (
            edit_json(INDEX, lambda d: d["weight_map"].update({"model.norm.weight": "../run/x"})),
            "puts model.norm.weight into ../run/x",
        ),
        (edit_json(INDEX, lambda d: d.pop("weight_map")), "is no index of safetensors files"),
        (lambda s: (s / INDEX).write_text("{"), "is no index of safetensors files"),
        (edit_json(INDEX, lambda d: d.update(weight_map=["a"])), "is no index of safetensors files"),
    ],
)
def test_an_index_that_does_not_agree_with_its_files_is_named(
    damage: Damage, said: str, exported: Exported, tmp_path: Path
) -> None:
    source = exported(shard=0.0003)
    damage(source)
    refused(source, said)


def refused(source: Path, said: str, *words: str) -> None:
    with pytest.raises(UserError, match=said) as error:
        main([str(source), f"run_dir={source.parent}/imported", *DATA, *words])
    assert "\n" not in str(error.value)
    assert sorted(path.name for path in source.parent.iterdir()) == ["hf", "run"]


def test_loading_runs_no_code(exported: Exported, tmp_path: Path) -> None:
    """Remote code of config.json is not looked at, and a pickle beside the weights is not opened."""

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "it ran",))

    source = exported()
    edit_json("config.json", lambda d: d.update(auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}))(
        source
    )
    (source / "evil.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'it ran')!r}).touch()\n")
    (source / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    imported(source)
    (source / "model.safetensors").write_bytes(pickle.dumps(Bomb()))
    shutil.rmtree(tmp_path / "imported")
    refused(source, "is damaged or no safetensors file")
    pickle.loads(pickle.dumps(Bomb()))
    assert (tmp_path / "it ran").exists()  # only now


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model=tiny"], "model=: the model is that of .*hf/config.json; leave it out"),
        (["model.dim=64"], "model.dim: .*config.json has the weights of dim=48; leave model.dim out"),
        (["model.mtp_depth=3"], "model.mtp_depth: .*config.json has the weights of mtp_depth=1"),
        (["model.yarn.factor=4"], "model.yarn.factor: .*config.json has the weights of yarn="),
        (["model.dimm=64"], "model.dimm: no such key; did you mean model.dim"),
        (["training.context=65"], "training.context=65 is longer than model.context=64"),
        (["recipe=fp7"], "recipe=fp7: no such recipe"),
    ],
)
def test_settings_that_do_not_fit_the_weights_are_named(
    words: list[str], said: str, exported: Exported, tmp_path: Path
) -> None:
    refused(exported(), said, *words)


def test_a_key_that_says_what_the_weights_are_anyway_is_taken(exported: Exported, tmp_path: Path) -> None:
    imported(exported(), "model.dim=48", "model.mtp_depth=1")


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(exported: Exported, tmp_path: Path) -> None:
    refused(exported("model.vocab_size=200"), "model.vocab_size=200 is below the 257 ids of the tokenizer bytes")


def test_the_directory_and_run_dir_are_asked_for(
    exported: Exported, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = exported()
    with pytest.raises(UserError, match="run_dir: no value given"):
        main([str(source), *DATA])
    with pytest.raises(UserError, match="the first word is the directory to import"):
        main([f"run_dir={tmp_path}/imported", *DATA])
    with pytest.raises(UserError, match=r"nowhere/config.json: No such file"):
        main(["nowhere", f"run_dir={tmp_path}/imported", *DATA])
    with pytest.raises(UserError, match=f"run_dir={tmp_path}/run is there already"):
        main([str(source), f"run_dir={tmp_path}/run", *DATA])
    assert main([]) == 2
    assert main(["--help"]) == 0
    assert "Usage: dsv3fp8 import DIR run_dir=RUN_DIR" in capsys.readouterr().out


def test_yarn_that_a_shorter_context_turns_off_is_told(
    exported: Exported, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = exported("model.context=256", "model.yarn.factor=8", "model.yarn.original_context=64")
    assert to_model(parse(json.loads((source / "config.json").read_text())), "x").yarn.factor == 8
    imported(source, "model.context=64")
    assert "model.context=64 is within the original context, so YaRN stays off" in capsys.readouterr().out
