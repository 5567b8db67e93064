"""YAML in and out, without YAML's guesses.

A YAML 1.1 reader makes a number of the run name `1e5`, of `0123` and of `12:30:45`, and a truth value of `no`, while it
leaves the learning rate `1e-4` as text. Files are therefore read as text, and dsv3fp8.schema gives each value the type
of its key. What is written is quoted wherever another reader might guess.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from dsv3fp8.errors import UserError

# Text that no YAML reader takes for anything else: a word that starts with a letter or a slash.
_PLAIN = re.compile(r"[A-Za-z/][\w./+-]*")
_WORDS = {"true", "false", "yes", "no", "on", "off", "y", "n", "null"}


class _TextLoader(yaml.SafeLoader):
    """Every scalar is text, save null; a key given twice is an error."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = next((key for i, key in enumerate(keys) if key in keys[:i]), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"{twice} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


_TextLoader.yaml_implicit_resolvers = {
    first: kept
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    if (kept := [pair for pair in resolvers if pair[0] == "tag:yaml.org,2002:null"])
}


class _Dumper(yaml.SafeDumper):
    def represent_text(self, text: str) -> yaml.Node:
        plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_Dumper.add_representer(str, _Dumper.represent_text)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file, its scalars as text. Raises UserError with the file and the line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        data = yaml.load(text, _TextLoader)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; give the path of a YAML file of settings") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}; save the file as UTF-8") from error
    except yaml.YAMLError as error:
        raise UserError(explain_yaml_error(error, str(path))) from error
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected a mapping of keys to values, as in `training: {{steps: 10}}`")
    return data


def dump_yaml(data: dict[str, Any]) -> str:
    """YAML text in the order given; any reader gets the same values from it."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def explain_yaml_error(error: yaml.YAMLError, path: str) -> str:
    """One line with the file, the line and what is wrong there."""
    mark = getattr(error, "problem_mark", None)
    if mark and Path(str(mark.name)).is_file():  # YAML read from an open file knows which
        path = mark.name
    where = f"{path}, line {mark.line + 1}" if mark else path
    problem = str(getattr(error, "problem", None) or error).splitlines()[0]
    if "'\\t'" in problem:
        return f"{where}: a tab in the indentation; YAML takes spaces only"
    return f"{where}: not valid YAML: {problem}"
