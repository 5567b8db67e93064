"""Plain values into typed dataclasses: types, unknown keys, missing values, all complaints at once."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from dsv3fp8.config import RunConfig
from dsv3fp8.errors import UserError
from dsv3fp8.schema import build, build_words, field_notes, find_type, is_text, leaves, to_plain
from dsv3fp8.yaml_text import read_yaml

FIXTURES = Path(__file__).parent / "fixtures"


@dataclass
class Inner:
    rate: float
    steps: int = 3
    kind: Literal["a", "b"] = "a"
    tags: list[str] = field(default_factory=list)
    pair: tuple[float, float] = (0.9, 0.95)
    # Told above.
    flag: bool = False
    every: int | str = 1  # told behind
    free: dict[str, Any] = field(default_factory=dict)
    note: str | None = None
    """Told below."""

    def validate(self) -> None:
        if self.rate < 0:
            raise UserError(f"inner.rate={self.rate} must not be negative")


@dataclass
class Outer:
    inner: Inner
    name: str
    other: Inner = field(default_factory=lambda: Inner(1.0))


@dataclass
class Typed:
    """The keys of types.yaml."""

    run_name: str
    wandb_id: str
    git: str
    stamp: str
    month: str
    flag: str
    lr: float
    lr2: float
    nothing: str | None


def complaint(data: dict[str, Any], cls: type = Outer) -> str:
    with pytest.raises(UserError) as caught:
        build(cls, data)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_was_built_turns_plain_and_builds_again() -> None:
    data = {"inner": {"rate": 1, "pair": [0.5, 0.6], "free": {"a": {"b": [1, None]}}}, "name": "x"}
    built = build(Outer, data)
    assert built.inner.rate == 1.0
    assert isinstance(built.inner.rate, float)
    assert built.inner.pair == (0.5, 0.6)
    plain = to_plain(built)
    assert plain["inner"]["pair"] == [0.5, 0.6]
    assert build(Outer, plain) == built


def test_types_yaml_gives_each_key_the_type_of_its_field() -> None:
    """H06: run names stay as written, letter by letter, and 1e-4 is a number."""
    typed = build(Typed, read_yaml(FIXTURES / "types.yaml"))
    assert typed == Typed("1e5", "0123", "4e123456", "12:30:45", "2026_11", "no", 1e-4, 1e-4, None)


@pytest.mark.parametrize("value", ["1e-4", 1e-4, "0.0001", "1.0e-4"])
def test_a_rate_is_a_float_however_it_was_read(value: object) -> None:
    """H06: through YAML as text, from the command line as a number, from a sweep as either."""
    assert build(Inner, {"rate": value}).rate == 1e-4


@pytest.mark.parametrize(
    ("key", "value", "want"),
    [("steps", 1e3, 1000), ("steps", "12", 12), ("flag", "off", False), ("flag", "Yes", True), ("every", "32", 32),
     ("every", "never", "never"), ("note", None, None), ("note", "null", "null"), ("tags", ["no", "1e5"], ["no", "1e5"])],
)  # fmt: skip
def test_values_that_fit(key: str, value: object, want: object) -> None:
    got = getattr(build(Inner, {"rate": 1.0, key: value}), key)
    assert got == want
    assert type(got) is type(want)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [("rate", "fast", "a number"), ("rate", True, "a number"), ("rate", "nan", "a number"), ("rate", None, "a number"),
     ("steps", 1.5, "a whole number"), ("steps", False, "a whole number"), ("flag", 1, "true or false"),
     ("flag", "maybe", "true or false"), ("kind", "c", "one of a, b"), ("tags", "x", "a list"),
     ("note", 1e5, "text or null"), ("every", 1.5, "a whole number or text"), ("free", 3, "a mapping")],
)  # fmt: skip
def test_a_value_of_the_wrong_type_is_refused_by_key_and_type(key: str, value: object, expected: str) -> None:
    text = complaint({"inner": {"rate": 1.0, key: value}, "name": "x"})
    assert f"inner.{key}=" in text
    assert f"expected {expected}" in text


def test_the_word_null_of_a_command_line_is_none_where_a_key_may_be_that() -> None:
    words = {"name": "null", "inner": {"rate": "2", "note": "null"}}
    built = build_words(Outer, words)
    assert (built.name, built.inner.note) == ("null", None)
    with pytest.raises(UserError, match=r"inner\.rate=null: expected a number"):
        build_words(Outer, {"name": "x", "inner": {"rate": "null"}})
    with pytest.raises(UserError, match="nme: no such key"):
        build_words(Outer, {"name": "x", "inner": {"rate": "1"}, "nme": "null"})


def test_a_number_for_text_is_answered_with_the_quotes_it_needs() -> None:
    assert "name='\"100000.0\"'" in complaint({"inner": {"rate": 1}, "name": 1e5})


def test_a_pair_of_three_is_refused() -> None:
    text = complaint({"inner": {"rate": 1, "pair": [1, 2, 3]}, "name": "x"})
    assert "inner.pair=[1, 2, 3]: expected 2 values" in text


def test_everything_wrong_is_listed_at_once() -> None:
    """H10: missing values, H02: misspelt keys, H06: types, and what a class itself objects to, in one line."""
    text = complaint({"inner": {"rate": "???", "stepz": 3}, "other": {"rate": -1}, "nme": "x"})
    assert "inner.stepz: no such key; did you mean inner.steps?" in text
    assert "nme: no such key; did you mean name?" in text
    assert "inner.rate, name: no value given; add inner.rate=… name=…" in text
    assert "inner.rate=-1.0 must not be negative" in text


def test_a_key_of_another_place_is_found_by_its_name() -> None:
    """H02: `lr` alone is answered with `optimizer.lr`."""
    with pytest.raises(UserError, match=r"steps: no such key; did you mean inner\.steps\?"):
        find_type(Outer, "steps")
    assert find_type(Outer, "inner.rate") is float


def test_a_key_below_a_single_value_is_refused() -> None:
    with pytest.raises(UserError, match=r"inner\.rate\.x: inner\.rate is a single value"):
        find_type(Outer, "inner.rate.x")


@pytest.mark.parametrize(
    ("kind", "text"),
    [(str, True), (str | None, True), (Literal["a"], True), (str | list[str], True), (int | str, False), (int, False)],
)
def test_which_types_take_their_text_letter_by_letter(kind: object, text: bool) -> None:
    assert is_text(kind) is text


def test_help_is_taken_from_above_behind_or_below_a_field() -> None:
    assert field_notes(Inner) == {
        "rate": "", "steps": "", "kind": "", "tags": "", "pair": "", "flag": "Told above.", "every": "told behind",
        "free": "", "note": "Told below.",
    }  # fmt: skip
    assert [key for key, _, _ in leaves(Outer)][-1] == "other.note"


def test_every_key_of_a_run_says_what_it_does() -> None:
    """`train --help` and the README promise it."""
    assert [key for key, _, note in leaves(RunConfig) if not note] == []
