"""The recipe as data: what the shipped files say, what composes, and what is refused in one line."""

import dataclasses

import pytest
from support import RECIPES, recipe

from dsv3fp8.errors import UserError
from dsv3fp8.precision.recipe import LINEAR_OPS, ROLES, OperandSpec, Recipe
from dsv3fp8.precision.tiles import BLOCK_128, COLUMN_128, ROW_128, Tile

POW2_IN_DSV3 = {
    ("out", "input"), ("gate_up", "input"), ("shared_gate_up", "input"), ("expert_gate_up", "input"),
    ("expert_down", "gradient"),
}  # fmt: skip


def specs(name: str) -> dict[tuple[str, str], OperandSpec]:
    return {(op, role): getattr(recipe(name).linear(op), role) for op in LINEAR_OPS for role in ROLES}


@pytest.mark.parametrize("name", RECIPES)
def test_every_shipped_recipe_comes_back_from_plain_containers(name: str) -> None:
    given = recipe(name)
    assert given.name == name
    assert Recipe.from_dict(given.to_dict()) == given
    assert given.quantizes == (name not in ("fp32", "bf16"))
    assert given.compute == ("fp32" if name == "fp32" else "bf16")


def test_dsv3_has_pow2_scales_where_the_contract_says_and_fp32_elsewhere() -> None:
    for (op, role), spec in specs("dsv3").items():
        tile = "128x128" if role == "weight" else "1x128"
        assert spec == OperandSpec("e4m3", tile, "pow2" if (op, role) in POW2_IN_DSV3 else "fp32", "current"), (op, role)
    given = recipe("dsv3")
    assert (given.attention_cache, given.swiglu_cache.format, given.swiglu_cache.scale) == ("e5m6", "e4m3", "fp32")
    assert (given.operand, given.swiglu_input, given.swiglu_output, given.gate) == ("cache", "cache", "recompute", "before")


def test_the_other_recipes_differ_from_dsv3_in_what_their_name_says() -> None:
    """CONTRACT 6, one row each."""
    base = specs("dsv3")
    assert {s.scale for s in specs("dsv3_pow2").values()} == {"pow2"}
    assert recipe("dsv3_pow2").swiglu_cache.scale == "pow2"
    for (op, role), spec in specs("hybrid").items():
        assert spec == (OperandSpec("e5m2", "1x128", base[op, role].scale) if role == "gradient" else base[op, role])
    for (op, role), spec in specs("blockwise_grad").items():
        assert spec == (OperandSpec("e4m3", "128x128", base[op, role].scale) if role == "gradient" else base[op, role])
    assert specs("bf16_cache") == base
    assert (recipe("bf16_cache").attention_cache, recipe("bf16_cache").swiglu_cache.format) == ("compute", "compute")
    rows = {"rowwise": ("row", "current"), "tensorwise": ("tensor", "current")}
    rows |= {"delayed": ("tensor", "delayed"), "static": ("tensor", "static"), "no_promotion": ("row", "current")}
    for name, (tile, scaling) in rows.items():
        assert set(specs(name).values()) == {OperandSpec("e4m3", tile, "fp32", scaling)}, name
    assert recipe("delayed").amax_history == 16
    changed = {"name": "no_promotion", "accumulator": "hopper", "promote_every": "never"}
    assert recipe("no_promotion") == dataclasses.replace(recipe("rowwise"), **changed)  # its control


def test_tiles_run_along_the_gemms_k() -> None:
    spec = OperandSpec("e4m3", "1x128")
    assert (spec.tile_along(1), spec.tile_along(0)) == (ROW_128, COLUMN_128)
    assert OperandSpec("e4m3", "row").tile_along(0) == Tile(None, 1)
    assert OperandSpec("e4m3", "128x128").tile_along(0) == BLOCK_128


def test_one_thing_at_a_time_can_be_changed() -> None:
    given = recipe("dsv3", "ops.out.input.scale=fp32", "ops.q_b.gradient.format=e5m2", "ops.kv_b.retiled_scale=pow2")
    changed = {(op, role) for op in LINEAR_OPS for role in ROLES if getattr(given.linear(op), role) != specs("dsv3")[op, role]}
    assert changed == {("out", "input"), ("q_b", "gradient")}
    assert (given.linear("kv_b").retiled_scale, given.linear("kv_a").retiled_scale) == ("pow2", None)
    assert recipe("dsv3", "roles.weight.format=none").linear("q_a").weight.quantized is False
    assert recipe("dsv3").linear("mtp_projection").input.quantized is False


