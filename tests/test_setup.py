"""What is shipped, and the launchers, with stand-ins for Python and pip so that nothing is downloaded."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from dsv3fp8 import doctor

ROOT = Path(__file__).parents[1]


# wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as pip builds it, without the network."""
    folder = tmp_path_factory.mktemp("wheel")
    code = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(folder)], cwd=ROOT, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_every_module_every_config_and_the_tested_versions(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {path.relative_to(ROOT).as_posix() for end in ("*.py", "*.c") for path in (ROOT / "dsv3fp8").rglob(end)}
    configs = {f"dsv3fp8/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "configs").rglob("*.yaml")}
    assert modules | configs | {"dsv3fp8/constraints.txt"} <= names
    assert not [name for name in names if name.startswith(("tests", "docs", "scripts", ".venv", "configs"))]


def test_the_unpacked_wheel_finds_its_settings_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    place = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(place)
    code = (
        "from dsv3fp8.config import config_dir, load_config; from dsv3fp8.doctor import tested_versions;"
        "load_config(['model=small', 'recipe=dsv3']); print(config_dir(), tested_versions()['torch'])"
    )
    environment = {**os.environ, "PYTHONPATH": str(place)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(place / "dsv3fp8" / "configs"), "2.13.0"]


# pins


def test_every_dependency_is_pinned_to_a_version_its_range_allows() -> None:
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    pins = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in doctor.tested_versions().items()}
    for requirement in (Requirement(text) for texts in lists for text in texts):
        pin = pins[re.sub(r"[-_.]+", "-", requirement.name).lower()]
        assert pin in requirement.specifier, requirement
    assert "2.11.0" in Requirement(next(text for text in project["dependencies"] if text.startswith("torch"))).specifier


# launchers


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout at an awkward path, with a stand-in Python whose venv and pip only note what they are asked."""
    root = tmp_path / "my check out, 数据"
    for name in ("scripts/install", "scripts/train", "scripts/test", "pyproject.toml", "constraints.txt", ".ci/run"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes((ROOT / name).read_bytes())
        (root / name).chmod((ROOT / name).stat().st_mode)
    (tmp_path / "bin").mkdir()
    stand_in(tmp_path / "bin" / "python3", tmp_path)
    return root


def stand_in(path: Path, tmp_path: Path) -> None:
    path.write_text(
        f"""#!/bin/sh
case "$1 $2" in
"-c "*) exit "$(cat '{tmp_path}/too_old' 2>/dev/null || echo 0)" ;;
"-V "*) echo 'Python 3.12.1' ;;
"-m venv") shift 3; mkdir -p "$1/bin"; cp "$0" "$1/bin/python"; echo "venv $1" >>'{tmp_path}/log' ;;
*) for word in "$@"; do printf '[%s]' "$word"; done >>'{tmp_path}/log'; echo " in $PWD" >>'{tmp_path}/log'
   case "$2" in pip) exit "$(cat '{tmp_path}/pip_status' 2>/dev/null || echo 0)" ;; esac ;;
