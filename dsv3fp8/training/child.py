"""A training run in a process of its own, for those who start several of them.

The child leads a session of its own: Ctrl-C in the terminal reaches the parent alone, who passes on one signal, and the run
saves after its step. A parent that is killed takes its children along in the same way, where the kernel can tell them.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import dsv3fp8
from dsv3fp8.errors import UserError

LOG = "train.log"
"""What a run in a process of its own said, below its run directory."""

_START = b"--- started: train"
_PR_SET_PDEATHSIG = 1


def start_training(words: list[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """`dsv3fp8 train WORDS…` as a child, its output appended to `log`, with `environment` on top of this process's.

    To be called from a thread that lives as long as the child is wanted.
    """
    package = str(Path(dsv3fp8.__file__).parents[1])
    paths = [package, *(path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != package)]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        output.write(_START + b" %s\n" % shlex.join(words).encode())
        output.flush()
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "dsv3fp8", "train", *words],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent(),
        )


def _end_with_parent() -> Callable[[], None] | None:
    """What the child does before it becomes Python: ask for SIGTERM when the parent dies. Linux alone knows how."""
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it has died already
            os.kill(os.getpid(), signal.SIGTERM)

    return ask


def wait_until_free(run_dir: Path, say: Callable[[str], None], seconds: float = 120.0) -> None:
    """Wait for a process that still saves into `run_dir`, such as one whose parent was killed. UserError after `seconds`."""
    lock = run_dir / "lock"
    deadline, told = time.monotonic() + seconds, False
    while lock.exists() and not _is_free(lock):
        if not told:
            say(f"{run_dir.name}: in use by {lock.read_text().strip() or 'another process'}; waiting for it to save and stop")
            told = True
        if time.monotonic() > deadline:
            raise UserError(f"{run_dir} is in use by {lock.read_text().strip() or 'another process'}: end it, or wait for it")
        time.sleep(0.2)


def _is_free(lock: Path) -> bool:
    with lock.open("a+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True


def last_error(log: Path) -> str | None:
    """The line in which the run's last process said what ended it, if it did."""
    if not log.is_file():
        return None
    _, mark, rest = log.read_bytes().rpartition(_START)
    lines = rest.decode(errors="replace").splitlines()[bool(mark) :]
    told = [line.partition("dsv3fp8: error: ")[2] for line in lines if line.startswith("dsv3fp8: error: ")]
    if told:
        return told[-1]
    return next((line.strip() for line in reversed(lines) if line.strip()), None)
