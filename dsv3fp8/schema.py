"""Plain values into typed dataclasses, with every complaint at once.

YAML and the command line hand over text, numbers and mappings; the dataclasses of the rooms say what each key is.
In between lie the classic traps: `1e-4` that YAML 1.1 reads as text, a run named `1e5`, `no` or `0123` that it reads
as something else, a misspelt key that is accepted and ignored. Here the type of the field decides, and what does not
fit is a UserError that names the key.
"""

import ast
import dataclasses
import difflib
import functools
import inspect
import math
import textwrap
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from dsv3fp8.errors import UserError

MISSING = "???"  # what a YAML file writes for a value that has to be given

T = TypeVar("T")

_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")


def build(cls: type[T], data: Mapping[str, Any]) -> T:
    """An instance of the dataclass `cls` from nested plain values.

    Raises one UserError that lists every unknown, missing and ill-typed key, and what each class's own `from_dict` or
    `validate` objects to.
    """
    problems: list[str] = []
    missing: list[str] = []
    value = _convert(data, cls, "", _Report(cls, problems, missing))
    if missing:
        problems.append(f"{', '.join(missing)}: no value given; add {' '.join(f'{key}=…' for key in missing)}")
    if problems:
        raise UserError("; ".join(problems))
    return value


def build_words(cls: type[T], words: Mapping[str, Any]) -> T:
    """`build` from the words of a command line, which nobody has read as YAML: `null` is None for a key that may be that."""
    return build(cls, _with_nulls(cls, words))


def _with_nulls(cls: Any, words: Mapping[str, Any]) -> dict[str, Any]:
    kinds = field_types(cls)

    def read(key: str, word: Any) -> Any:
        kind = kinds.get(key)
        if isinstance(word, Mapping):
            return _with_nulls(_without_none(kind), word)
        return None if word == "null" and _without_none(kind) is not kind else word

    return {key: read(key, word) for key, word in words.items()}


def to_plain(value: Any) -> Any:
    """The dataclass as nested dicts, lists and scalars: what `build` takes and YAML or JSON can hold."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value


def find_type(cls: type, key: str) -> Any:
    """The type of a dotted key such as `training.steps`. Raises UserError, with the nearest name, for no such key."""
    kind: Any = cls
    walked: list[str] = []
    for name in key.split("."):
        kind = _without_none(kind)
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            hints = field_types(kind)
            if name not in hints:
                raise UserError(_unknown(cls, key, ".".join(walked), hints))
            kind = hints[name]
        elif get_origin(kind) is dict:
            kind = get_args(kind)[1]
        elif kind is not Any:
            raise UserError(f"{key}: {'.'.join(walked)} is a single value, it has no {name} below it")
        walked.append(name)
    return kind


def is_text(kind: Any) -> bool:
    """Whether a key of this type holds text, so that `1e5` or `no` are to be taken letter by letter."""
    kind = _without_none(kind)
    if get_origin(kind) in (Union, types.UnionType):
        return str in get_args(kind) and not {int, float, bool} & set(get_args(kind))
    return kind is str or (get_origin(kind) is Literal and all(isinstance(choice, str) for choice in get_args(kind)))


@functools.cache
def field_types(cls: Any) -> dict[str, Any]:
    """Field name → resolved type, in the order of the dataclass."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def leaves(cls: type, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """(dotted key, type, what its comment in the source says) of every value below a dataclass."""
    notes = field_notes(cls)
    for name, kind in field_types(cls).items():
        inner = _without_none(kind)
        if dataclasses.is_dataclass(inner) and isinstance(inner, type):
            yield from leaves(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", kind, notes.get(name, "")


@functools.cache
def field_notes(cls: type) -> dict[str, str]:
    """Field name → the comment above or behind it, or the string below it: help cannot differ from the source."""
    lines = textwrap.dedent(inspect.getsource(cls)).splitlines()
    body = next(node for node in ast.parse("\n".join(lines)).body if isinstance(node, ast.ClassDef)).body
    notes = {}
    for node, after in zip(body, [*body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        first = node.lineno - 1
        while lines[first - 1].lstrip().startswith("#"):
            first -= 1
        above = [line.strip().lstrip("#").strip() for line in lines[first : node.lineno - 1]]
        behind = lines[(node.end_lineno or node.lineno) - 1].encode()[node.end_col_offset :].decode().strip()
        below = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
        notes[node.target.id] = " ".join(" ".join([*above, behind.lstrip("#").strip(), str(below)]).split())
    return notes


def name_of(kind: Any) -> str:
    """The type as a person would say it."""
    inner = _without_none(kind)
    optional = " or null" if inner is not kind else ""
    if get_origin(inner) is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(inner)) + optional
    plain = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(inner)
    if plain:
        return plain + optional
    if get_origin(inner) in (list, tuple):
        return "a list" + optional
    if get_origin(inner) in (Union, types.UnionType):
        return " or ".join(name_of(choice) for choice in get_args(inner)) + optional
    return "a mapping" + optional


def key_values(arguments: list[str], example: str) -> dict[str, str]:
    """A command's key=value words as they stand; UserError for a word that is none, with an example."""
    words = [argument.partition("=") for argument in arguments]
    for argument, (_, equals, _) in zip(arguments, words, strict=True):
        if not equals:
            raise UserError(f"{argument}: expected key=value, such as {example}")
    return {key: text for key, _, text in words}


