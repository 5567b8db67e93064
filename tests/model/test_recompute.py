"""`recipe.recompute` changes what is kept and no bit of any result: gradients, expert loads, amax histories."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support import RECIPES, build, gradients, nano, recipe, windows
from torch import Tensor

from dsv3fp8.kernels.attention import cudnn
from dsv3fp8.model.config import ModelConfig
from dsv3fp8.model.linear import Reader
from dsv3fp8.ops.quantizers import ScaleState
from dsv3fp8.precision.cast_meter import measure_casts
from dsv3fp8.precision.recipe import Recipe

VALUES = ("norms", "norms_and_up")
CONFIG = nano()  # with a query latent, routed and shared experts and multi-token prediction
DOCUMENTS = torch.tensor([[0] * 8 + [1] * 10 + [-1] * 3, [2] * 1 + [3] * 20], dtype=torch.int32)


@dataclass
class Outcome:
    """Of two optimizer steps: gradients and expert loads of the last, and the state with its histories and biases."""

    gradients: dict[str, Tensor]
    loads: Tensor
    state: dict[str, Tensor]


def two_steps(given: Recipe, config: ModelConfig = CONFIG) -> Outcome:
    """Micro-batches with and without isolated documents."""
    model = build(config, given)
    for step in range(2):
        batches = [windows(config, seed=2 * step + i) for i in range(2)]
        grads = gradients(model, batches, [DOCUMENTS, None])
        loads = model.expert_load().clone()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= 0.01 * grads[name]
        model.end_step(True)
    return Outcome(grads, loads, model.state_dict())


def assert_same_bits(got: Outcome, want: Outcome) -> None:
    assert torch.equal(got.loads, want.loads)
    for ours, theirs in ((got.gradients, want.gradients), (got.state, want.state)):
        assert ours.keys() == theirs.keys()
        assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_gives_the_same_bits_whatever_is_recomputed(name: str) -> None:
    """Also with histories filling (delayed) and scales frozen after the first step (static)."""
    base = two_steps(recipe(name, "calibration_steps=1"))
    assert all(torch.isfinite(grad).all() for grad in base.gradients.values())
    for value in VALUES:
        assert_same_bits(two_steps(recipe(name, "calibration_steps=1", f"recompute={value}")), base)


TOGGLES = [
    ("gate=after",), ("operand=bf16",), ("swiglu_input=bf16",), ("swiglu_output=keep", "gate=after", "operand=bf16"),
    ("ops.q_b.input.format=none",), ("ops.kv_b.weight.format=none", "ops.q_a.input.tile=row"),
    ("ops.kv_b.input.tile=tensor", "ops.kv_b.input.scaling=delayed"), ("roles.weight.tile=1x128",),
]  # fmt: skip


@pytest.mark.parametrize("toggle", TOGGLES, ids="+".join)
def test_other_keys_compose_with_recomputation(toggle: tuple[str, ...]) -> None:
    base = two_steps(recipe("dsv3", *toggle))
    assert_same_bits(two_steps(recipe("dsv3", *toggle, "recompute=norms_and_up")), base)


@pytest.mark.parametrize("name", ["dsv3", "static"])
@pytest.mark.parametrize(
    "sizes",
    [{"q_latent": None, "score": "softmax"}, {"shared_experts": 0, "top_k": 4}, {"tied_head": True, "mtp_depth": 2}],
    ids=str,
)
def test_other_models_give_the_same_bits(name: str, sizes: dict[str, object]) -> None:
    """Queries straight from the hidden state are made again from the attention norm's input."""
    config = nano(**sizes)
    base = two_steps(recipe(name), config)
    for value in VALUES:
        assert_same_bits(two_steps(recipe(name, f"recompute={value}"), config), base)


@pytest.mark.parametrize("name", ["delayed", "static"])
def test_a_recomputed_operand_is_not_observed_again_and_takes_forwards_scale(name: str) -> None:
    """Histories may have moved on before backward runs; the operand's codes must be those that fprop read."""
    model = build(CONFIG, recipe(name, "recompute=norms"))
    gradients(model, [windows(CONFIG)])
    model.end_step(True)
    attention = model.layers[0].attention
    x = torch.randn(9, CONFIG.dim, dtype=torch.bfloat16)
    reader = attention.kv_a.quantizers
    _, (made,) = attention.norm(x, [Reader(reader, x.dtype)])
    operand, stash = made.operand, made.stash
    state = reader.states["input"]
    assert isinstance(state, ScaleState)
    state.history.mul_(4.0)
    state.current.zero_()
    again = stash.restore(stash.tensors)
    assert torch.equal(again.codes.view(torch.uint8), operand.codes.view(torch.uint8))
    assert torch.equal(again.scale, operand.scale)
    assert torch.count_nonzero(state.current) == 0


