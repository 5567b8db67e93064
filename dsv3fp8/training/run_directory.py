"""The run directory: all that is needed to resume, plot and compare a run, and the lock that keeps it to one process.

``config.yaml`` (resolved) · ``corpus.json`` · ``precision.json`` · ``environment.json`` · ``tokenizer.json`` ·
``metrics.jsonl`` · ``loss.png`` · ``checkpoints/`` · ``profile/`` and W&B's files. Small files are replaced whole, by a
rename, so that a reader never sees half of one.
"""

import fcntl
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import torch

import dsv3fp8
from dsv3fp8.errors import UserError

# Packages whose version can change a number or a file of a run.
PACKAGES = ("torch", "triton", "numpy", "tokenizers", "hydra-core", "wandb", "nvidia-cudnn-cu13", "nvidia-cublas")


class RunDirectory:
    """Paths of one run. As a context manager it holds the lock."""

    def __init__(self, path: Path, key: str = "run_dir") -> None:
        """key: what the command line calls the directory."""
        self.path = path
        self._key = key
        self.checkpoints = path / "checkpoints"
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.plot = path / "loss.png"
        self.tokenizer = path / "tokenizer.json"
        self.profile = path / "profile"
        self._lock: IO[str] | None = None

    def __enter__(self) -> Self:
        """Create the directory and lock it; UserError if it cannot be written or another process holds it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # Append mode: whoever fails to get the lock must not empty the holder's file.
            self._lock = (self.path / "lock").open("a+", encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"{self._key}={self.path} cannot be written: {error.strerror}; choose another {self._key}="
            ) from error
        try:
            # A POSIX record lock: the kernel drops it when its process ends, however it ends, and data workers that
            # were forked from it do not inherit it. So no lock is ever stale.
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.seek(0)
            holder = self._lock.read().strip() or "another process"
            self._lock.close()
            raise UserError(
                f"{self._key}={self.path} is in use by {holder}: wait for it to end or choose another {self._key}="
            ) from error
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()} on {socket.gethostname()}, started {_now()}\n")
        self._lock.flush()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._lock is not None
        self._lock.close()

    def write_text(self, name: str, text: str) -> None:
        """Replace the file `name` as a whole."""
        write_atomically(self.path / name, text)

    def write_json(self, name: str, content: Any) -> None:
        """Replace the file `name` as a whole."""
        self.write_text(name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")

    def record_environment(self, device: torch.device) -> None:
        """Write this session into environment.json, the sessions before it below ``earlier``."""
        path = self.path / "environment.json"
        earlier: list[dict[str, Any]] = []
        if path.exists():
            try:
                last = json.loads(path.read_text(encoding="utf-8"))
                earlier = [*last.pop("earlier", []), last]
            except (ValueError, AttributeError, TypeError) as error:
                raise UserError(f"{path} is not what a run writes there ({error}): delete it and run again") from error
        self.write_json(path.name, {**environment(device), "earlier": earlier})


def write_atomically(path: Path, text: str) -> None:
    """Write beside `path`, flush to the disk, rename; UserError if that cannot be done."""
    temporary = path.with_name(f".{path.name}.writing")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror}; free some space or set run_dir=") from error


def environment(device: torch.device) -> dict[str, Any]:
    """What this session runs on: versions, device, source commit, command line."""
    return {
        "started": _now(),
        "command": shlex.join([sys.executable, *sys.argv]),
        "dsv3fp8": dsv3fp8.__version__,
        "commit": source_commit(Path(dsv3fp8.__file__).parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "device": device_name(device),
        "devices": torch.cuda.device_count() if device.type == "cuda" else 0,
        "cpu_threads": torch.get_num_threads(),
    }


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's architecture."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"


def source_commit(directory: Path) -> str | None:
    """Commit of the checkout that tracks `directory`, with "-dirty" if files differ from it; None outside one."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(directory), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        # An installed package may lie inside a checkout of something else, in its virtual environment say.
        git("ls-files", "--error-unmatch", "__init__.py")
        return git("describe", "--always", "--dirty", "--abbrev=40", "--match=")
    except (OSError, subprocess.SubprocessError):
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
