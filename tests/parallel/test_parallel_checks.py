"""Layouts that do not fit the ranks, the model or the recipe: refused for `train` and `plan` in the same words."""

import pytest
from support import nano

from dsv3fp8.config import load_config
from dsv3fp8.parallel.checks import layout_problems
from dsv3fp8.parallel.config import ParallelConfig


@pytest.mark.parametrize(
    ("sizes", "ranks", "recipe", "said"),
    [
        (
            (2, 4, 1), 16, "dsv3",
            "parallel.dp_replicate=2 times parallel.dp_shard=4 make 8 ranks, not 16: set parallel.dp_replicate=4, "
            "or start 8 with torchrun (plan: gpus=8)",
        ),
        ((2, 4, 1), 9, "dsv3", "make 8 ranks, not 9: set parallel.dp_replicate=1 parallel.dp_shard=9, or start 8"),
        ((1, 8, 8), 8, "dsv3", "parallel.expert=8 does not divide model.experts=4: set it to 4"),
        ((1, 2, 1), 2, "te_blockwise", "parallel.dp_shard=2: Transformer Engine's linears read whole weights; set it to 1"),
        ((2, 1, 2), 2, "tensorwise", "parallel.expert=2: recipe=tensorwise keeps one scale for all rows of expert_gate_up's"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_with_its_remedy(sizes: tuple[int, int, int], ranks: int, recipe: str, said: str) -> None:
    (problem,) = layout_problems(ParallelConfig(*sizes), ranks, nano(), load_config([f"recipe={recipe}"]).recipe)
    assert said in problem


def test_a_model_without_experts_has_none_to_deal_out() -> None:
    dense, recipe = nano(dense_layers=2), load_config([]).recipe
    assert layout_problems(ParallelConfig(1, 2, 1), 2, dense, recipe) == []
    (problem,) = layout_problems(ParallelConfig(1, 2, 2), 2, dense, recipe)
    assert problem == "parallel.expert=2: model=nano has no routed experts; set it to 1"
