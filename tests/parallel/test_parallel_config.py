"""Layouts over GPUs: what each size comes to, and which cannot work."""

import pytest

from dsv3fp8.errors import UserError
from dsv3fp8.parallel.config import ParallelConfig


@pytest.mark.parametrize(
    ("sizes", "ranks", "expert_shard", "expert_replicate"),
    [
        ((1, 1, 1), 1, 1, 1),
        ((1, 8, 2), 8, 4, 1),  # four expert groups in the shard group: each expert is cut in four
        ((4, 1, 2), 4, 1, 2),  # an expert group of two replicas
        ((2, 4, 4), 8, 1, 2),
        ((2, 4, 8), 8, 1, 1),  # an expert group over both shard groups
        ((1, 2048, 64), 2048, 32, 1),
    ],
)
def test_experts_have_a_mesh_of_their_own(
    sizes: tuple[int, int, int], ranks: int, expert_shard: int, expert_replicate: int
) -> None:
    parallel = ParallelConfig(*sizes)
    parallel.validate()
    assert (parallel.ranks, parallel.expert_shard, parallel.expert_replicate) == (ranks, expert_shard, expert_replicate)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((0, 1, 1), "parallel.dp_replicate=0: give a whole number of GPUs, 1 or more"),
        ((1, -2, 1), "parallel.dp_shard=-2: give a whole number"),
        (
            (1, 2, 4),
            "parallel.expert=4 exceeds the 2 GPUs that parallel.dp_replicate and parallel.dp_shard make: lower it to 2",
        ),
        ((1, 8, 3), "parallel.expert=3 does not divide 8 GPUs: set it to 2"),
        ((2, 12, 8), "parallel.expert=8 neither divides parallel.dp_shard=12 nor is a multiple of it: set it to 6"),
    ],
)
def test_sizes_that_do_not_fit_each_other(sizes: tuple[int, int, int], said: str) -> None:
    with pytest.raises(UserError) as error:
        ParallelConfig(*sizes).validate()
    assert str(error.value).startswith(said)
