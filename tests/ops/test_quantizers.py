"""Where scales come from: this tensor, the last steps (delayed) or a calibration (static)."""

import pytest
import torch
from support import recipe
from torch import Tensor

from dsv3fp8.ops.quantizers import LinearQuantizers, ScaleState
from dsv3fp8.precision.tiles import QuantizedTensor


def make(name: str, *overrides: str, op: str = "q_b", experts: int = 0) -> LinearQuantizers:
    roles = ("weight", "input") if experts else ("weight",)
    return LinearQuantizers(recipe(name, *overrides), op, experts, per_expert=roles)


def state(quantizers: LinearQuantizers, role: str = "input") -> ScaleState:
    found = quantizers.states[role]
    assert isinstance(found, ScaleState)
    return found


def used_scale(quantizers: LinearQuantizers, amax: float, role: str = "input") -> float:
    """The scale times 448: the amax that the quantizer went by."""
    out = quantizers.quantize(role, torch.tensor([[amax, -amax / 2]]), 1)
    assert isinstance(out, QuantizedTensor)
    return float(out.scale) * 448


def end_step(quantizers: LinearQuantizers, applied: bool = True) -> None:
    for role in quantizers.states:
        state(quantizers, role).end_step(applied)


def test_delayed_scaling_goes_by_the_largest_amax_of_the_last_steps() -> None:
    quantizers = make("delayed", "amax_history=3")
    used = []
    for amax in (4.0, 8.0, 2.0, 1.0, 1.0, 1.0):
        used.append(used_scale(quantizers, amax))
        end_step(quantizers)
    # The first step has no history and goes by itself.
    assert used == pytest.approx([4.0, 4.0, 8.0, 8.0, 8.0, 2.0], rel=1e-6)


def test_delayed_scaling_saturates_what_the_history_did_not_foresee() -> None:
    quantizers = make("delayed")
    used_scale(quantizers, 1.0)
    end_step(quantizers)
    out = quantizers.quantize("input", torch.tensor([[100.0, 0.5]]), 1)
    assert isinstance(out, QuantizedTensor)
    assert out.decode()[0].tolist() == pytest.approx([1.0, 0.5], rel=0.04)
    out = quantizers.quantize("input", torch.tensor([[torch.inf, 0.5]]), 1)
    assert isinstance(out, QuantizedTensor)
    assert torch.isnan(out.decode()).all()


def test_a_history_rolls_once_per_step_however_many_micro_batches() -> None:
    quantizers = make("delayed", "amax_history=4")
    for amax in (1.0, 5.0, 2.0):  # three micro-batches
        assert used_scale(quantizers, amax) == pytest.approx(amax)  # no history yet
    end_step(quantizers)
    assert state(quantizers).history[:, 0].tolist() == [5.0, 0.0, 0.0, 0.0]
    used_scale(quantizers, 3.0)
    end_step(quantizers)
    assert state(quantizers).history[:, 0].tolist() == [3.0, 5.0, 0.0, 0.0]


@pytest.mark.parametrize("name", ["delayed", "static"])
def test_a_skipped_step_leaves_no_trace(name: str) -> None:
    """A step with NaN is not applied: its amax is forgotten."""
    quantizers = make(name)
    used_scale(quantizers, 2.0)
    end_step(quantizers)
    before = {k: v.clone() for k, v in quantizers.state_dict().items()}
    used_scale(quantizers, torch.nan)
    used_scale(quantizers, 1000.0)
    end_step(quantizers, applied=False)
    assert all(torch.equal(v, before[k]) for k, v in quantizers.state_dict().items())
    used_scale(quantizers, 1.0)
    end_step(quantizers)
    assert float(state(quantizers).history.amax()) == 2.0


@pytest.mark.parametrize("name", ["delayed", "static"])
def test_evaluation_observes_nothing(name: str) -> None:
    """T13's sibling: validation must not move the scales of training."""
    quantizers = make(name)
    used_scale(quantizers, 2.0)
    quantizers.eval()
    used_scale(quantizers, 1000.0)
    quantizers.train()
    end_step(quantizers)
    assert float(state(quantizers).history.amax()) == 2.0