TILED, TENSOR = "1x128", "tensor"
REFUSED = {
    "an unknown op": ({"ops": {"q_aa": {"input": {"scale": "pow2"}}}}, r"recipe\.ops\.q_aa.*did you mean q_a\?"),
    "an unknown role": ({"roles": {"wieght": {}}}, r"recipe\.roles\.wieght.*did you mean weight\?"),
    "a role of an op by one word": ({"ops": {"out": {"input": "e4m3"}}}, r"recipe\.ops\.out\.input=e4m3: give its fields"),
    "an unknown role of an op": ({"ops": {"out": {"output": {}}}}, r"recipe\.ops\.out\.output"),
    "an unknown key": ({"gates": "after"}, r"recipe\.gates.*did you mean gate\?"),
    "an unknown key of a role": ({"roles": {"input": {"fmt": "e4m3"}}}, r"recipe\.roles\.input\.fmt"),
    "an unknown format": ({"roles": {"input": {"format": "e3m4"}}}, r"recipe\.roles\.input\.format=e3m4: choose"),
    "a format for caches only": ({"ops": {"out": {"input": {"format": "e5m6"}}}}, r"recipe\.ops\.out\.input\.format=e5m6"),
    "an unknown tile": ({"roles": {"input": {"tile": "1x64"}}}, r"recipe\.roles\.input\.tile=1x64"),
    "an unknown scale": ({"ops": {"out": {"input": {"scale": "ue8m0"}}}}, r"recipe\.ops\.out\.input\.scale=ue8m0"),
    "an unknown scaling": ({"roles": {"input": {"scaling": "late"}}}, r"recipe\.roles\.input\.scaling=late"),
    "an unknown cache": ({"attention_cache": "e5m2"}, r"recipe\.attention_cache=e5m2: choose e5m6, compute"),
    "an unknown recomputation": ({"recompute": "all"}, r"recipe\.recompute=all: choose none, norms, norms_and_up"),
    "an unknown gate": ({"gate": "inside"}, r"recipe\.gate=inside: choose before, after"),
    "an unknown compute type": ({"compute": "fp16"}, r"recipe\.compute=fp16: choose bf16, fp32"),
    "long partial sums with tiles": (
        {"roles": {"input": {"format": "e4m3", "tile": TILED}}, "promote_every": 256},
        r"recipe\.promote_every.*=256.*constant along K",
    ),
    "no promotion with tiles in one op": (
        {"ops": {"q_b": {"weight": {"format": "e4m3", "tile": "128x128"}, "promote_every": "never"}}},
        r"recipe\.ops\.q_b\.promote_every=never.*constant along K",
    ),
    "a short promotion of plain sums": (
        {"roles": {"input": {"format": "e4m3"}}, "promote_every": 32},
        r"recipe\.promote_every=32: only the tensor core's accumulator .* set recipe\.accumulator=hopper, or leave it at 128",
    ),
    "no promotion of plain sums": (
        {"roles": {"input": {"format": "e4m3", "tile": "row"}}, "accumulator": "fp32", "promote_every": "never"},
        r"recipe\.promote_every=never: only the tensor core's accumulator",
    ),
    "an unknown accumulator": ({"accumulator": "ampere"}, r"recipe\.accumulator=ampere: choose null, fp32, hopper"),
    "unknown linears": ({"linears": "apex"}, r"recipe\.linears=apex: choose ours, te"),
    "casts of ours in another's linears": (
        {"linears": "te", "roles": {"input": {"format": "e4m3"}}},
        r"recipe\.linears=te quantizes inside Transformer Engine: leave every format at none",
    ),
    "a cache under another's linears": (
        {"linears": "te", "attention_cache": "e5m6"},
        r"recipe\.attention_cache=e5m6 has no meaning under recipe\.linears=te",
    ),
    "SwiGLU's cache under another's linears": (
        {"linears": "te", "swiglu_cache": {"format": "e4m3"}},
        r"recipe\.swiglu_cache\.format=e4m3 has no meaning under",
    ),
    "recomputing another's linears": (
        {"linears": "te", "recompute": "norms"},
        r"recipe\.recompute=norms has no meaning .*: leave it at none",
    ),
    "unknown kernels": ({"gemm": "quick"}, r"recipe\.gemm=quick: choose fast, exact"),
    "an impossible promotion": ({"promote_every": 100}, r"recipe\.promote_every=100"),
    "delayed scaling of tiles": (
        {"roles": {"input": {"format": "e4m3", "tile": TILED, "scaling": "delayed"}}},
        r"delayed scaling of the input of q_a with tile 1x128.*set its tile to tensor",
    ),
    "static scaling of tiles": (
        {"ops": {"out": {"gradient": {"format": "e4m3", "tile": "row", "scaling": "static"}}}},
        r"static scaling of the gradient of out with tile row",
    ),
    "FP8 over fp32 compute": ({"compute": "fp32", "roles": {"input": {"format": "e4m3"}}}, r"recipe\.compute=fp32"),
    "no history": ({"amax_history": 0}, r"recipe\.amax_history=0"),
    "half a step": ({"calibration_steps": 1.5}, r"recipe\.calibration_steps=1\.5"),
    "no name": ({"name": ""}, r"recipe\.name is missing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_refuses_in_one_line_with_key_and_value(case: str) -> None:
    data, message = REFUSED[case]
    with pytest.raises(UserError, match=message) as caught:
        Recipe.from_dict({"name": "mine"} | data)
    assert "\n" not in str(caught.value)


def test_null_means_as_in_the_roles() -> None:
    data = {
        "name": "mine",
        "roles": {"input": {"format": "e4m3"}},
        "ops": {"out": {"input": {"scale": None}, "promote_every": None}},
    }
    given = Recipe.from_dict(data)
    assert given.ops == {}
    assert given.linear("out").input == OperandSpec("e4m3")


@pytest.mark.parametrize("every", [32, 64, 128, 256, 512, 1024, 2048, 4096, "never"])
def test_every_promotion_interval_is_for_some_tiles(every: int | str) -> None:
    for tile in ("1x128", "row", "tensor"):
        role = {"format": "e4m3", "tile": tile}
        data = {"name": "mine", "accumulator": "hopper", "promote_every": every, "roles": {"input": role, "gradient": role}}
        if tile == "1x128" and every not in (32, 64, 128):
            with pytest.raises(UserError, match="constant along K"):
                Recipe.from_dict(data)
        else:
            assert Recipe.from_dict(data).linear("out").promote_every == every
