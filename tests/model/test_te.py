"""Transformer Engine's linears in our layer: on a CPU a library that is played, on a Hopper GPU the real one if it is there."""

from __future__ import annotations

import contextlib
import re
import types
from typing import Any

import pytest
import torch
from support import build, nano, recipe, relative, windows
from torch import Tensor, nn

from dsv3fp8 import cli
from dsv3fp8.errors import UserError
from dsv3fp8.kernels import te
from dsv3fp8.kernels.explain import explain
from dsv3fp8.model.manifest import format_manifest
from dsv3fp8.model.te import TELinear
from dsv3fp8.model.te_experts import TERoutedExperts, row_splits
from dsv3fp8.model.transformer import Transformer
from dsv3fp8.ops.exchange import make_plan
from dsv3fp8.training.checks import validate_run

CASTS: list[str] = []


class _Product(torch.autograd.Function):
    """As te.Linear computes with fuse_wgrad_accumulation: the weight gradient goes to where the weight says, in FP32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, splits: list[int], *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.splits, ctx.weights = splits, weights
        return torch.cat([(part.float() @ w.mT).to(x.dtype) for part, w in zip(x.split(splits), weights, strict=True)])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        dx = []
        for part, dpart, w in zip(x.split(ctx.splits), dy.split(ctx.splits), ctx.weights, strict=True):
            assert w.overwrite_main_grad
            w.main_grad = w.get_main_grad()
            assert w.main_grad.dtype == torch.float32
            w.main_grad.copy_(dpart.float().mT @ part.float())
            dx.append((dpart.float() @ w).to(x.dtype))
        return torch.cat(dx), None, *(None for _ in ctx.weights)


class Played(nn.Module):
    """What te.Linear and te.GroupedLinear have in common with each other, and with what we do to them."""

    def __init__(self, weights: int, inputs: int, outputs: int, **options: Any) -> None:
        super().__init__()
        assert options == {
            "bias": False, "params_dtype": torch.float32, "device": "meta", "fuse_wgrad_accumulation": True
        }  # fmt: skip
        self.names = ["weight"] if weights == 0 else [f"weight{i}" for i in range(weights)]
        for name in self.names:
            self.register_parameter(name, nn.Parameter(torch.empty(outputs, inputs, device="meta")))

    def fast_setattr(self, name: str, value: Any) -> None:
        self.__dict__[name] = value

    def forward(self, x: Tensor, splits: list[int] | None = None, is_first_microbatch: bool | None = None) -> Tensor:
        assert x.dtype == torch.bfloat16
        assert x.shape[0] % 8 == 0
        if is_first_microbatch:
            CASTS.extend(self.names)
        weights = [getattr(self, name) for name in self.names]
        out: Tensor = _Product.apply(x, splits or [x.shape[0]], *weights)
        return out


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    def linear(inputs: int, outputs: int, **options: Any) -> Played:
        return Played(0, inputs, outputs, **options)

    library = types.SimpleNamespace(Linear=linear, GroupedLinear=Played)
    monkeypatch.setattr(te, "library", lambda: library)
    monkeypatch.setattr(te, "reason_against", lambda device: None)
    monkeypatch.setattr(te, "block_scaling", contextlib.nullcontext)
    CASTS.clear()


def step(model: Transformer, tokens: Tensor) -> dict[str, Tensor]:
    losses = model(tokens)
    model.objective(losses, losses.totals).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_a_model_of_its_linears_is_the_bf16_model(played: None) -> None:
    """Same masters by the same names, same loss, same gradients: FP32, and added up over micro-batches."""
    config = nano()
    ours, theirs = build(config, recipe("bf16")), build(config, recipe("te_blockwise"))
    assert {n: p.shape for n, p in ours.named_parameters()} == {n: p.shape for n, p in theirs.named_parameters()}
    assert set(ours.state_dict()) == set(theirs.state_dict())
    kinds = [type(module) for module in theirs.modules()]
    assert (kinds.count(TELinear), kinds.count(TERoutedExperts)) == (3 * 5 + 3 * 2, 2)  # mtp's block is the third
    tokens = windows(config)
    want, got = step(ours, tokens), step(theirs, tokens)
    assert set(got) == set(want)
    for name, gradient in got.items():
        assert gradient.dtype == torch.float32
        assert relative(gradient, want[name]) < 0.05, name
    twice = step(theirs, tokens)
    assert all(torch.equal(twice[name], 2 * got[name]) for name in got)


def test_weights_are_cast_once_a_step(played: None) -> None:
    config = nano(mtp_depth=0)
    model, tokens = build(config, recipe("te_blockwise")), windows(config)
    step(model, tokens)
    once = len(CASTS)
    assert once == 2 * 5 + 2 * 2 + 2 * config.experts
    step(model, tokens)
    assert len(CASTS) == once
    model.end_step(True)  # the optimizer wrote the masters, in a way that autograd's counter need not see
    step(model, tokens)
    assert len(CASTS) == 2 * once
    with torch.no_grad():
        model.layers[0].attention.out.weight.mul_(2.0)  # type: ignore[union-attr]
    step(model, tokens)
    assert len(CASTS) == 2 * once + 1


def test_any_number_of_tokens_fits(played: None) -> None:
    config = nano(mtp_depth=0)
    ours, theirs = build(config, recipe("bf16")), build(config, recipe("te_blockwise"))
    tokens = windows(config, batch=1, length=5)
    assert relative(theirs.logits(tokens), ours.logits(tokens)) < 0.05


def test_rows_of_the_experts_add_up_to_all() -> None:
    ids = torch.tensor([[0], [2], [2]])
    plan = make_plan(ids, 4, None)
    assert row_splits(plan) == [128, 0, 128, plan.rows - 256]


def test_the_manifest_says_what_is_not_observed(played: None) -> None:
    manifest = build(nano(), recipe("te_blockwise")).manifest()
    text = format_manifest(manifest)
    assert f"linears: {te.INSIDE}" in text
    assert manifest["linears"]["out"]["weight"] == "e4m3 128x128 pow2"
    rows = {row["op"]: row for row in manifest["backends"]}
    assert (rows["out.wgrad"]["backend"], rows["out.wgrad"]["exact"]) == ("transformer_engine", False)
    assert rows["attention"]["backend"] == "reference"


def test_the_map_says_that_there_is_none(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    assert cli.main(["map", "recipe=te_blockwise", f"out={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "what happens inside its linears is not observed; give another recipe" in error


def test_the_map_refuses_to_compare_with_it_before_it_runs(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    assert cli.main(["map", "recipe=dsv3", "against=te_blockwise", f"out={tmp_path}/out"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("dsv3fp8: error: against=te_blockwise has no map: ")
    assert not (tmp_path / "out").exists()


def test_where_it_is_not_installed_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def no() -> None:
        raise ImportError("No module named\n'transformer_engine'")

    monkeypatch.setattr(te, "hopper_reason", lambda device: None)
    monkeypatch.setattr(te, "library", no)
    te.import_error.cache_clear()
    try:
        with pytest.raises(UserError, match=r"^recipe\.linears=te: Transformer Engine cannot be imported \(No module named "):
            build(nano(), recipe("te_blockwise"))
        said = dict(explain(recipe("te_blockwise"), torch.device("cpu")))["out.fprop"]
    finally:
        te.import_error.cache_clear()
    assert said.reason.startswith("does not run here: Transformer Engine cannot be imported")
    assert said.reason.endswith("pip install 'dsv3fp8[te]'")


def test_without_a_hopper_gpu_nothing_starts() -> None:
    from dsv3fp8.config import load_config

    with pytest.raises(UserError, match=rf"^recipe\.linears=te: cpu has no FP8 tensor cores: {re.escape(te.REMEDY)}$"):
        validate_run(load_config(["recipe=te_blockwise", "training.device=cpu", "model=nano"]))
    with pytest.raises(UserError, match=r"^recipe\.linears=te: "):
        build(nano(), recipe("te_blockwise"))


@pytest.mark.gpu
def test_the_real_one_is_no_further_from_bf16_than_our_own_fp8() -> None:
    device = torch.device("cuda", 0)
    if (against := te.reason_against(device)) is not None:
        pytest.skip(against)
    config = nano(dim=256, q_latent=128, kv_latent=128, head_nope=64, head_rope=32, head_v=64, ffn=512, expert_ffn=256)
    tokens = windows(config, batch=2, length=61).to(device)
    plain, ours, theirs = (build(config, recipe(name)).to(device) for name in ("bf16", "dsv3", "te_blockwise"))
    want, near, got = (step(model, tokens) for model in (plain, ours, theirs))
    assert set(got) == set(want)
    assert all(gradient.dtype == torch.float32 for gradient in got.values())
    errors = [{n: float((g[n] - want[n]).norm() / want[n].norm()) for n in want} for g in (near, got)]
    assert max(errors[1].values()) < 1.5 * max(errors[0].values()), errors
    first = {name: gradient.clone() for name, gradient in got.items()}
    twice = step(theirs, tokens)
    for name in first:
        assert relative(twice[name], 2 * first[name]) < 1e-2, name
