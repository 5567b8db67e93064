"""DeepSeek's FP8 block format, against the published rule."""

import pytest
import torch
from decoding import dequantized, without_codes
from support import build, nano, recipe

from dsv3fp8.hub import layout as published
from dsv3fp8.hub.fp8 import decode, encode, grid_of, of_training, scale_problem
from dsv3fp8.hub.weights import Weights
from dsv3fp8.model.transformer import Transformer
from dsv3fp8.ops.weights import WeightCodes
from dsv3fp8.precision.recipe import LINEAR_OPS
from dsv3fp8.precision.tiles import QuantizedTensor


@pytest.mark.parametrize(
    ("shape", "grid"), [((576, 7168), (5, 56)), ((10944, 2048), (86, 16)), ((100, 100), (1, 1)), ((129, 1), (2, 1))]
)
def test_the_scales_are_a_ceiling_grid_and_reloading_is_dequantizing(shape: tuple[int, int], grid: tuple[int, int]) -> None:
    """K14: 576, 1408 and 10944 are DeepSeek's own."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02
    codes, scale = encode(weight, "fp32")
    assert grid_of(shape) == grid == tuple(scale.shape)
    assert (codes.shape, codes.dtype, scale.dtype) == (shape, torch.float8_e4m3fn, torch.float32)
    assert torch.equal(decode(codes, scale), dequantized(codes, scale))
    # The tail has its own amax: a padded zero counts for nothing, a neighbour's values neither.
    assert (decode(codes, scale) - weight).abs().max() <= weight.abs().max() / 16
    tail = weight[(grid[0] - 1) * 128 :, (grid[1] - 1) * 128 :]
    torch.testing.assert_close(scale[-1, -1], tail.abs().max() / 448, rtol=1e-6, atol=0)


def test_weight_scale_inv_multiplies() -> None:
    """K15: a tile of 3.5 has the largest code, 448, and weight_scale_inv = 3.5 / 448, not its reciprocal."""
    codes, scale = encode(torch.full((128, 128), 3.5), "fp32")
    assert scale.item() == 3.5 / 448
    assert codes.float().unique().item() == 448
    assert decode(codes, scale).unique().item() == 3.5
    assert decode(torch.ones(2, 2).to(torch.float8_e4m3fn), torch.full((1, 1), 3.5)).unique().item() == 3.5


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["dsv3", "dsv3_pow2"])
def test_exported_codes_are_those_that_training_multiplies_by(name: str, device: str) -> None:
    """Sizes that are no multiples of 128, stacks of experts and halves of gate and up among them: values and codes."""
    config = nano(
        dim=192, q_latent=136, kv_latent=144, head_rope=16, ffn=176, expert_ffn=130, shared_experts=2, heads=3, head_nope=40,
        head_v=24,
    )  # fmt: skip
    model = build(config, recipe(name))
    tensors = published.layout(config)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights = Weights(tensors, state, state, model.recipe, "fp8")
    files = {name: weights.tensor(name) for layout in weights.layouts() for name in layout}
    used = codes_of(model.to(device))
    decoded, compared = without_codes(files), 0
    for each in tensors:
        if each.op is None:
            assert f"{each.name}_scale_inv" not in files
            continue
        codes = used[each.ours]
        assert torch.equal(decoded[each.name], codes.decode()[each.index].cpu())
        assert torch.equal(files[each.name].view(torch.uint8), codes.codes[each.index].cpu().view(torch.uint8))
        compared += files[each.name].numel()
    assert compared == sum(codes.codes.numel() for codes in used.values())
    assert of_training(model.recipe, {each.op for each in tensors if each.op})
    mantissas = {float(torch.frexp(t).mantissa.max()) for n, t in files.items() if n.endswith("_scale_inv")}
    assert (mantissas == {0.5}) == (name == "dsv3_pow2")


def codes_of(model: Transformer) -> dict[str, QuantizedTensor]:
    """What fprop reads of every quantized weight, by the weight's name."""
    found = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, WeightCodes):
                parameter = f"{name}.{key.removesuffix('codes').strip('_') or 'weight'}".lstrip(".")
                operand = value.fprop(model.get_parameter(parameter)) if parameter != "head" else None
                if isinstance(operand, QuantizedTensor):
                    found[parameter] = operand
    return found


def test_only_recipes_with_such_tiles_train_on_the_codes_that_are_exported() -> None:
    ops = set(LINEAR_OPS)
    names = ("fp32", "bf16", "dsv3", "hybrid", "rowwise", "tensorwise", "delayed", "static")
    assert {name for name in names if of_training(recipe(name), ops)} == {"dsv3", "hybrid"}
    assert not of_training(recipe("dsv3", "ops.out.weight.format=none"), ops)
    assert of_training(recipe("dsv3", "ops.out.weight.format=none"), {"down"})


@pytest.mark.parametrize(
    ("scale", "kind", "said"),
    [
        ([[1.0, 0.5]], "pow2", None),
        ([[1.0, 0.3]], "fp32", None),
        ([[1.0, 0.3]], "pow2", "no powers of two"),
        ([[1.0, 0.0]], "fp32", "not finite and above 0"),
        ([[1.0, -1.0]], "pow2", "not finite and above 0"),
        ([[float("nan")]], "fp32", "not finite and above 0"),
        ([[float("inf")]], "pow2", "not finite and above 0"),
    ],
)
def test_scales_that_cannot_be_are_named(scale: list[list[float]], kind: str, said: str | None) -> None:
    problem = scale_problem(torch.tensor(scale), kind)
    assert problem is None if said is None else problem is not None and said in problem