def split_words(
    cls: type, arguments: Sequence[str], example: str, beside: Collection[str], also: Sequence[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """(values of `cls`, a command's own keys, for `build`; the words left, for the settings of a run).

    UserError for a word that is none, with an example, and for a key without a dot that is neither its own nor in `beside`.
    also: what that error names behind the own keys.
    """
    own = [key for key, _, _ in leaves(cls)]
    sections = field_types(cls).keys() - {*own}
    values: dict[str, Any] = {}
    rest = []
    for argument in arguments:
        key, equals, text = argument.partition("=")
        section, dot, name = key.partition(".")
        if not equals:
            raise UserError(f"{argument}: expected key=value, such as {example}")
        if dot and section in sections:
            values.setdefault(section, {})[name] = text
        elif key in own:
            values[key] = text
        elif not dot and key not in beside:
            raise UserError(f"{key}: no such key; {suggest(key, own) or 'there are ' + ', '.join((*own, *also))}")
        else:
            rest.append(argument)
    return values, rest


def shown(value: Any) -> str:
    """A value as one would give it: null, true and false, all else as text."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def suggest(name: str, known: list[str]) -> str:
    """`did you mean X?` with the nearest known name, or nothing."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else ""


@dataclasses.dataclass
class _Report:
    root: type
    problems: list[str]
    missing: list[str]

    def wrong(self, path: str, value: Any, kind: Any) -> None:
        loose = is_text(kind) and isinstance(value, (bool, int, float))
        hint = f", in quotes: {path}='\"{value}\"'" if loose else ""
        self.problems.append(f"{path}={'null' if value is None else value}: expected {name_of(kind)}{hint}")


def _unknown(root: type, key: str, parent: str, siblings: Mapping[str, Any]) -> str:
    """Nearest by spelling among the siblings; else a key of the same last name elsewhere (`lr` → `optimizer.lr`)."""
    prefix = f"{parent}." if parent else ""
    last = key.removeprefix(prefix).split(".")[-1]
    everywhere = [path for path, _, _ in leaves(root)]
    namesake = [path for path in everywhere if path.split(".")[-1] == last]
    near = suggest(key, [prefix + name for name in siblings])
    hint = f"did you mean {namesake[0]}?" if namesake else near or suggest(key, everywhere)
    return f"{key}: no such key; {hint or 'there are ' + ', '.join(prefix + name for name in siblings)}"


def _without_none(kind: Any) -> Any:
    """`X | None` → X; anything else as it is."""
    if get_origin(kind) in (Union, types.UnionType):
        rest = [choice for choice in get_args(kind) if choice is not type(None)]
        if len(rest) < len(get_args(kind)):
            return functools.reduce(lambda left, right: left | right, rest)
    return kind


def _convert(value: Any, kind: Any, path: str, report: _Report) -> Any:
    inner = _without_none(kind)
    if isinstance(value, str) and value == MISSING:
        report.missing.append(path)
    elif value is None and inner is not kind:
        return None
    elif dataclasses.is_dataclass(inner) and isinstance(inner, type) and isinstance(value, Mapping):
        return _dataclass(value, inner, path, report)
    elif get_origin(inner) is dict and isinstance(value, Mapping):
        each = get_args(inner)[1]
        return {str(key): _convert(item, each, f"{path}.{key}", report) for key, item in value.items()}
    elif get_origin(inner) in (list, tuple) and isinstance(value, (list, tuple)):
        return _sequence(value, inner, path, report)
    elif inner is Any and isinstance(value, Mapping):
        return {str(key): _convert(item, Any, f"{path}.{key}", report) for key, item in value.items()}
    elif inner is Any and isinstance(value, (list, tuple)):
        return [_convert(item, Any, f"{path}[{i}]", report) for i, item in enumerate(value)]
    elif get_origin(inner) in (Union, types.UnionType):
        return _union(value, inner, path, report)
    else:
        fits, scalar = _scalar(value, inner)
        if fits:
            return scalar
        report.wrong(path, value, kind)
    return None


def _dataclass(value: Mapping[str, Any], kind: Any, path: str, report: _Report) -> Any:
    """The typed values, then what only the class can check: through its own `from_dict`, else by its `validate`."""
    prefix = f"{path}." if path else ""
    hints = field_types(kind)
    complaints = len(report.problems) + len(report.missing)
    report.problems += [_unknown(report.root, f"{prefix}{key}", path, hints) for key in value if key not in hints]
    arguments = {}
    for field in dataclasses.fields(kind):
        if field.name in value:
            arguments[field.name] = _convert(value[field.name], hints[field.name], prefix + field.name, report)
        elif field.init and field.default is field.default_factory is dataclasses.MISSING:
            report.missing.append(prefix + field.name)
    if len(report.problems) + len(report.missing) > complaints:
        return None
    built = kind(**arguments)
    try:
        if path and hasattr(kind, "from_dict"):
            return kind.from_dict(to_plain(built))
        if hasattr(kind, "validate"):
            built.validate()
        return built
    except UserError as error:
        report.problems.append(str(error))
    return None


def _sequence(value: list[Any] | tuple[Any, ...], kind: Any, path: str, report: _Report) -> Any:
    arguments = get_args(kind)
    if get_origin(kind) is list or (len(arguments) == 2 and arguments[1] is Ellipsis):
        each = [arguments[0]] * len(value)
    elif len(arguments) == len(value):
        each = list(arguments)
    else:
        report.problems.append(f"{path}={list(value)}: expected {len(arguments)} values")
        return None
    pairs = enumerate(zip(value, each, strict=True))
    items = [_convert(item, want, f"{path}[{i}]", report) for i, (item, want) in pairs]
    return items if get_origin(kind) is list else tuple(items)


def _union(value: Any, kind: Any, path: str, report: _Report) -> Any:
    """The first member that takes the value, text last: everything could be text."""
    for choice in sorted(get_args(kind), key=lambda choice: choice is str):
        attempt = _Report(report.root, [], [])
        converted = _convert(value, choice, path, attempt)
        if not attempt.problems and not attempt.missing:
            return converted
    report.wrong(path, value, kind)
    return None


def _scalar(value: Any, kind: Any) -> tuple[bool, Any]:
    """(whether the value fits, the value in the type asked for)."""
    number = _number(value)
    if kind is Any:  # text of a number or a truth value is taken as one, as YAML would
        truths = {"true": True, "false": False}
        return True, truths.get(value, value if number is None else number) if isinstance(value, str) else value
    if get_origin(kind) is Literal:
        return value in get_args(kind), value
    if kind is str:
        return isinstance(value, str), value
    if kind is bool:
        word = value.strip().lower() if isinstance(value, str) else ""
        return isinstance(value, bool) or word in _TRUE + _FALSE, word in _TRUE if word else value
    if kind is float:
        return number is not None and math.isfinite(number), number if number is None else float(number)
    if kind is int:
        whole = number is not None and math.isfinite(number) and number == int(number)
        return whole, int(number) if number is not None and whole else None
    return False, None


def _number(value: Any) -> int | float | None:
    """Numbers, and the text of numbers: `1e-4` stays text in many a YAML reader and in W&B sweeps."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    if not isinstance(value, str):
        return value
    for read in (int, float):
        try:
            return read(value)
        except ValueError:
            continue
    return None
