"""kill -9 while a checkpoint is being written behind the back of training."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from dsv3fp8.training.checkpoint_directory import list_checkpoints

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "--max-restarts=1"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
# The second rank dies with half of its file of step 8 on the disk, once; the first has written its own by then or not.
DYING = """
import os, signal, sys
from pathlib import Path
from dsv3fp8 import cli
from dsv3fp8.training import checkpoint_saver
real = checkpoint_saver.write_file
def write_file(path, *rest):
    header = real(path, *rest)
    if "step-00000008" in str(path) and (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
        os.truncate(path, path.stat().st_size // 2)
        Path("left").write_text(" ".join(sorted(each.name for each in path.parent.parent.iterdir())))
        os.kill(os.getpid(), signal.SIGKILL)
    return header
checkpoint_saver.write_file = write_file
sys.exit(cli.main())
"""


def run(command: list[str], words: list[str], directory: Path) -> None:
    """One start of torchrun, to its end."""
    command = [*TORCHRUN, *command, "train", *words]
    done = subprocess.run(command, env=ENVIRONMENT, cwd=directory, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr


def test_kill_9_in_the_middle_of_a_checkpoint_goes_on_from_the_one_before(
    data_words: list[str], tmp_path: Path, curve: Any
) -> None:
    words = [*data_words, "recipe=bf16", "parallel.dp_replicate=2", "parallel.expert=2", "training.steps=14"]
    words += ["training.checkpoint_every=4", "training.keep=2"]
    (tmp_path / "dying.py").write_text(DYING)
    run(["-m", "dsv3fp8"], [*words, f"run_dir={tmp_path}/whole"], tmp_path)
    run(["dying.py"], [*words, f"run_dir={tmp_path}/killed"], tmp_path)
    assert (tmp_path / "left").read_text().split() == [".writing-step-00000008", "step-00000004"]
    assert [step for step, _ in list_checkpoints(tmp_path / "killed" / "checkpoints")] == [12, 14]
    assert len(list((tmp_path / "killed" / "checkpoints").iterdir())) == 2
    assert curve(tmp_path / "killed") == curve(tmp_path / "whole")
