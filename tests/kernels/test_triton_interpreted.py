"""Runs interpreted_triton.py with TRITON_INTERPRET=1, which holds for a whole process."""

import pytest

pytest.importorskip("triton", minversion="3.6")

from interpreter import run_interpreted


def test_kernels_in_the_interpreter() -> None:
    run_interpreted("interpreted_triton.py")
