"""The text of `dsv3fp8 train --help`: groups with their choices, and each key with its default and its comment."""

import shutil
import textwrap
from collections.abc import Iterable
from typing import Any

from dsv3fp8.config import GROUPS, RunConfig, config_dir, group_options, load_config
from dsv3fp8.schema import leaves, name_of, shown
from dsv3fp8.yaml_text import read_yaml

_HEAD = """\
Usage: dsv3fp8 train [group=choice …] [key=value …] [config=FILE.yaml]

Trains, or goes on with the run that is in run_dir. Paths are read from the
directory the command is started in. config=FILE.yaml lays a file's values, say
of another run's config.yaml, over the groups; the command line wins over it.
Text with special signs takes double quotes, and single ones for the shell:
'data.paths=["数据/a.txt","my texts/*.txt"]'

Groups (* is the default)"""


def settings_help(width: int | None = None) -> str:
    """The whole help text, wrapped to the terminal."""
    width = width or min(shutil.get_terminal_size().columns, 120)
    lines = [_HEAD]
    for group in GROUPS:
        lines += _entry(group, ", ".join(_marked(group)), 14, width)
    lines.append("\nKeys, with their defaults")
    # run_dir as it is written, not as it comes out in this directory.
    defaults = load_config([]).to_dict() | {"run_dir": _defaults_file()["run_dir"]}
    for key, kind, note in leaves(RunConfig):
        lines += _entry(f"{key}={_shown(_value(defaults, key))}", note or name_of(kind), 40, width)
    return "\n".join(lines)


def _marked(group: str) -> Iterable[str]:
    chosen: dict[str, str | None] = {}
    for entry in _defaults_file()["defaults"]:
        if isinstance(entry, dict):
            chosen |= entry
    return (f"{name}*" if name == chosen.get(group) else name for name in group_options(group))


def _defaults_file() -> dict[str, Any]:
    return read_yaml(config_dir() / "config.yaml")


def _value(settings: dict[str, Any], key: str) -> Any:
    value: Any = settings
    for name in key.split("."):
        value = value[name]
    return value


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "{…}" if value else "{}"
    return shown(value)


def _entry(name: str, text: str, indent: int, width: int) -> list[str]:
    body = textwrap.wrap(text, max(20, width - indent)) or [""]
    head = f"  {name:<{indent - 3}} "
    if len(head) > indent:
        return [head.rstrip(), *(" " * indent + line for line in body)]
    return [head + body[0], *(" " * indent + line for line in body[1:])]
