"""Every recipe on a nano model: one step is finite and points where the exact one does; toggles compose; state rolls."""

import pytest
import torch
from support import RECIPES, build, gradients, nano, recipe, windows
from torch import Tensor

from dsv3fp8.model.manifest import format_manifest
from dsv3fp8.model.transformer import Transformer
from dsv3fp8.ops.quantizers import ScaleState
from dsv3fp8.precision.cast_meter import measure_casts
from dsv3fp8.precision.recipe import Recipe

# Every token goes to every expert: quantization cannot change the choice.
FIXED = nano(experts=4, top_k=4, dim=128, ffn=192, expert_ffn=72, kv_latent=64, q_latent=96)
BATCH = windows(FIXED, batch=4, length=40)

# Cosine of the whole gradient with that of fp32, and of the worst tensor's.
AT_LEAST = {"fp32": (0.99999, 0.99999), "bf16": (0.999, 0.998)}
AT_LEAST_FP8 = (0.96, 0.88)


def step(given: Recipe) -> dict[str, Tensor]:
    return gradients(build(FIXED, given), [BATCH])


@pytest.fixture(scope="module")
def exact() -> dict[str, Tensor]:
    return step(recipe("fp32"))


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.flatten().double(), b.flatten().double(), 0))


@pytest.mark.parametrize("name", RECIPES)
def test_one_step_gives_every_parameter_a_finite_gradient_in_the_right_direction(name: str, exact: dict[str, Tensor]) -> None:
    """Must show 2."""
    got = step(recipe(name))
    whole, worst = AT_LEAST.get(name, AT_LEAST_FP8)
    assert got.keys() == exact.keys()
    assert all(g.dtype == torch.float32 and torch.isfinite(g).all() for g in got.values())
    cosines = {key: cosine(got[key], exact[key]) for key in got}
    assert min(cosines.values()) > worst, min(cosines.items(), key=lambda item: item[1])
    assert cosine(*(torch.cat([g[k].flatten() for k in got]) for g in (got, exact))) > whole


@pytest.mark.parametrize("name", RECIPES)
def test_a_few_steps_lower_the_loss(name: str) -> None:
    """Must show 2: with amax histories filling and static scales freezing on the way."""
    config = nano()
    model, batch = build(config, recipe(name, "calibration_steps=3")), windows(config, batch=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        objective = model.objective(parts := model(batch), parts.totals)
        objective.backward()
        optimizer.step()
        model.end_step(True)
        losses.append(objective.item())
    assert losses[-1] < 0.6 * losses[0], losses


TOGGLES = [
    ("ops.out.input.scale=fp32",), ("roles.input.format=none",), ("roles.weight.format=none",), ("roles.gradient.format=none",),
    ("attention_cache=compute",), ("swiglu_cache.format=compute",), ("swiglu_cache.scale=pow2",), ("gate=after",),
    ("operand=bf16",), ("swiglu_input=bf16",), ("retiled_scale=pow2",), ("roles.weight.tile=1x128",),
    ("roles.input.tile=128x128",), ("roles.gradient.format=e5m2", "ops.q_a.gradient.format=none"),
    ("ops.out.input.format=none",), ("ops.kv_b.input.tile=tensor", "ops.kv_b.input.scaling=delayed"),
    ("ops.expert_down.gradient.format=none", "gate=after"), ("ops.expert_gate_up.input.format=none", "gate=after"),
    ("ops.expert_down.input.tile=row", "ops.expert_gate_up.gradient.tile=row"),
]  # fmt: skip


@pytest.mark.parametrize("toggle", TOGGLES, ids="+".join)
def test_toggles_compose_and_each_changes_something(toggle: tuple[str, ...], exact: dict[str, Tensor]) -> None:
    base, got = step(recipe("dsv3")), step(recipe("dsv3", *toggle))
    assert all(torch.isfinite(g).all() for g in got.values())
    assert min(cosine(got[key], exact[key]) for key in got) > AT_LEAST_FP8[1]
    assert any(not torch.equal(got[key], base[key]) for key in got)


def test_keeping_swiglus_output_changes_no_bit() -> None:
    base, got = step(recipe("dsv3")), step(recipe("dsv3", "swiglu_output=keep"))
    assert all(torch.equal(base[key], got[key]) for key in base)


def test_the_same_seed_gives_the_same_bits_and_looking_changes_none() -> None:
    """Looking: counting what casts lose."""
    first = step(recipe("dsv3"))
    with measure_casts() as meter:
        second = step(recipe("dsv3"))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert 0.0 < meter.counts().flushed_share < 0.1


def test_without_quantization_nothing_is_flushed() -> None:
    with measure_casts() as meter:
        step(recipe("bf16"))
    assert meter.counts().flushed_share == 0.0


def states(model: Transformer) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in model.state_dict().items() if name.endswith((".history", ".steps"))}


