"""Recipes by the names a comparison shows: `dsv3`, or `dsv3:KEY=VALUE` where keys differ from those of the shipped recipe."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dsv3fp8.config import group_options, load_config
from dsv3fp8.errors import UserError
from dsv3fp8.precision.recipe import Recipe
from dsv3fp8.schema import shown, to_plain
from dsv3fp8.training.resume import ABSENT, flatten


def words_of(text: str) -> list[str]:
    """Command-line words of one entry of `recipes=`: its name, then keys of the recipe behind colons."""
    name, *keys = text.split(":")
    for key in keys:
        if "=" not in key:
            raise UserError(f"recipes={text}: behind a colon comes key=value of the recipe, as in dsv3:attention_cache=compute")
    return [f"recipe={name}", *(f"recipe.{key}" for key in keys)]


def names_of(recipes: Sequence[Recipe]) -> list[str]:
    """A name for each: equal recipes have the same one, others never. What all of them have alike is left out."""
    alike = _alike(recipes)
    return [
        ":".join([recipe.name, *(f"{key}={value}" for key, value in sorted(_differences(recipe).items()) if key not in alike)])
        for recipe in recipes
    ]


def common_keys(recipes: Sequence[Recipe]) -> list[str]:
    """`recipe.key=value` of what all of them have alike and the shipped recipe of one of their names has not."""
    alike = _alike(recipes)
    found = {key: value for recipe in recipes for key, value in _differences(recipe).items() if key in alike}
    return [f"recipe.{key}={value}" for key, value in sorted(found.items())]


def _alike(recipes: Sequence[Recipe]) -> set[str]:
    """Keys that have one value in all of them."""
    first, *others = (flatten(to_plain(recipe)) for recipe in recipes)
    return {key for key, value in first.items() if all(other.get(key, ABSENT) == value for other in others)}


def directory_name(name: str, seed: int) -> str:
    """Of a run: letters that a shell and `key=value` words leave alone."""
    return f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)}-seed{seed}"


AGAIN = "-again"
"""What the name of a run directory ends with that holds the same run once more: same recipe, same seed."""


def once_more(name: str) -> str:
    """What the second of two runs that should be one is shown under."""
    return f"{name} again"


def _differences(recipe: Recipe) -> dict[str, str]:
    """{key: value as text} of what differs from the shipped recipe of that name; all of it if there is none."""
    ours, shipped = flatten(to_plain(recipe)), _shipped(recipe.name)
    keys = [key for key in (*ours, *(key for key in shipped if key not in ours)) if key != "name"]
    return {key: shown(ours.get(key, ABSENT)) for key in keys if ours.get(key, ABSENT) != shipped.get(key, ABSENT)}


@functools.cache
def _shipped(name: str) -> Mapping[str, Any]:
    """All keys of the recipe of that name as it is shipped, none if there is no such recipe."""
    return flatten(to_plain(load_config([f"recipe={name}"]).recipe)) if name in group_options("recipe") else {}
