"""YAML read as text, and written so that no reader guesses."""

from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from dsv3fp8.errors import UserError
from dsv3fp8.yaml_text import dump_yaml, read_yaml

FIXTURES = Path(__file__).parent / "fixtures"

# `$` is left out: OmegaConf reads ${…} as an interpolation.
TEXT = st.text(st.characters(exclude_characters="$", exclude_categories=["Cs"]), max_size=12)


@settings(max_examples=200, deadline=None)
@given(TEXT)
@example("1e5")
@example("0123")
@example("4e123456")
@example("12:30:45")
@example("2026_11")
@example("no")
@example("~")
@example("null")
@example(".nan")
@example("0x1F")
@example("数据/a.txt")
@example("a: b #c")
@example("")
@example("\tx\n")
@example("=")
@example("<<")
@example("???")
def test_any_reader_gets_the_text_that_was_written(text: str) -> None:
    """H06: PyYAML and OmegaConf read every string back as that string."""
    written = dump_yaml({"key": text})
    assert yaml.safe_load(written) == {"key": text}
    assert OmegaConf.to_container(OmegaConf.create(written), throw_on_missing=False) == {"key": text}


def test_our_own_reader_gives_scalars_as_text_and_null_as_none(tmp_path: Path) -> None:
    path = tmp_path / "数据 of mine.yaml"
    path.write_text("a: 1e-4\nb: no\nc: ~\nd: null\ne: 'null'\nf:\ng: [0123, 12:30:45]\nh: {i: 2026-11-29}\n")
    assert read_yaml(path) == {
        "a": "1e-4", "b": "no", "c": None, "d": None, "e": "null", "f": None, "g": ["0123", "12:30:45"],
        "h": {"i": "2026-11-29"},
    }  # fmt: skip


def test_a_tab_is_named_by_file_and_line() -> None:
    """H06: tabs.yaml."""
    with pytest.raises(UserError, match=r"tabs\.yaml, line 2: a tab in the indentation; YAML takes spaces only"):
        read_yaml(FIXTURES / "tabs.yaml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: 1\nb: [1\n", r"x\.yaml, line 3: not valid YAML"),
        (b"a: 1\na: 2\n", r"x\.yaml, line 1: not valid YAML: a is given twice"),
        (b"- 1\n", r"x\.yaml: expected a mapping"),
        (b"", r"x\.yaml: expected a mapping"),
        (b"a: \xff\n", r"x\.yaml: not UTF-8 at byte 3"),
    ],
)
def test_a_file_that_is_no_settings_file_is_refused_in_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read_yaml(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.yaml: No such file"):
        read_yaml(tmp_path / "nowhere.yaml")
