"""The `key=value` words of a command line: Hydra's grammar, with answers to what people really type.

Hydra parses the values (numbers, lists, quotes). Around it: one line for everything its lexer refuses, such as a path
in another script, and a clear no to what has no meaning here (sweeps, deletions, `hydra.*`).
"""

import re
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from dsv3fp8.errors import UserError
from dsv3fp8.schema import is_text

_KEY = re.compile(r"[A-Za-z_]\w*(\.\w+)*")
_EXAMPLE = "training.steps=10"


@dataclass(frozen=True)
class Override:
    """`key`, the `text` after the sign of equality, and the `value` that Hydra makes of it."""

    key: str
    text: str
    value: Any

    def value_for(self, kind: Any) -> Any:
        """The value for a key of this type: where text is wanted, `1e5` is not a number."""
        return self.text if is_text(kind) and isinstance(self.value, (bool, int, float)) else self.value


def parse_overrides(words: list[str], verbatim: tuple[str, ...]) -> list[Override]:
    """All words of a command line; one UserError lists what cannot be read.

    Keys in `verbatim` (groups, file names) take their text as it is, outside Hydra's grammar.
    """
    found, problems = [], []
    for word in words:
        try:
            if not _is_hydra_setting(word):
                found.append(_parse(word, verbatim))
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("; ".join(problems))
    return found


def _is_hydra_setting(word: str) -> bool:
    """Old launchers set hydra.job.chdir: whichever it is, paths here are read from the launch directory."""
    key = word.lstrip("+~").split("=")[0]
    if key == "hydra" or key.startswith(("hydra.", "hydra/")):
        if key == "hydra.job.chdir":
            return True
        raise UserError(f"{word}: Hydra's own settings are not used here; the place for a run's files is run_dir=PATH")
    return False


def _parse(word: str, verbatim: tuple[str, ...]) -> Override:
    if word.startswith("-"):
        raise UserError(f"{word}: no such option; settings are written key=value, as in {_EXAMPLE}")
    if word.startswith("~"):
        raise UserError(f"{word}: a key cannot be removed; set the value that you want instead, as in {_EXAMPLE}")
    # A sign (`+key`, `++key`) asks Hydra to add a key: here it neither helps nor harms, since unknown keys are refused.
    key, equals, text = word.lstrip("+").partition("=")
    if not equals:
        raise UserError(f"{word}: expected key=value, as in {_EXAMPLE}")
    if not _KEY.fullmatch(key):
        raise UserError(f"{key}: not a key; keys are names with dots in between, as in {_EXAMPLE}")
    text = text.strip()
    if key in verbatim:
        return Override(key, text, _unquote(text))
    try:
        parsed = OverridesParser.create().parse_override(f"{key}={text}")
        sweep, value = parsed.is_sweep_override(), parsed.value()
    except HydraException as error:
        raise UserError(f"{word}: cannot be read; put quotes around the text: {_quoted(key, text)}") from error
    if sweep:
        raise UserError(
            f"{word}: one run takes one value; start one run for each with `train -m`, write a list as {key}=[{text}], "
            f"or quote a text with a comma: {_quoted(key, text)}"
        )
    return Override(key, text, value)


def _unquote(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _quoted(key: str, text: str) -> str:
    """The word with its texts in double quotes, and single ones for the shell."""
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else None
    parts = [text] if inner is None else inner.split(",")
    quoted = ",".join('"{}"'.format(_unquote(part.strip()).replace("\\", "\\\\").replace('"', '\\"')) for part in parts)
    return f"'{key}={quoted}'" if inner is None else f"'{key}=[{quoted}]'"
