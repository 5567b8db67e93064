"""A run's settings: Hydra composes them from the groups in configs/, the dataclasses of the rooms say what is legal.

Hydra gives the groups, the defaults lists and the grammar of `key=value`. It is used through its compose API, so the
working directory never changes: paths are read from where the command was started, and what a run writes goes to
`run_dir`. Values are then checked here against the dataclasses: an unknown key is refused even with `+`, and every
complaint is one line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException
from yaml import YAMLError

from dsv3fp8.data.config import DataConfig
from dsv3fp8.errors import UserError
from dsv3fp8.model.config import ModelConfig
from dsv3fp8.overrides import Override, parse_overrides
from dsv3fp8.parallel.config import ParallelConfig
from dsv3fp8.precision.recipe import Recipe
from dsv3fp8.schema import MISSING, build, field_types, find_type, suggest, to_plain
from dsv3fp8.training.config import LoggingConfig, OptimizerConfig, ScheduleConfig, TrainingConfig
from dsv3fp8.yaml_text import dump_yaml, explain_yaml_error, read_yaml

GROUPS = ("model", "recipe", "data", "optimizer", "schedule", "parallel", "logging", "experiment")


@dataclass
class RunConfig:
    """Everything a run depends on; saved as run_dir/config.yaml."""

    model: ModelConfig
    recipe: Recipe
    data: DataConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    parallel: ParallelConfig
    logging: LoggingConfig
    training: TrainingConfig
    # Where the run writes everything, and what it resumes from; from the directory the command was started in.
    run_dir: str
    # auto: go on from the newest checkpoint of run_dir, if its settings agree. fork: go on with changed settings.
    resume: Literal["auto", "fork"] = "auto"

    def validate(self) -> None:
        """Raise UserError for what the run itself cannot do; the rooms have checked their own settings."""
        if not self.run_dir:
            raise UserError("run_dir is empty; give the directory that the run writes to, as in run_dir=runs/first")

    def to_dict(self) -> dict[str, Any]:
        """Plain containers; `RunConfig.from_dict` makes an equal object of them."""
        return to_plain(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> RunConfig:
        """The typed settings, each checked by its room. Raises UserError with all that is wrong."""
        return build(RunConfig, data)

    def save(self, path: Path) -> None:
        """Write YAML that `load_saved`, and any other YAML reader, reads back as the same values."""
        path.write_text(dump_yaml(self.to_dict()), encoding="utf-8")


def load_config(overrides: list[str]) -> RunConfig:
    """The settings for `key=value` words from the command line.

    A group is chosen by name (`recipe=bf16`), a value set by its dotted key (`training.steps=10`). `config=FILE.yaml`
    lays the values of a file, say of another run's config.yaml, over the groups. The command line wins over the file.
    """
    words = parse_overrides(overrides, verbatim=(*GROUPS, "config"))
    files = [read_yaml(Path(word.value).expanduser()) for word in words if word.key == "config"]
    chosen = {word.key: word.value for word in words if word.key in GROUPS}
    # A group chosen on the command line loses the values that a file has for it.
    values = [pair for file in files for pair in _leaves(file) if pair[0].split(".")[0] not in chosen]
    choices = {key: "null" if value is None else str(value) for key, value in values if key in GROUPS} | chosen
    values = [pair for pair in values if pair[0] not in GROUPS]
    values += [(word.key, word) for word in words if word.key not in (*GROUPS, "config")]

    kinds = _kinds([key for key, _ in values])
    settings = _compose(choices)
    try:
        for group in (group for file in files for group in _given_in_full(file) if group not in chosen):
            settings[group] = {}
        for key, value in values:
            OmegaConf.update(settings, key, value.value_for(kinds[key]) if isinstance(value, Override) else value)
        data = _plain(settings)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key or 'settings'}: {str(error).splitlines()[0]}") from error
    return RunConfig.from_dict(_anchored(data))


def load_saved(path: Path) -> RunConfig:
    """The settings of a run, from its config.yaml."""
    return RunConfig.from_dict(read_yaml(path))


def config_dir() -> Path:
    """The Hydra groups: inside the package once installed, else at the top of the checkout."""
    here = Path(__file__).resolve().parent
    return next(folder for folder in (here / "configs", here.parent / "configs") if (folder / "config.yaml").is_file())


def group_options(group: str) -> list[str]:
    """The names a group can be set to. `base` holds what the others start from and is no choice of its own."""
    folder = config_dir() / group
    names = (path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))
    return sorted(name for name in names if name != "base")


def _leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every value of a settings file."""
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _given_in_full(file: Mapping[str, Any]) -> list[str]:
    """Groups of which a file, such as a saved config.yaml, gives every key: nothing composed may show through them."""
    types = field_types(RunConfig)
    groups = [name for name, value in file.items() if name in GROUPS and isinstance(value, Mapping)]
    return [name for name in groups if field_types(types[name]).keys() <= file[name].keys()]


def _kinds(keys: list[str]) -> dict[str, Any]:
    """The type of each key. Raises UserError with all the unknown ones."""
    kinds, problems = {}, []
    for key in keys:
        try:
            kinds[key] = find_type(RunConfig, key)
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("; ".join(problems))
    return kinds


def no_such(key: str, kind: str, name: str, options: list[str]) -> str:
    """One line about a choice that does not exist, with those that do."""
    hint = "one at a time, please; " if "," in name else suggest(name, options) + " "
    return f"{key}={name}: no such {kind}; {hint}there are {', '.join(options)}".replace("  ", " ")


def _compose(choices: Mapping[str, str]) -> DictConfig:
    problems = []
    for group, name in choices.items():
        options = group_options(group)
        if name not in options and not (group == "experiment" and name == "null"):
            problems.append(no_such(group, group, name, options))
    if problems:
        raise UserError("; ".join(problems))
    try:
        with initialize_config_dir(config_dir=str(config_dir()), version_base="1.3"):
            settings = compose("config", overrides=[f"{group}={name}" for group, name in choices.items()])
    except YAMLError as error:
        raise UserError(explain_yaml_error(error, str(config_dir()))) from error
    except HydraException as error:
        raise UserError(f"{config_dir()}: {str(error).splitlines()[0]}") from error
    OmegaConf.set_struct(settings, False)
    return settings


def _plain(settings: DictConfig) -> dict[str, Any]:
    try:
        data = OmegaConf.to_container(settings, resolve=True, throw_on_missing=False)
    except InterpolationToMissingValueError:  # the value it points at is reported, together with the other missing ones
        data = OmegaConf.to_container(settings, resolve=False, throw_on_missing=False)
    assert isinstance(data, dict)
    return {str(key): value for key, value in data.items()}


def _anchored(data: dict[str, Any]) -> dict[str, Any]:
    """Relative paths from the launch directory, so that the saved settings mean the same files from anywhere."""
    places = [(data, "run_dir")]
    texts = data.get("data")
    if isinstance(texts, dict):
        places += [(texts, name) for name in ("paths", "validation_paths", "cache_dir")]
        if str(texts.get("tokenizer")).endswith(".json"):
            places.append((texts, "tokenizer"))
        if texts.get("dataset") and Path(str(texts["dataset"])).expanduser().exists():
            places.append((texts, "dataset"))
    for values, name in places:
        if name in values:
            values[name] = _absolute(values[name])
    return data


def _absolute(path: Any) -> Any:
    if isinstance(path, list):
        return [_absolute(item) for item in path]
    return str(Path(path).expanduser().absolute()) if isinstance(path, str) and path not in ("", MISSING) else path