esac
"""
    )
    path.chmod(0o755)


def launch(checkout: Path, script: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    work = checkout.parent / "work"
    work.mkdir(exist_ok=True)
    # The stand-in first, then only what the scripts themselves use: no real python3.x may be found.
    tools = checkout.parent / "tools"
    if not tools.exists():
        tools.mkdir()
        for name in ("bash", "sh", "cat", "cksum", "dirname", "mkdir", "cp", "env", "rm"):
            real = next(folder for folder in ("/bin", "/usr/bin") if os.path.exists(f"{folder}/{name}"))
            (tools / name).symlink_to(f"{real}/{name}")
    environment = {"PATH": f"{checkout.parent / 'bin'}:{tools}", "HOME": str(checkout.parent), "LC_ALL": "C.UTF-8", **variables}
    return subprocess.run(
        [str(checkout / script), *words], cwd=work, env=environment, capture_output=True, text=True, check=False
    )


def log(checkout: Path) -> list[str]:
    path = checkout.parent / "log"
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return lines


def installs(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("[-m][pip][install]")]


def test_train_installs_the_pins_once_and_runs_in_the_callers_directory(checkout: Path) -> None:
    done = launch(checkout, "scripts/train", "training.steps=3", "data.paths=[a b.txt]")
    assert done.returncode == 0, done.stderr
    first = log(checkout)
    assert first[0] == f"venv {checkout}/.venv"
    assert f"[-c][{checkout}/constraints.txt][-e][{checkout}]" in first[1]
    run = f"[-P][-m][dsv3fp8][train][training.steps=3][data.paths=[a b.txt]] in {checkout.parent / 'work'}"
    assert first[2:] == [run]
    assert launch(checkout, "scripts/train", "training.steps=3", "data.paths=[a b.txt]").stderr == ""
    assert log(checkout) == [run]


def test_test_installs_dev_and_runs_all_checks_or_just_pytest(checkout: Path) -> None:
    assert launch(checkout, ".ci/run").returncode == 0
    lines = log(checkout)
    assert f"[-e][{checkout}[dev]]" in installs(lines)[0]
    assert lines[2:] == [
        f"[-m][ruff][check][.] in {checkout}",
        f"[-m][mypy] in {checkout}",
        f"[-m][pytest][-q][-n][2][--dist][loadfile] in {checkout}",
    ]
    assert launch(checkout, "scripts/test", "tests/x.py", "-k", "a or b").returncode == 0
    assert log(checkout) == [f"[-m][pytest][tests/x.py][-k][a or b] in {checkout}"]
    assert launch(checkout, "scripts/train").returncode == 0
    assert installs(log(checkout)) == []  # dev brings all that training needs


def test_an_installation_that_failed_is_tried_again(checkout: Path) -> None:
    (checkout.parent / "pip_status").write_text("1")
    done = launch(checkout, "scripts/train")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("scripts/install: error: installation failed")
    assert len(log(checkout)) == 2  # venv and pip, no training
    (checkout.parent / "pip_status").unlink()
    assert launch(checkout, "scripts/train").returncode == 0
    assert len(installs(log(checkout))) == 1


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_changed_requirements_are_installed(checkout: Path, name: str) -> None:
    launch(checkout, "scripts/train")
    log(checkout)
    with (checkout / name).open("a") as file:
        file.write("# changed\n")
    launch(checkout, "scripts/train")
    assert len(installs(log(checkout))) == 1


def test_a_moved_checkout_and_a_lost_interpreter_get_a_new_environment(checkout: Path) -> None:
    launch(checkout, "scripts/train")
    log(checkout)
    moved = checkout.rename(checkout.parent / "moved")
    launch(moved, "scripts/train")
    assert log(moved)[0] == f"venv {moved}/.venv"
    (moved / ".venv/bin/python").unlink()
    launch(moved, "scripts/train")
    assert log(moved)[0] == f"venv {moved}/.venv"


def test_a_later_python_by_name_goes_first_and_an_old_one_is_refused_in_one_line(checkout: Path) -> None:
    stand_in(checkout.parent / "bin" / "python3.12", checkout.parent)
    (checkout.parent / "bin" / "python3").write_text("#!/bin/sh\nexit 1\n")
    assert launch(checkout, "scripts/install").returncode == 0
    (checkout.parent / "too_old").write_text("1")
    done = launch(checkout, "scripts/train")
    assert done.returncode == 0  # nothing to install: no interpreter is looked for
    (checkout / ".venv/bin/python").unlink()
    done = launch(checkout, "scripts/train")
    assert done.returncode == 1
    assert done.stderr.startswith("scripts/install: error: no Python >= 3.11 on PATH")
    assert len(done.stderr.splitlines()) == 1


def test_python_can_be_named(checkout: Path) -> None:
    stand_in(checkout.parent / "other python", checkout.parent)
    (checkout.parent / "bin" / "python3").unlink()
    done = launch(checkout, "scripts/install", PYTHON=str(checkout.parent / "other python"))
    assert done.returncode == 0, done.stderr
    (checkout / ".venv/bin/python").unlink()
    done = launch(checkout, "scripts/install", PYTHON="nowhere")
    assert done.returncode == 1
    assert "PYTHON=nowhere is no Python >= 3.11" in done.stderr


def test_extras_are_installed_when_they_are_first_asked_for(checkout: Path) -> None:
    launch(checkout, "scripts/install")
    log(checkout)
    launch(checkout, "scripts/install", "hf", "dev")
    assert f"[-e][{checkout}[hf,dev]]" in log(checkout)[0]
    launch(checkout, "scripts/install", "dev")
    assert log(checkout) == []


def test_launchers_are_executable_and_shipped_yaml_has_no_tabs() -> None:
    for name in ("scripts/install", "scripts/train", "scripts/test", ".ci/run"):
        assert os.access(ROOT / name, os.X_OK), name
        subprocess.run(["bash", "-n", str(ROOT / name)], check=True)
    for path in (ROOT / "configs").rglob("*.yaml"):
        assert yaml.safe_load(path.read_text(encoding="utf-8")), path
