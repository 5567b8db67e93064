"""Verdicts on planted curves, and what the report says of them."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up import STEPS, falling, make_run

from dsv3fp8.errors import UserError
from dsv3fp8.observe.compare.runs import read_runs
from dsv3fp8.observe.compare.study import study
from dsv3fp8.observe.compare.tables import findings, means, rules, subtitle, title
from dsv3fp8.observe.compare.verdict import has_blown_up, judge, worse

NARROW = 1e-4


@pytest.fixture
def against(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """against(curve of a seed, …): the study of two such dsv3 runs beside two of bf16 with a narrow band."""

    def compare(
        curve: Callable[[int], Callable[[int], float]], stop: int | None = None, noise: float = NARROW
    ) -> dict[str, Any]:
        for seed in (0, 1):
            make_run(tmp_path / f"b{seed}", "bf16", seed, falling(seed, noise))
            make_run(tmp_path / f"d{seed}", "dsv3", seed, curve(seed), stop=stop)
        return study(read_runs(sorted(tmp_path.iterdir())))

    return compare


def verdict(data: dict[str, Any]) -> str:
    assert [recipe["name"] for recipe in data["recipes"]] == ["bf16", "dsv3"]
    return data["recipes"][1]["verdict"]


def test_identical_curves_are_within_the_band(against: Any) -> None:
    data = against(lambda seed: falling(seed, NARROW))
    assert verdict(data) == "within the band"
    assert data["recipes"][1]["validation_verdict"] == "within the band"
    assert data["recipes"][1]["training"]["error_by_seed"] == {0: 0.0, 1: 0.0}
    assert data["recipes"][0]["verdict"] == "baseline"


def test_a_percent_is_outside_a_narrow_band(against: Any) -> None:
    data = against(lambda seed: falling(seed, NARROW, offset=0.01))
    assert verdict(data) == "outside the band"
    training = data["recipes"][1]["training"]
    assert training["error"] == pytest.approx(0.01, abs=2e-4)
    assert 0 < training["band"] < 1e-3
    (line,) = (
        line for line in findings(data) if line.startswith("dsv3 ends against bf16 at +1.00 % in training loss (seed 0: +1.")
    )
    assert re.search(r"outside the band of ±0\.0\d %, and at \+1\.\d\d % in validation loss .*, outside the band of ±0\.", line)


def test_a_percent_is_within_a_wide_band(against: Any) -> None:
    data = against(lambda seed: falling(seed, 0.05, offset=0.01), noise=0.05)
    assert verdict(data) == "within the band"
    assert data["recipes"][1]["training"]["error"] == pytest.approx(0.01, abs=1e-3)
    assert data["recipes"][1]["training"]["band"] > 0.01


def test_a_run_that_gives_up_on_nan_has_diverged(against: Any) -> None:
    data = against(lambda seed: lambda step: falling(seed)(step) if step < 90 else math.nan, stop=99)
    assert verdict(data) == "diverged"
    assert data["recipes"][1]["runs"][0] == {"seed": 0, "state": "diverged", "last_step": 99, "skipped": 10, "error": None}
    assert "dsv3 diverged in 2 of 2 runs (seed 0, 1)." in findings(data)
    assert data["recipes"][1]["training"]["error"] is None


def test_nan_in_all_of_the_last_window_has_diverged(against: Any) -> None:
    """With training.max_skipped above what is left of the run, it ends by itself."""
    data = against(lambda seed: lambda step: falling(seed)(step) if step <= STEPS - 10 or step % 50 == 1 else math.nan)
    assert verdict(data) == "diverged"


def test_a_loss_that_blows_up_has_diverged(against: Any) -> None:
    data = against(lambda seed: lambda step: falling(seed)(step) * (1 if step < 150 else 1.5))
    assert verdict(data) == "diverged"


def test_a_spike_that_passes_has_not(against: Any) -> None:
    data = against(lambda seed: lambda step: falling(seed, NARROW)(step) * (3 if 100 < step < 110 else 1))
    assert verdict(data) == "within the band"


def test_a_few_skipped_steps_are_counted_and_left_out_of_the_means(against: Any) -> None:
    data = against(lambda seed: lambda step: math.nan if step in (50, STEPS - 1) else falling(seed, NARROW)(step))
    assert verdict(data) == "within the band"
    assert [run["skipped"] for run in data["recipes"][1]["runs"]] == [2, 2]


def test_nothing_is_said_of_a_run_that_is_not_finished(against: Any) -> None:
    data = against(lambda seed: falling(seed, offset=0.2), stop=150)
    assert verdict(data) == "unfinished"
    assert data["recipes"][1]["training"]["error"] is None
    assert "dsv3 is not finished (seed 0 at step 150, seed 1 at step 150): no verdict." in findings(data)
    error = data["curves"]["training"]["recipes"]["dsv3"]["error"]
    assert error[data["curves"]["training"]["step"].index(150)] == pytest.approx(0.2, abs=0.02)
    assert error[-1] is None


def test_means_are_over_the_seeds_that_all_recipes_have(tmp_path: Path) -> None:
    """A second seed of the baseline, 20 % higher, is in the band, and no difference of recipes."""
    for seed, offset in ((0, 0.0), (1, 0.2)):
        make_run(
            tmp_path / f"b{seed}", "bf16", seed, falling(0, 0.0, offset), fields=lambda step, s=seed: {"grad_norm": 1.0 + s}
        )
    make_run(tmp_path / "d0", "dsv3", 0, falling(0, 0.0))
    data = study(read_runs(sorted(tmp_path.iterdir())))
    bf16, dsv3 = data["recipes"]
    for loss in ("training", "validation"):
        assert bf16[loss]["loss"] == dsv3[loss]["loss"] == pytest.approx(2.0, rel=0.1)
        assert bf16[loss]["band"] == pytest.approx(2 * 0.2 / 1.1, rel=1e-6)
        curves = data["curves"][loss]["recipes"]
        assert curves["bf16"]["loss"] == curves["dsv3"]["loss"] == curves["bf16"]["loss_by_seed"][0]
    assert bf16["grad_norm"] == 1.0
    assert set(filter(None, data["curves"]["grad_norm"]["recipes"]["bf16"])) == {1.0}
    assert means(data) == "of seed 0, which all recipes have"


def test_what_the_baseline_differs_from_itself_by_is_said_and_not_judged(tmp_path: Path) -> None:
    """A second run 0.5 % above the first but for a step in the middle, where it is 40 % above; the band is 0.02 % wide."""
    for seed in (0, 1):
        make_run(tmp_path / f"b-seed{seed}", "bf16", seed, falling(seed, NARROW))
        make_run(tmp_path / f"d-seed{seed}", "dsv3", seed, falling(seed, NARROW))
    first = falling(0, NARROW)
    make_run(tmp_path / "b-seed0-again", "bf16", 0, lambda step: first(step) * (1.4 if step == 120 else 1.005))
    data = study(read_runs(sorted(tmp_path.iterdir())), window=1)
    bf16, again, dsv3 = data["recipes"]
    assert (again["name"], again["verdict"], again["false_alarm"]) == ("bf16 again", "again", None)
    assert again["training"]["error"] == pytest.approx(0.005)
    assert again["training"]["largest_error"] == (pytest.approx(0.4), 120)
    assert (bf16["verdict"], dsv3["verdict"]) == ("baseline", "within the band")
    assert len(bf16["training"]["loss_by_seed"]) == 2
    assert again["training"]["loss"] is again["grad_norm"] is None  # of seed 0 alone, beside means over both
    assert not any(data["curves"]["training"]["recipes"]["bf16 again"]["loss"])
    assert means(data) == "means over seeds"
    assert (title(data), "2 seeds a recipe" in subtitle(data)) == ("dsv3 against bf16", True)
    assert (
        "bf16 differs from itself, trained a second time from the same seed, in training loss seed 0: +0.50 % at the end, "
        "+40.00 % at step 120, the most; in validation loss seed 0: +0.50 % at the end, +40.00 % at step 120, the most: a "
        "difference of that size at that place cannot be told from chance."
    ) in findings(data)
    assert any(line.startswith("again: ") for line in rules(data))


def test_equal_second_runs_are_called_equal(tmp_path: Path) -> None:
    for name in ("b-seed0", "b-seed0-again"):
        make_run(tmp_path / name, "bf16", 0)
    (line, *_) = findings(study(read_runs(sorted(tmp_path.iterdir()))))
    assert line == "bf16, trained a second time from the same seed, took the same steps."


def test_of_a_second_run_only_what_both_ran_counts(tmp_path: Path) -> None:
    """The first stopped at step 120, and says nothing of what the second did later; no pair has ended."""
    first = falling(0, NARROW)
    make_run(tmp_path / "b-seed0", "bf16", 0, first, stop=120)
    make_run(tmp_path / "b-seed0-again", "bf16", 0, lambda step: first(step) * (1.01 if step > 120 else 1))
    data = study(read_runs(sorted(tmp_path.iterdir())))
    again = data["recipes"][1]
    assert again["verdict"] == "no baseline"
    assert again["training"]["largest_error"] is None
    curve = data["curves"]["training"]["recipes"]["bf16 again"]["error"]
    assert {value for value in curve if value is not None} == {0.0}
    assert "bf16 again has no finished run of bf16 with the same seed to be held against." in findings(data)


@pytest.mark.parametrize(
    ("runs", "baseline"),
    [
        ([("bf16", "a"), ("dsv3", "b"), ("dsv3", "b-again")], None),
        ([("bf16", "a"), ("bf16", "a-again"), ("dsv3", "b")], "dsv3"),
        ([("bf16", "a-again"), ("dsv3", "b")], None),
    ],
)
def test_a_second_run_of_no_baseline_is_refused(runs: list[tuple[str, str]], baseline: str | None, tmp_path: Path) -> None:
    paths = [make_run(tmp_path / name, recipe) for recipe, name in runs]
    with pytest.raises(UserError, match=r"-again is (bf16|dsv3) again seed 0: a second run is held against the first"):
        study(read_runs(paths), baseline)
    with pytest.raises(UserError, match="all runs are second ones"):
        study(read_runs([path for path in paths if path.name.endswith("-again")]))


def test_the_band_says_how_many_finished_seeds_it_rests_on(tmp_path: Path) -> None:
    for seed in (0, 1, 2):
        make_run(tmp_path / f"b{seed}", "bf16", seed, stop=150 if seed == 2 else None)
    assert any(
        line.startswith("The bands rest on 2 seeds of bf16.") for line in findings(study(read_runs(sorted(tmp_path.iterdir()))))
    )


def test_recipes_without_a_common_seed_have_means_of_their_own(tmp_path: Path) -> None:
    make_run(tmp_path / "b", "bf16", 0, falling(0, 0.0))
    make_run(tmp_path / "d", "dsv3", 1, falling(0, 0.0, 0.5))
    data = study(read_runs(sorted(tmp_path.iterdir())))
    bf16, dsv3 = data["recipes"]
    assert dsv3["training"]["loss"] == pytest.approx(1.5 * bf16["training"]["loss"], rel=1e-6)
    assert dsv3["verdict"] == "no baseline"
    assert means(data) == "means over the seeds of each recipe, which are not the same ones"


def test_one_seed_of_the_baseline_makes_no_band_and_no_claim(tmp_path: Path) -> None:
    make_run(tmp_path / "b", "bf16")
    make_run(tmp_path / "d", "dsv3", loss=falling(0, offset=0.3))
    data = study(read_runs(sorted(tmp_path.iterdir())))
    assert verdict(data) == "no band"
    assert data["curves"]["training"]["band"] is None
    text = " ".join(findings(data))
    assert "There is no band: it takes two finished seeds of bf16." in text
    assert "within" not in text
    assert "outside" not in text


def test_a_baseline_that_diverged_holds_nothing_up(tmp_path: Path) -> None:
    for seed in (0, 1):
        make_run(tmp_path / f"b{seed}", "bf16", seed, lambda step: falling(0)(step) if step < 90 else math.nan, stop=99)
        make_run(tmp_path / f"d{seed}", "dsv3", seed)
    data = study(read_runs(sorted(tmp_path.iterdir())))
    assert [recipe["verdict"] for recipe in data["recipes"]] == ["diverged", "no baseline"]


def test_a_noisy_baseline_that_has_learned_did_not_diverge() -> None:
    """Its end may lie well above its lowest point by chance; there is nothing to hold it against."""
    curve = np.array([5.5, 4.0, 3.0, 3.5])
    assert not has_blown_up(curve, False, None)
    assert has_blown_up(curve, False, 3.0)
    assert not has_blown_up(curve, False, 3.4)
    curve[-1] = 4.5
    assert has_blown_up(curve, False, None)


def test_the_border_belongs_to_the_band_and_signs_do_not_matter() -> None:
    assert judge(["complete"], {0: -0.01}, 0.01) == "within the band"
    assert judge(["complete"], {0: -0.0101}, 0.01) == "outside the band"
    assert judge(["complete"] * 2, {0: 0.03, 1: -0.02}, 0.01) == "within the band"


def test_either_loss_can_put_a_recipe_outside(tmp_path: Path) -> None:
    """Batches differ between seeds, so the band of training loss is the wider one."""
    for seed in (0, 1):
        exact, noisy = falling(seed, NARROW), falling(seed, 0.03)
        make_run(tmp_path / f"b{seed}", "bf16", seed, noisy, validation=exact)
        more = [lambda step, f=f: 1.01 * f(step) for f in (noisy, exact)]
        make_run(tmp_path / f"d{seed}", "dsv3", seed, more[0], validation=more[1])
    _, dsv3 = study(read_runs(sorted(tmp_path.iterdir())))["recipes"]
    assert (dsv3["training_verdict"], dsv3["validation_verdict"]) == ("within the band", "outside the band")
    assert dsv3["verdict"] == "outside the band"
    assert dsv3["training"]["error"] == pytest.approx(0.01)
    assert worse("outside the band", "within the band") == "outside the band"
    assert worse("diverged", "diverged") == "diverged"


def test_the_rules_of_all_verdicts_that_occur_are_told(against: Any) -> None:
    told = rules(against(lambda seed: falling(seed), stop=150))
    assert [line.partition(":")[0] for line in told] == ["unfinished", "within the band", "outside the band"]
