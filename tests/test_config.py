"""Settings from the command line, from files and from the shipped groups."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dsv3fp8.config
from dsv3fp8.config import GROUPS, RunConfig, config_dir, group_options, load_config, load_saved
from dsv3fp8.errors import UserError

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(autouse=True)
def launch_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def complaint(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(list(overrides))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_default_run_is_tiny_under_dsv3_on_python_sources(launch_directory: Path) -> None:
    config = load_config([])
    assert (config.model.name, config.recipe.name, config.data.source) == ("tiny", "dsv3", "python")
    assert config.run_dir == str(launch_directory / "runs" / "tiny-dsv3")
    assert config.resume == "auto"


# What a source cannot do without.
NEEDED = {
    "data=files": ["data.paths=x.txt"],
    "data=huggingface": ["data.dataset=x"],
    "data=memmap": ["data.paths=x.bin", "data.vocab_size=100", "data.eod=0"],
}


@pytest.mark.parametrize("group", GROUPS)
def test_every_shipped_choice_loads(group: str) -> None:
    assert group_options(group)
    for name in group_options(group):
        config = load_config([f"{group}={name}", *NEEDED.get(f"{group}={name}", [])])
        if group in ("model", "recipe"):
            assert getattr(config, group).name == name


def test_saved_settings_load_again_as_equal(launch_directory: Path) -> None:
    config = load_config(["recipe=tensorwise", "logging.name=1e5", 'logging.tags=["no","数据"]', "optimizer.lr=1e-05"])
    saved = launch_directory / "config.yaml"
    config.save(saved)
    assert load_saved(saved) == config
    assert RunConfig.from_dict(config.to_dict()) == config


def test_saved_settings_of_another_recipe_do_not_mix_with_the_default_one(launch_directory: Path) -> None:
    saved = launch_directory / "config.yaml"
    config = load_config(["recipe=bf16", "model=small"])
    config.save(saved)
    assert load_config([f"config={saved}"]) == config


# H01


def test_paths_are_read_from_the_launch_directory_whatever_hydra_is_told(launch_directory: Path) -> None:
    """H01"""
    plain = load_config(["run_dir=here", "data=files", "data.paths=[texts/*.txt,/abs/b.txt]"])
    assert plain.run_dir == str(launch_directory / "here")
    assert plain.data.paths == [str(launch_directory / "texts/*.txt"), "/abs/b.txt"]
    for word in ("hydra.job.chdir=true", "hydra.job.chdir=false", "++hydra.job.chdir=True"):
        assert load_config(["run_dir=here", "data=files", "data.paths=[texts/*.txt,/abs/b.txt]", word]) == plain
    assert Path.cwd() == launch_directory
    assert list(launch_directory.iterdir()) == []


@pytest.mark.parametrize("word", ["hydra.run.dir=x", "hydra/launcher=basic", "hydra.sweep.dir=y", "~hydra.run.dir"])
def test_other_settings_of_hydra_are_refused_with_run_dir_as_remedy(word: str) -> None:
    """H01"""
    assert f"{word}: Hydra's own settings are not used here" in complaint(word)
    assert "run_dir=PATH" in complaint(word)


# H02


@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_an_unknown_key_is_refused_with_any_sign(sign: str) -> None:
    """H02: Hydra alone accepts `+optim.beta=3` and ignores it."""
    assert complaint(f"{sign}optim.beta=3").startswith("optim.beta: no such key; ")
    assert "training.stepz: no such key; did you mean training.steps?" in complaint(f"{sign}training.stepz=3")


def test_every_unknown_key_is_named_at_once() -> None:
    """H02"""
    text = complaint("lr=1e-4", "training.bach=3", "recipe.roles.weigth.scale=pow2")
    assert "lr: no such key; did you mean optimizer.lr?" in text
    assert "training.bach: no such key; did you mean training.batch?" in text


def test_unknown_names_inside_a_recipe_are_refused() -> None:
    """H02"""
    assert "weigth" in complaint("recipe.roles.weigth.scale=pow2")
    assert "recipe.ops.dwn" in complaint("+recipe.ops.dwn.promote_every=32")
    assert "recipe.nmae" in complaint("recipe.nmae=x")


def test_a_known_key_with_a_sign_is_the_known_key() -> None:
    assert load_config(["+training.steps=7", "++optimizer.lr=1e-3"]).training.steps == 7


def test_an_unknown_choice_lists_the_choices() -> None:
    text = complaint("recipe=dsv33", "model=tinny", "experiment=nope")
    assert "recipe=dsv33: no such recipe; did you mean dsv3" in text
    assert "there are bf16, " in text
    assert "model=tinny: no such model; did you mean tiny?" in text
    assert "experiment=nope: no such experiment" in text


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("training.steps", "training.steps: expected key=value"),
        ("--lr=3", "--lr=3: no such option; settings are written key=value"),
        ("~training.steps", "~training.steps: a key cannot be removed"),
        ("recipe@x=bf16", "recipe@x: not a key"),
        ("=3", ": not a key"),
        ("data.paths.0=x", "data.paths.0: data.paths is a single value"),
        ("training={steps: 3, stepz: 4}", "training.stepz: no such key"),
    ],
)
def test_words_that_are_no_settings_are_refused(word: str, message: str) -> None:
    assert message in complaint(word)


# H04


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("data.paths=数据/a.txt", "'data.paths=\"数据/a.txt\"'"),
        ("data.paths=[数据/a.txt, b c.txt]", '\'data.paths=["数据/a.txt","b c.txt"]\''),
        ("run_dir=~/runs (1)", "'run_dir=\"~/runs (1)\"'"),
        ("logging.name=a=b", "'logging.name=\"a=b\"'"),
    ],
)
def test_text_that_hydra_cannot_read_is_answered_with_the_quotes_it_needs(word: str, remedy: str) -> None:
    """H04: the remedy is the very word to type, and it works."""
    text = complaint("data=files", word)
    assert text == f"{word}: cannot be read; put quotes around the text: {remedy}"
    extra = [] if word.startswith("data.") else ["data.paths=x"]
    config = load_config(["data=files", *extra, remedy[1:-1]])
    values = [config.data.paths, config.run_dir, config.logging.name]
    assert any(name in str(values) for name in ("数据/a.txt", "runs (1)", "a=b"))


def test_paths_with_other_scripts_and_spaces_work_quoted_and_through_yaml(launch_directory: Path) -> None:
    """H04"""
    want = [str(launch_directory / "数据/a.txt"), str(launch_directory / "my texts/b.txt")]
    assert load_config(["data=files", 'data.paths=["数据/a.txt","my texts/b.txt"]']).data.paths == want
    assert load_config(["data=files", "data.paths=['数据/a.txt',my texts/b.txt]"]).data.paths == want
    (launch_directory / "设置 1.yaml").write_text(
        "data:\n  source: files\n  paths: [数据/a.txt, my texts/b.txt]\n", encoding="utf-8"
    )
    assert load_config(["config=设置 1.yaml"]).data.paths == want
    assert load_config(['config="设置 1.yaml"']).data.paths == want


# H06


@pytest.mark.parametrize("word", ["1e5", "0123", "4e123456", "12:30:45", "2026_11", "no", "on", "true", "-1", ".5"])
def test_a_run_name_stays_as_it_was_typed(launch_directory: Path, word: str) -> None:
    """H06: on the command line and through YAML."""
    assert load_config([f"logging.name={word}"]).logging.name == word
    Path("mine.yaml").write_text(f"logging: {{name: {word}}}\n")
    assert load_config(["config=mine.yaml"]).logging.name == word
    config = load_config([f"logging.name={word}"])
    config.save(launch_directory / "saved.yaml")
    assert load_saved(launch_directory / "saved.yaml").logging.name == word


def test_null_is_null_and_quoted_null_is_text() -> None:
    """H06"""
    assert load_config(["logging.name=null"]).logging.name is None
    assert load_config(['logging.name="null"']).logging.name == "null"
    assert "logging.project=null: expected text" in complaint("logging.project=null")


def test_a_rate_is_a_number_from_everywhere() -> None:
    """H06: the command line, quoted as a sweep writes it, YAML with and without a point."""
    assert load_config(["optimizer.lr=1e-4"]).optimizer.lr == 1e-4
    assert load_config(['optimizer.lr="1e-4"']).optimizer.lr == 1e-4
    for text in ("1e-4", "1.0e-4", "'1e-4'"):
        Path("mine.yaml").write_text(f"optimizer:\n  lr: {text}\n")
        assert load_config(["config=mine.yaml"]).optimizer.lr == 1e-4
    assert "optimizer.lr=fast: expected a number" in complaint("optimizer.lr=fast")


def test_a_tab_in_a_settings_file_or_in_a_group_is_named(launch_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """H06: tabs.yaml"""
    assert "tabs.yaml, line 2: a tab in the indentation" in complaint(f"config={FIXTURES / 'tabs.yaml'}")
    groups = launch_directory / "groups"
    shutil.copytree(config_dir(), groups)
    shutil.copy(FIXTURES / "tabs.yaml", groups / "experiment" / "tabs.yaml")
    monkeypatch.setattr(dsv3fp8.config, "config_dir", lambda: groups)
    assert "experiment/tabs.yaml, line 2: a tab in the indentation" in complaint("experiment=tabs")


# H10


def test_several_values_for_one_run_are_refused_with_the_ways_out() -> None:
    """H10"""
    text = complaint("optimizer.lr=1e-4,2e-4")
    assert text.startswith("optimizer.lr=1e-4,2e-4: one run takes one value; start one run for each")
    assert "recipe=bf16,dsv3: no such recipe; one at a time" in complaint("recipe=bf16,dsv3")


def test_every_missing_value_is_reported_before_any_work() -> None:
    """H10: what a file leaves as ??? and what has no default, together."""
    Path("mine.yaml").write_text("optimizer:\n  lr: ???\ntraining:\n  steps: ???\nmodel:\n  name: ???\n")
    text = complaint("config=mine.yaml", "schedule.warmup=???")
    for key in ("optimizer.lr", "training.steps", "model.name", "schedule.warmup"):
        assert f"{key}=…" in text
    assert "no value given" in text


# H11


def test_impossible_sizes_of_several_rooms_are_one_error() -> None:
    """H11"""
    text = complaint("model.experts=8", "model.groups=3", "training.batch=0", "optimizer.betas=[0.9]")
    assert "model.experts=8" in text
    assert "model.groups=3" in text
    assert "training.batch=0" in text
    assert "optimizer.betas=[0.9]" in text


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (("model.groups=2", "model.kept_groups=3"), ("kept_groups",)),
        (("model.experts=8", "model.groups=4", "model.kept_groups=1", "model.top_k=3"), ("top_k", "kept_groups")),
        (("model.head_rope=33",), ("head_rope",)),
    ],
)
def test_an_impossible_size_names_its_keys(words: tuple[str, ...], keys: tuple[str, ...]) -> None:
    """H11"""
    text = complaint(*words)
    assert all(f"model.{key}" in text for key in keys)


# files and experiments


def test_the_command_line_wins_over_the_file_and_the_file_over_the_groups() -> None:
    Path("mine.yaml").write_text("model: small\ntraining: {steps: 11, batch: 2}\nrecipe: {amax_history: 4}\n")
    config = load_config(["config=mine.yaml", "training.batch=3"])
    assert (config.model.name, config.training.steps, config.training.batch) == ("small", 11, 3)
    assert (config.recipe.name, config.recipe.amax_history) == ("dsv3", 4)
    assert load_config(["config=mine.yaml", "model=tiny"]).model.name == "tiny"
    assert load_config(["config=mine.yaml", "recipe=bf16"]).recipe.amax_history == 16


def test_a_file_may_have_dotted_keys_as_a_sweep_writes_them() -> None:
    """H06: W&B sweeps hand over flat keys."""
    Path("sweep.yaml").write_text("optimizer.lr: 1e-4\nlogging.name: 1e5\ntraining: {steps: 5}\n")
    config = load_config(["config=sweep.yaml"])
    assert (config.optimizer.lr, config.logging.name, config.training.steps) == (1e-4, "1e5", 5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("optim: {lr: 3}\nlr: 4\n", "lr: no such key; did you mean optimizer.lr?"),
        ("training: {steps: {x: 3}}\n", "training.steps.x: training.steps is a single value"),
        ("model: [tiny]\n", "model=['tiny']: no such model"),
        ("training: 3\n", "training=3: expected a mapping"),
        ("run_dir: ''\n", "run_dir is empty"),
        ("model: null\n", "model=null: no such model"),
    ],
)
def test_what_a_settings_file_gets_wrong_is_named(content: str, message: str) -> None:
    Path("mine.yaml").write_text(content)
    assert message in complaint("config=mine.yaml")


def test_an_experiment_composes_groups_and_values() -> None:
    config = load_config(["experiment=small_h200"])
    assert (config.model.name, config.training.context) == ("small", 1024)
    assert load_config(["experiment=small_h200", "training.context=512"]).training.context == 512
    assert load_config(["experiment=smoke", "recipe=bf16"]).run_dir.endswith("runs/smoke-tiny-bf16")


def test_a_recipe_is_changed_role_by_role() -> None:
    config = load_config(["recipe=dsv3", "recipe.roles.weight.scale=pow2"])
    assert config.recipe.roles["weight"].scale == "pow2"
    assert config.recipe.roles["input"].scale == "fp32"


def test_settings_do_not_depend_on_the_place_or_its_name(launch_directory: Path) -> None:
    """H04: a checkout under a path with spaces, commas and other scripts."""
    place = launch_directory / "my files, 数据=1"
    shutil.copytree(config_dir(), place / "configs")
    package = Path(dsv3fp8.config.__file__).parent
    shutil.copytree(package, place / "dsv3fp8", ignore=shutil.ignore_patterns("__pycache__"))
    code = "from dsv3fp8.config import config_dir, load_config; print(config_dir()); load_config(['recipe=bf16'])"
    environment = {**os.environ, "PYTHONPATH": str(place), "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, encoding="utf-8", check=True
    )
    assert done.stdout.strip() == str(place / "configs")
