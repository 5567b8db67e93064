"""Learning rates against values worked out by hand."""

import math

import pytest

from dsv3fp8.training.config import ScheduleConfig
from dsv3fp8.training.schedule import learning_rate

PEAK = 1e-3
TOTAL = 10


def rates(schedule: ScheduleConfig, last: int = TOTAL) -> list[float]:
    return [learning_rate(step, schedule, PEAK, TOTAL) for step in range(1, last + 1)]


def test_the_v3_shape_is_warm_up_then_constant_then_cosine() -> None:
    lrs = rates(ScheduleConfig(name="v3", warmup=2, constant=0.4, final=0.1))
    assert lrs[:6] == [PEAK / 2] + [PEAK] * 5
    # Four steps from the peak at 6 to a tenth of it at 10: a quarter, half and three quarters along the cosine.
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * share)) / 2 for share in (0.25, 0.5, 0.75, 1.0)]
    assert lrs[6:] == pytest.approx([PEAK * value for value in expected], rel=1e-12)
    assert lrs[7] == pytest.approx(0.55 * PEAK)


@pytest.mark.parametrize("name", ["v3", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, TOTAL, TOTAL + 1])
def test_every_warm_up_length_has_defined_rates_and_the_minimum_after_the_end(name: str, warmup: int) -> None:
    """O13: warm-up of 0, 1, total and total + 1 steps; beyond the end the cosine must not rise again."""
    schedule = ScheduleConfig(name=name, warmup=warmup, final=0.1)
    lrs = rates(schedule, last=4 * TOTAL)
    assert all(math.isfinite(lr) and 0 < lr <= PEAK for lr in lrs)
    assert lrs[TOTAL:] == [pytest.approx(0.1 * PEAK)] * (3 * TOTAL)
    assert lrs[0] == pytest.approx(PEAK / warmup if warmup > 1 else lrs[0])
    if warmup == 1:
        assert lrs[0] == PEAK
    if warmup >= TOTAL:
        assert lrs[:TOTAL] == pytest.approx([PEAK * (step + 1) / warmup for step in range(TOTAL)])
    else:
        assert lrs[TOTAL - 1] == pytest.approx(0.1 * PEAK)
        assert lrs == sorted(lrs, reverse=True)


def test_a_constant_schedule_stays_at_the_peak() -> None:
    assert rates(ScheduleConfig(name="constant", warmup=2), last=12) == [PEAK / 2] + [PEAK] * 11


def test_a_constant_part_of_the_whole_run_leaves_no_room_for_the_cosine() -> None:
    lrs = rates(ScheduleConfig(name="v3", warmup=3, constant=1.0), last=TOTAL)
    assert lrs[2:] == [PEAK] * 8
