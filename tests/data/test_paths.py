"""Which files a pattern means, and in which order, whatever the file system says."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3fp8.data.paths import expand, natural_key, walk
from dsv3fp8.errors import UserError


def test_d10_shards_are_read_in_the_order_of_their_numbers(fixtures: Path, documents: Callable[..., list[str]]) -> None:
    assert documents(fixtures / "shard_*.txt") == ["shard 1\n", "shard 2\n", "shard 10\n"]


def test_d10_the_order_in_which_a_folder_is_listed_changes_nothing(
    fixtures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for name in ("b.py", "a10.py", "a9.py", "deep/z.py", "deep/er/y.py"):
        (tmp_path / name).write_text("x")
    ordered, listed = walk(tmp_path, ".py", frozenset()), expand([str(fixtures / "*.txt")], "data.paths")
    real_scandir = os.scandir

    class Backwards:
        def __init__(self, path: object = ".") -> None:
            with real_scandir(path) as entries:  # type: ignore[call-overload]
                self._entries = sorted(entries, key=lambda entry: entry.name, reverse=True)

        def __enter__(self) -> "Backwards":
            return self

        def __exit__(self, *exception: object) -> None:
            pass

        def __iter__(self) -> object:
            return iter(self._entries)

        def __next__(self) -> object:
            return self._entries.pop(0) if self._entries else next(iter(()))

        def close(self) -> None:
            pass

    monkeypatch.setattr(os, "scandir", Backwards)
    monkeypatch.setattr(os, "listdir", lambda path=".": [entry.name for entry in Backwards(path)._entries])
    assert walk(tmp_path, ".py", frozenset()) == ordered
    assert expand([str(fixtures / "*.txt")], "data.paths") == listed
    assert [path.relative_to(tmp_path).as_posix() for path in ordered] == [
        "a9.py",
        "a10.py",
        "b.py",
        "deep/er/y.py",
        "deep/z.py",
    ]


@settings(derandomize=True, deadline=None)
@given(st.lists(st.text(alphabet="ab019._é²", max_size=6), unique=True))
def test_the_natural_order_is_total(names: list[str]) -> None:
    backwards = names[::-1]
    assert sorted(names, key=natural_key) == sorted(backwards, key=natural_key)


def test_a_pattern_without_a_file_is_refused_with_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=rf"data\.paths: no file matches no/\*\.txt \(looked from {tmp_path}\)"):
        expand(["no/*.txt"], "data.paths")


def test_a_directory_is_refused_with_the_pattern_for_its_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is a directory; name the files in it, as in .*/\*\.txt"):
        expand([f"{tmp_path}/"], "data.paths")


def test_a_file_that_two_patterns_match_is_read_once(fixtures: Path) -> None:
    twice = expand([str(fixtures / "shard_*.txt"), str(fixtures / "shard_2.txt")], "data.paths")
    assert [path.name for path in twice] == ["shard_1.txt", "shard_2.txt", "shard_10.txt"]


def test_h04_names_with_spaces_brackets_and_other_scripts_are_taken_as_they_are(tmp_path: Path) -> None:
    for name in ("数据.txt", "a b.txt", "x[1].txt"):
        (tmp_path / name).write_text("x")
        assert expand([str(tmp_path / name)], "data.paths") == [tmp_path / name]


def test_two_stars_reach_into_folders_and_a_tilde_is_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c.txt").write_text("x")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expand(["~/**/*.txt"], "data.paths") == [tmp_path / "a" / "b" / "c.txt"]