def test_static_scales_are_calibrated_and_then_frozen() -> None:
    quantizers = make("static", "calibration_steps=3")
    used = []
    for amax in (4.0, 8.0, 2.0, 100.0, 1.0):
        used.append(used_scale(quantizers, amax))
        end_step(quantizers)
    assert used == pytest.approx([4.0, 8.0, 2.0, 8.0, 8.0], rel=1e-6)


def test_the_state_is_fp32_and_travels_in_the_checkpoint() -> None:
    quantizers, other = make("delayed"), make("delayed")
    used_scale(quantizers, 3.0)
    end_step(quantizers)
    saved = quantizers.state_dict()
    assert {k.rsplit(".")[-1] for k in saved} == {"history", "steps"}
    assert saved["states.input.history"].dtype == torch.float32
    assert saved["states.input.history"].shape == (16, 1)
    other.load_state_dict(saved)
    assert used_scale(other, 50.0) == used_scale(quantizers, 50.0) == pytest.approx(3.0)


def rows(*amax: float) -> Tensor:
    """One block of 128 rows for each value."""
    return torch.cat([torch.full((128, 2), value) for value in amax])


def test_every_expert_has_its_own_history() -> None:
    quantizers = make("delayed", op="expert_down", experts=3)
    groups = torch.tensor([0, 0, 2])
    for _ in range(2):
        out = quantizers.quantize("input", rows(1.0, 4.0, 16.0), 1, groups=groups)
        assert isinstance(out, QuantizedTensor)
        assert (out.scale[:, 0] * 448).tolist() == pytest.approx([4.0, 4.0, 16.0], rel=1e-6)
        end_step(quantizers)
    assert state(quantizers).history[:2].tolist() == [[4.0, 0.0, 16.0]] * 2
    weight = torch.tensor([1.0, 2.0, 4.0])[:, None, None].expand(3, 5, 6)
    quantized = quantizers.quantize("weight", weight, 1)
    assert isinstance(quantized, QuantizedTensor)
    assert (quantized.scale.flatten() * 448).tolist() == pytest.approx([1.0, 2.0, 4.0], rel=1e-6)
    assert quantizers.quantize("input", rows(1.0)[:0], 1, groups=groups[:0]) is not None


@pytest.mark.parametrize("name", ["tensorwise", "delayed", "static"])
def test_codes_with_one_scale_an_expert_serve_wgrad_as_they_are(name: str) -> None:
    """Casting them again would round twice, and under delayed or static scaling by another scale than forward's."""
    quantizers, groups = make(name, "calibration_steps=1", op="expert_down", experts=3), torch.tensor([0, 0, 2])
    quantizers.quantize("input", rows(7.0, 7.0, 7.0), 1, groups=groups)
    end_step(quantizers)
    kept = quantizers.quantize("input", rows(1.0, 4.0, 6.0), 1, groups=groups)
    assert quantizers.retile("input", kept, groups) is kept
    sent = quantizers.quantize("gradient", rows(1.0, 4.0, 6.0), 1)  # one scale for all that is dispatched
    received = quantizers.retile("gradient", sent, groups)
    assert isinstance(received, QuantizedTensor)
    assert (received.scale[:, 0] * 448).tolist() == pytest.approx([4.0, 4.0, 6.0], rel=5e-2)


def test_a_cache_in_bf16_is_quantized_for_wgrad_and_one_in_fp8_decoded_where_the_op_is_not() -> None:
    kept = torch.randn(64, 32).bfloat16()
    fp8, plain = make("dsv3"), make("bf16")
    along_tokens = fp8.retile("input", kept)
    assert isinstance(along_tokens, QuantizedTensor)
    assert along_tokens.scale.shape == (1, 32)
    codes = fp8.quantize("input", kept, 1)
    assert isinstance(codes, QuantizedTensor)
    decoded = plain.retile("input", codes)
    assert torch.equal(decoded, codes.decode().bfloat16())
    assert plain.retile("input", kept) is kept
