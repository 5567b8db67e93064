"""Ops whose casts ride on them, and the slots that carry a gradient's codes to its linear: the wiring changes no bit.

The kernels are played by their references, which count nothing, as the kernels count nothing.
"""

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support import RECIPES, build, gradients, nano, recipe, windows

from dsv3fp8.kernels import backend, elementwise
from dsv3fp8.kernels.backend import quantize_both
from dsv3fp8.kernels.norm import reference as norm_reference
from dsv3fp8.kernels.rope import reference as rope_reference
from dsv3fp8.kernels.swiglu import reference as swiglu_reference
from dsv3fp8.ops.quantizers import LinearQuantizers
from dsv3fp8.ops.slot import GradientSlot
from dsv3fp8.precision.cast_meter import CastCounts, measure_casts, uncounted
from dsv3fp8.precision.formats import E4M3, E5M2
from dsv3fp8.precision.ledger import observe_ops

REFERENCES = {"norm": norm_reference, "rope": rope_reference, "swiglu": swiglu_reference}
# More than a tile in every width, and tails.
SIZES: dict[str, Any] = {
    "dim": 144, "heads": 3, "q_latent": 136, "kv_latent": 130, "head_nope": 40, "head_rope": 8, "head_v": 24, "ffn": 136,
    "expert_ffn": 40,
}  # fmt: skip


def pretend_kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """From here on every op with a fused kernel takes it; returns the names of those that ran."""
    ran: list[str] = []

    def played(module: ModuleType, name: str) -> Any:
        def run(*arguments: Any) -> Any:
            ran.append(f"{module.__name__.split('.')[-2]} {name}")
            with uncounted():
                return getattr(module, name)(*arguments)

        return run

    def kernels(name: str) -> Any:
        module = REFERENCES[name]
        functions = {f: played(module, f) for f in vars(module) if f.startswith(("forward", "backward"))}
        return SimpleNamespace(reason_against=lambda *_: None, **functions)

    monkeypatch.setattr(elementwise, "against_triton", lambda _: None)
    for room in (backend, elementwise):  # who asks them, and who calls them
        monkeypatch.setattr(room, "triton_kernels", kernels)
    return ran


def outcome(name: str, *overrides: str, **sizes: Any) -> tuple[dict[str, torch.Tensor], Any, CastCounts]:
    """(gradients, ledger, what casts lost) of a step."""
    config = nano(**{**SIZES, **sizes})
    model = build(config, recipe(name, *overrides))
    with measure_casts() as meter:
        gradients(model, [windows(config)])
    with observe_ops() as ledger:
        return gradients(model, [windows(config)]), ledger, meter.counts()


def assert_same_outcome(monkeypatch: pytest.MonkeyPatch, name: str, *overrides: str, **sizes: Any) -> list[str]:
    want, want_ledger, want_counts = outcome(name, *overrides, **sizes)
    ran = pretend_kernels(monkeypatch)
    got, ledger, counts = outcome(name, *overrides, **sizes)
    assert got.keys() == want.keys()
    assert [key for key in got if not torch.equal(got[key], want[key])] == []
    assert ledger.records == want_ledger.records
    assert (ledger.unreported, ledger.unsaved) == ([], [])
    assert counts == want_counts
    return ran