@pytest.mark.parametrize("name", ["dsv3", "static"])
def test_what_casts_lose_does_not_depend_on_it(name: str) -> None:
    found = set()
    for value in ("none", *VALUES):
        model = build(CONFIG, recipe(name, f"recompute={value}"))
        for state in model.modules():
            if isinstance(state, ScaleState):  # frozen at a hundredth of what is coming
                state.history.fill_(0.01)
                state.steps.fill_(99)
        with measure_casts() as meter:
            gradients(model, [windows(CONFIG)])
        found.add(meter.counts())
    (counts,) = found
    assert counts.flushed > 0
    assert (counts.saturated > 0) == (name == "static")


def test_a_weight_changed_between_forward_and_backward_is_refused() -> None:
    """Recomputed q, k, v would come from codes that forward never read."""
    model = build(CONFIG, recipe("dsv3", "recompute=norms_and_up"))
    losses = model(windows(CONFIG))
    with torch.no_grad():
        model.layers[1].attention.kv_b.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model.objective(losses, losses.totals).backward()


@pytest.mark.parametrize("value", ["none", *VALUES])
@pytest.mark.parametrize("name", ["delayed", "static"])
def test_backward_observes_gradients_only(name: str, value: str) -> None:
    """What is made again was observed in forward; SwiGLU's output, made from its cache, may even have another amax."""
    model = build(CONFIG, recipe(name, "swiglu_input=bf16", f"recompute={value}"))

    def observed() -> dict[str, Tensor]:
        states = {name: module for name, module in model.named_modules() if isinstance(module, ScaleState)}
        return {name: state.current.clone() for name, state in states.items()}

    losses = model(windows(CONFIG))
    before = observed()
    model.objective(losses, losses.totals).backward()
    changed = {key for key, amax in observed().items() if not torch.equal(amax, before[key])}
    assert changed
    assert all(key.endswith(".gradient") for key in changed), changed


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["dsv3", "delayed", "bf16"])
def test_on_a_gpu_cudnns_backward_reads_the_q_k_v_that_its_forward_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits and strides. What cuDNN makes of them may be summed in another order from run to run."""
    config = nano(dim=256, heads=2, q_latent=128, kv_latent=128, head_nope=128, head_rope=64, head_v=128, context=256)
    read: dict[str, list[tuple[Tensor, ...]]] = {"forward": [], "backward": []}
    forward, backward = cudnn.attention_forward, cudnn.attention_backward

    def watched_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> object:
        read["forward"].append((q, k, v))
        return forward(q, k, v, scale)

    def watched_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> object:
        read["backward"].append((q, k, v))
        return backward(dout, q, k, v, *rest)

    monkeypatch.setattr(cudnn, "attention_forward", watched_forward)
    monkeypatch.setattr(cudnn, "attention_backward", watched_backward)
    model = build(config, recipe(name, "recompute=norms_and_up")).to("cuda")
    gradients(model, [windows(config, length=200).to("cuda")])
    assert len(read["forward"]) == len(read["backward"]) == 3
    for ours, theirs in zip(read["forward"], reversed(read["backward"]), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.stride() == b.stride()
            assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["dsv3", "tensorwise", "bf16"])
def test_on_a_gpu_isolated_documents_give_the_same_bits(name: str) -> None:
    """Isolated documents take attention kernels that sum in one order only, as the GEMMs do."""
    config, batch = nano(mtp_depth=0, experts=2, top_k=1), windows(nano()).to("cuda")
    grads = []
    for value in ("none", *VALUES):
        model = build(config, recipe(name, f"recompute={value}")).to("cuda")
        grads.append(gradients(model, [batch], [DOCUMENTS.to("cuda")]))
    blocks = [key for key in grads[0] if key.startswith("layers.")]  # the embedding's gradient adds up in any order
    for got in grads[1:]:
        assert [key for key in blocks if not torch.equal(got[key], grads[0][key])] == []
