"""A CPU run keeps freed memory, and fails at once where it asks for more than there is."""

import subprocess
import sys
from pathlib import Path

from dsv3fp8.training.host import _left_in_cgroup, limit_memory


def test_more_memory_than_the_machine_has_is_refused_and_not_promised() -> None:
    if sys.platform != "linux":  # the limit is one of Linux
        assert limit_memory() is None
        return
    code = (
        "import torch; from dsv3fp8.training.host import limit_memory; limit = limit_memory()\n"
        "torch.ones(1000, 1000) @ torch.ones(1000, 1000)\n"
        "try: torch.empty(limit)\n"
        'except RuntimeError as error: print("can\'t allocate memory" in str(error))'
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_a_lower_limit_stays() -> None:
    if sys.platform != "linux":
        assert limit_memory() is None
        return
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_DATA, (10**9, resource.RLIM_INFINITY))\n"
        "from dsv3fp8.training.host import limit_memory; print(limit_memory())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1000000000\n"


def test_a_container_counts_what_it_may_still_take(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert _left_in_cgroup(tmp_path) == 3000
    (tmp_path / "memory.max").write_text("max\n")
    assert _left_in_cgroup(tmp_path) > 10**15
