"""Runs interpreted_elementwise.py with TRITON_INTERPRET=1, which holds for a whole process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", minversion="3.6")


def test_fused_kernels_in_the_interpreter() -> None:
    tests = Path(__file__).with_name("interpreted_elementwise.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tests.parents[2], check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
