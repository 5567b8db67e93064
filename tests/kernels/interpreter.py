"""Triton's interpreter for a file of tests, in a process of its own: TRITON_INTERPRET=1 holds for a whole process."""

import os
import subprocess
import sys
from pathlib import Path


def run_interpreted(name: str) -> None:
    """Run tests/kernels/`name`; AssertionError, with the end of what it said, if a test in it fails."""
    tests = Path(__file__).with_name(name)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    path = os.pathsep.join((str(tests.parents[1]), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tests.parents[2], check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
