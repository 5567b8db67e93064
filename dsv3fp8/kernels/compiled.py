"""C kernels for the CPU: compiled once on the machine that runs them, kept in the user's cache, loaded with ctypes.

A library is named after its source, the compiler, its options and the CPU, so that a home directory shared by different
machines holds one for each. Where that fails there is a reason in one line, for whoever chooses another kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

# Results are promised to the bit: no fast-math, and a fused multiply-add only where the source asks for one.
OPTIONS = ("-std=gnu11", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-pthread")
LIBRARIES = ("-lm",)
DIGEST = hashlib.sha256().digest_size
SECONDS = 120  # after which a compiler is taken to hang


@dataclass(frozen=True)
class Library:
    """A loaded library, or why there is none."""

    functions: ctypes.CDLL | None
    reason: str


@lru_cache
def compiled(source: Path) -> Library:
    """The library made from a C file, compiled at the first call on a machine. Never raises for what a machine lacks."""
    name = os.environ.get("CC") or "cc"
    command = shlex.split(name)  # "ccache gcc" too
    if not command or shutil.which(command[0]) is None:
        return Library(None, f"there is no C compiler ({name})")
    try:
        library = _library_path(source, command)
        if not _whole(library):
            _compile(source, command, library)
        return Library(ctypes.CDLL(str(library)), f"compiled by {name}")
    except subprocess.CalledProcessError as error:
        return Library(None, f"{name} failed: {_first_line(error.stderr)}")
    except subprocess.TimeoutExpired:
        return Library(None, f"{name} did not finish within {SECONDS} s")
    except (OSError, RuntimeError) as error:  # a full or read-only cache, no home directory, a library that does not load
        return Library(None, f"the compiled kernel cannot be kept or loaded: {_first_line(str(error))}")


def _library_path(source: Path, compiler: list[str]) -> Path:
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=SECONDS, check=True).stdout
    path = os.path.realpath(shutil.which(compiler[0]) or compiler[0])
    made_of = (source.read_text(encoding="utf-8"), path, *compiler[1:], version, *OPTIONS, *LIBRARIES, _cpu())
    digest = hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:20]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "dsv3fp8" / "kernels" / f"{source.stem}-{digest}.so"


def _whole(library: Path) -> bool:
    """Whether the file is there as it was written: loading one that was cut short kills the process."""
    if not library.is_file():
        return False
    content = library.read_bytes()
    return _digest(content[:-DIGEST]) == content[-DIGEST:]


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _compile(source: Path, compiler: list[str], library: Path) -> None:
    """Writes next to the library and renames: another process sees a whole library or none. Its digest stands behind it."""
    library.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{library.stem}-", suffix=".so", dir=library.parent)
    os.close(handle)
    try:
        command = [*compiler, *OPTIONS, str(source), "-o", temporary, *LIBRARIES]
        subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
        content = Path(temporary).read_bytes()
        with open(temporary, "ab") as file:  # what lies behind an ELF file's sections is not loaded
            file.write(_digest(content))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, library)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _cpu() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    kept = ("model name", "cpu family", "model", "stepping", "flags", "features", "cpu part")
    return platform.machine() + "".join(line for line in lines if line.partition(":")[0].strip().lower() in kept)


def _first_line(text: str) -> str:
    """What a person reads first of a compiler's output."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "it said nothing")