def train_step(model: Transformer, seed: int, batches: int = 2, applied: bool = True) -> None:
    gradients(model, [windows(model.config, seed=10 * seed + i) for i in range(batches)])
    if applied:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
    model.end_step(applied)


def evaluate(model: Transformer) -> Tensor:
    model.eval()
    with torch.no_grad():
        loss = model(windows(model.config, seed=99)).loss
    model.train()
    return loss


def test_amax_histories_roll_once_per_applied_step_and_not_in_evaluation() -> None:
    model = build(nano(mtp_depth=0), recipe("delayed", "amax_history=4"))
    scale_states = [m for m in model.modules() if isinstance(m, ScaleState)]
    assert len(scale_states) == 3 * (2 * 5 + 2 + 4)  # three roles of every linear
    for number in range(1, 4):
        train_step(model, number)
        before = states(model)
        evaluate(model)
        train_step(model, 50, applied=False)
        assert all(torch.equal(t, before[name]) for name, t in states(model).items())
        for state in scale_states:
            assert (state.history.amax(1) > 0).tolist() == [True] * number + [False] * (4 - number)
            assert int(state.steps) == number


def test_static_scales_freeze_after_calibration() -> None:
    model = build(nano(mtp_depth=0), recipe("static", "calibration_steps=2"))
    train_step(model, 1)
    after_one = states(model)
    train_step(model, 2)
    frozen = states(model)
    assert any(not torch.equal(t, after_one[name]) for name, t in frozen.items() if name.endswith("history"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 3
    train_step(model, 3)
    assert all(torch.equal(t, frozen[name]) for name, t in states(model).items() if name.endswith("history"))


@pytest.mark.parametrize("name", ["dsv3", "delayed", "static"])
def test_cached_codes_give_the_bits_of_codes_made_each_time(name: str) -> None:
    """O05: three steps of two micro-batches, with evaluation and a load in between."""
    cached, fresh = (build(nano(), recipe(name, "amax_history=1", "calibration_steps=1")) for _ in range(2))
    for module in (fresh, *fresh.mtp, *fresh.layers):
        module.register_forward_pre_hook(lambda *_: fresh.invalidate_codes())
    for number in range(3):
        losses = []
        for model in (cached, fresh):
            train_step(model, number)
            losses.append(evaluate(model))
            if number == 1:
                model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
        assert torch.equal(*losses)
    for (key, a), b in zip(cached.state_dict().items(), fresh.state_dict().values(), strict=True):
        assert torch.equal(a, b), key


def test_histories_and_frozen_scales_survive_a_checkpoint() -> None:
    for name in ("delayed", "static"):
        model, other = (build(nano(), recipe(name, "calibration_steps=1"), seed=s) for s in (0, 1))
        train_step(model, 1)
        other.load_state_dict(model.state_dict())
        batch = windows(model.config, seed=7)
        a, b = gradients(model, [batch]), gradients(other, [batch])
        assert all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("name", ["dsv3", "bf16"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_non_finite_weight_shows_in_the_loss(name: str, poison: float) -> None:
    """Q05: saturation would hide it, and the loop could not skip the step."""
    model = build(nano(mtp_depth=0), recipe(name))
    with torch.no_grad():
        model.layers[0].attention.q_b.weight[3, 3] = poison
    assert not torch.isfinite(model(windows(model.config)).loss)


def test_the_manifest_says_what_is_quantized_and_kept() -> None:
    manifest = build(nano(), recipe("dsv3", "ops.out.input.scale=fp32")).manifest()
    assert manifest["linears"]["out"]["input"] == "e4m3 1x128 fp32"
    assert manifest["linears"]["expert_gate_up"]["input"] == "e4m3 1x128 pow2"
    assert manifest["linears"]["q_a"]["weight"] == "e4m3 128x128 fp32"
    assert "q" not in manifest["linears"]
    assert manifest["caches"]["attention_output"] == {"format": "e5m6 1x128 pow2", "bytes": 48 + 4}
    assert {row["backend"] for row in manifest["backends"]} >= {"reference"}
    text = format_manifest(manifest)
    assert all(word in text for word in ("expert_gate_up", "e4m3 128x128 fp32", "reference", "no norm, no projection"))
    assert "attention's q, k, v" in format_manifest(build(nano(), recipe("bf16", "recompute=norms_and_up")).manifest())