@pytest.mark.parametrize("recompute", ["none", "norms_and_up"])
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_gives_the_same_bits_records_and_counts(
    name: str, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_same_outcome(monkeypatch, name, f"recompute={recompute}")


TOGGLES = [
    ("ops.gate_up.gradient.format=none", "ops.q_b.gradient.format=none"), ("ops.kv_b.gradient.format=e5m2",),
    ("ops.q_a.input.scale=pow2", "ops.shared_gate_up.input.tile=row"), ("ops.kv_a.input.format=none",),
    ("ops.kv_a.gradient.tile=row", "ops.q_b.input.tile=tensor"), ("swiglu_cache.format=compute", "swiglu_output=keep"),
]  # fmt: skip


@pytest.mark.parametrize("toggle", TOGGLES, ids="+".join)
def test_readers_and_slots_that_differ_give_the_same_bits(toggle: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """What no cast can ride on is cast on its own, beside what one can."""
    assert_same_outcome(monkeypatch, "dsv3", *toggle)


@pytest.mark.parametrize("sizes", [{"q_latent": None}, {"shared_experts": 0}], ids=str)
def test_other_models_give_the_same_bits(sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same_outcome(monkeypatch, "dsv3", **sizes)


def test_under_dsv3_every_fused_kernel_runs_and_no_plain_backward_that_a_cast_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = set(assert_same_outcome(monkeypatch, "dsv3", mtp_depth=0))
    assert ran >= {"norm forward_cast", "norm backward_cast"}
    assert ran >= {"swiglu forward_cast", "swiglu forward_again", "swiglu backward_cast", "rope forward", "rope backward_cast"}
    assert not ran & {"swiglu backward", "rope backward"}


def test_a_slot_is_filled_once_and_taken_once() -> None:
    given = recipe("hybrid", "ops.kv_b.gradient.tile=row")
    assert GradientSlot(LinearQuantizers(given, "kv_b")).cast is None
    slot = GradientSlot(LinearQuantizers(given, "q_b"))
    assert slot.cast == (E5M2, "fp32")
    codes = quantize_both(torch.ones(2, 2), E4M3)
    slot.fill(*codes)
    assert slot.take() == codes
    assert slot.take() is None


def test_a_frozen_weight_behind_a_filled_slot_gets_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    config = nano(mtp_depth=0)
    model = build(config, recipe("dsv3"))
    model.layers[0].feed_forward.ffn.gate_up.weight.requires_grad_(False)
    want = gradients(model, [windows(config)])
    pretend_kernels(monkeypatch)
    with observe_ops() as ledger:
        got = gradients(model, [windows(config)])
    assert [key for key in want if not torch.equal(got[key], want[key])] == []
    assert ledger.find("gate_up", "wgrad") == []


# Wide enough for every kernel. The attention kernels that isolated documents take sum in one order only.
ON_A_GPU: dict[str, Any] = {
    "dim": 256, "heads": 2, "q_latent": 144, "kv_latent": 128, "head_nope": 128, "head_rope": 64, "head_v": 128, "ffn": 272,
    "expert_ffn": 144, "mtp_depth": 0, "context": 256,
}  # fmt: skip


def gradients_on_a_gpu(name: str, *overrides: str) -> dict[str, torch.Tensor]:
    """Of a dense and a MoE block."""
    config = nano(**ON_A_GPU)
    documents = (torch.arange(2 * 201).view(2, 201) // 70).int().cuda()
    model = build(config, recipe(name, *overrides)).to("cuda")
    grads = gradients(model, [windows(config, length=200).to("cuda")], [documents])
    return {key: grad for key, grad in grads.items() if key.startswith("layers.")}


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["none", "norms_and_up"])
@pytest.mark.parametrize("name", ["dsv3", "dsv3_pow2", "hybrid"])
def test_on_a_gpu_a_cast_on_its_own_gives_the_same_bits(name: str, recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels round to BF16 before they cast: the gradients do not tell whether a cast rode on the op before it.

    Up to the gate weights' gradient of the last block, which the kernel with casts adds in another order than the one without.
    """
    got = gradients_on_a_gpu(name, f"recompute={recompute}")
    monkeypatch.setattr(LinearQuantizers, "rides", lambda *_: None)
    want = gradients_on_a_gpu(name, f"recompute={recompute}")
    exact = [key for key in want if key.startswith(("layers.1.feed_forward.experts.", "layers.1.feed_forward.shared."))]
    assert len(exact) == 4
    assert [key for key in exact if not torch.equal(got[key], want[key])] == []
    assert_close(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["dsv3", "hybrid", "rowwise", "bf16"])
def test_on_a_gpu_the_kernels_give_the_gradients_of_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for rows that are summed in another order, and what comes of a BF16 value on the other side of a rounding."""
    got = gradients_on_a_gpu(name)
    monkeypatch.setattr(elementwise, "against_triton", lambda _: "not asked for")
    want = gradients_on_a_gpu(name)
    assert_close(got, want, 0.996 if name == "hybrid" else 0.999)  # a step of E5M2 is two of E4M3: four times the 1 - cosine


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], least: float = 0.999) -> None:
    cosines = {key: torch.nn.functional.cosine_similarity(got[key].flatten(), want[key].flatten(), 0) for key in want}
    assert min(cosines.values()) > least, cosines
