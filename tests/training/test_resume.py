"""Which changes of a run's settings are refused, and how the refusal reads."""

import pytest

from dsv3fp8.errors import UserError
from dsv3fp8.training.resume import changed_keys, refuse_changes, refuse_other_corpus

SAVED = {
    "model": {"dim": 64, "vocab_size": 320},
    "optimizer": {"lr": 1e-3, "betas": [0.9, 0.95]},
    "data": {"path": "a", "workers": 0},
    "recipe": {"name": "dsv3", "recompute": "none"},
    "logging": {"wandb": "offline"},
    "training": {"steps": 10, "checkpoint_every": 5, "batch": 4},
    "run_dir": "runs/a",
}


def with_changes(**groups: dict) -> dict:
    return {key: {**value, **groups.get(key, {})} if isinstance(value, dict) else value for key, value in SAVED.items()}


def test_what_only_looks_or_saves_or_recomputes_may_change() -> None:
    current = with_changes(
        data={"workers": 2}, logging={"wandb": "disabled"}, training={"checkpoint_every": 1}, model={"vocab_size": None},
        recipe={"recompute": "norms"},
    )  # fmt: skip
    assert changed_keys(SAVED, {**current, "run_dir": "runs/b"}) == {}


def test_what_bends_the_curve_is_refused_in_one_line_with_old_and_new_values() -> None:
    current = with_changes(optimizer={"lr": 2e-3, "betas": [0.9, 0.99]}, model={"tied": True})
    changed = changed_keys(SAVED, current)
    with pytest.raises(UserError) as error:
        refuse_changes("runs/a", 5, changed)
    assert str(error.value) == (
        "run_dir=runs/a holds step 5 of a run with other settings (model.tied (absent) → true, "
        "optimizer.lr 0.001 → 0.002, optimizer.betas [0.9, 0.95] → [0.9, 0.99]): give the old ones, choose another "
        "run_dir= or set resume=fork to go on from there with the new ones"
    )


def test_a_key_that_is_gone_counts_as_a_change() -> None:
    current = with_changes()
    del current["optimizer"]["lr"]
    assert changed_keys(SAVED, current) == {"optimizer.lr": (1e-3, "(absent)")}


def test_other_files_behind_the_same_settings_are_refused() -> None:
    refuse_other_corpus("runs/a", 5, "abc", "abc")
    with pytest.raises(UserError, match=r"corpus hash abc → def.*corpus\.json"):
        refuse_other_corpus("runs/a", 5, "abc", "def")
