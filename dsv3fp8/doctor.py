"""`dsv3fp8 doctor`: what this machine can do, and which backend each op of a recipe takes here and why.

The first thing to run when a run is slow or does not start, and the first thing to paste into a bug report.
"""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from dsv3fp8 import __version__
from dsv3fp8.config import RunConfig, load_config

if TYPE_CHECKING:
    from dsv3fp8.precision.recipe import Recipe

# Shown against the tested version. The others of constraints.txt are what these bring along.
SHOWN = ("torch", "numpy", "einops", "hydra-core", "omegaconf", "tokenizers", "pyarrow", "matplotlib", "rich")
# Package → what is missing without it.
OPTIONAL = {
    "triton": "Triton kernels and torch.compile on GPUs",
    "wandb": "Weights & Biases logs",
    "datasets": "data=huggingface; pip install 'dsv3fp8[hf]'",
    "transformers": "to load what `dsv3fp8 export` writes; pip install 'dsv3fp8[hf]'",
    "accelerate": "for transformers to load FP8 exports; pip install 'dsv3fp8[hf]'",
    "transformer-engine": "recipe=te_blockwise and columns of bench; pip install 'dsv3fp8[te]'",
}
OLDEST_FP8 = (8, 9)  # Ada; FP8 tensor cores begin here
GEMMS = ("fprop", "dgrad", "wgrad")
GIB = 2**30


def main(arguments: list[str]) -> int:
    """Print the report for the settings in `key=value` words, as `train` takes them."""
    from dsv3fp8.model.manifest import linear_shapes

    config = load_config(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() and config.training.device != "cpu" else "cpu")
    torch.use_deterministic_algorithms(config.training.deterministic)  # attention goes by it
    print(f"dsv3fp8 {__version__}, recipe {config.recipe.name} on {device.type}")
    sections = {
        "Machine": machine(Path(config.run_dir)),
        "GPU": gpus(),
        "Packages": packages(),
        f"Backends of recipe {config.recipe.name} on {device.type}": backends(
            config.recipe,
            device,
            linear_shapes(config.model),
            config.data.isolate_documents,
            (config.model.head_qk, config.model.head_v),
        ),
    }
    for title, lines in sections.items():
        print(f"\n{title}")
        print("\n".join(f"  {line}" for line in lines))
    notice = old_gpu_notice(config)
    if notice:
        print(f"\n{notice}")
    return 0


def machine(run_dir: Path) -> list[str]:
    """System, interpreter, cores and memory that this process may use, and the disk that runs go to."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = psutil.virtual_memory()
    place = next(folder for folder in (run_dir, *run_dir.parents) if folder.is_dir())
    disk = shutil.disk_usage(place)
    return [
        f"{platform.platform()}, {platform.machine()}",
        f"Python {platform.python_version()} at {sys.executable}",
        f"{cores} cores, torch uses {torch.get_num_threads()} threads",
        f"memory {memory.available / GIB:.1f} GiB free of {memory.total / GIB:.1f}",
        f"disk {disk.free / GIB:.1f} GiB free at {place}",
    ]


def gpus() -> list[str]:
    """Each GPU with its capability and memory; where there is none, why."""
    driver = _driver()
    if not torch.cuda.is_available():
        if driver and torch.version.cuda is None:
            return [f"driver {driver} answers, but torch {torch.__version__} is a CPU build: install a CUDA build"]
        if driver:
            return [f"driver {driver} answers, but CUDA {torch.version.cuda} does not start: update the driver"]
        return [f"none that torch {torch.__version__} can use"]
    lines = [f"driver {driver or 'unknown'}, torch built for CUDA {torch.version.cuda}"]
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        fp8 = "FP8 tensor cores" if (card.major, card.minor) >= OLDEST_FP8 else "no FP8 tensor cores"
        lines.append(f"{index}: {card.name}, sm_{card.major}{card.minor}, {card.total_memory / GIB:.0f} GiB, {fp8}")
    return lines


def packages() -> list[str]:
    """Installed versions against the tested ones, then what is optional."""
    tested = tested_versions()
    lines = []
    for name in (*SHOWN, *OPTIONAL):
        found = _installed(name)
        if found is None:
            note = f"not installed: {OPTIONAL.get(name, 'run scripts/install or pip install dsv3fp8')}"
        elif name not in tested:
            note = "not tested"
        else:
            note = "as tested" if found.split("+")[0] == tested[name] else f"tested with {tested[name]}"
        lines.append(f"{name:<20}{found or '-':<16}{note}")
    return lines


def backends(
    recipe: "Recipe",
    device: torch.device,
    shapes: Mapping[str, tuple[int, int]] | None = None,
    isolated: bool = False,
    head: tuple[int, int] = (192, 128),
) -> list[str]:
    """For each backend taken on this device, and each reason: the ops. `shapes`, `isolated` and `head`: see `explain`."""
    from dsv3fp8.kernels.explain import explain

    groups: dict[str, list[str]] = {}
    for op, choice in explain(recipe, device, shapes, isolated, head):
        groups.setdefault(str(choice), []).append(op)
    lines = []
    for choice_text, ops in groups.items():
        lines.append(choice_text)
        lines += textwrap.wrap(", ".join(_all_three(ops)), 100, initial_indent="    ", subsequent_indent="    ")
    return lines


def _all_three(ops: list[str]) -> list[str]:
    """`q_a.fprop`, `q_a.dgrad`, `q_a.wgrad` → `q_a`, where all three are there."""
    linears = [op.removesuffix(".fprop") for op in ops if op.endswith(".fprop")]
    whole = {linear for linear in linears if {f"{linear}.{gemm}" for gemm in GEMMS} <= set(ops)}
    names = (op.partition(".")[0] if op.partition(".")[0] in whole else op for op in ops)
    return list(dict.fromkeys(names))


def old_gpu_notice(config: RunConfig) -> str | None:
    """What to know before a quantized recipe starts on a GPU from before FP8, else None."""
    if config.training.device == "cpu" or not config.recipe.quantizes or not torch.cuda.is_available():
        return None
    capability = torch.cuda.get_device_capability()
    if capability >= OLDEST_FP8:
        return None
    name = f"{torch.cuda.get_device_name()} (sm_{capability[0]}{capability[1]})"
    return (
        f"{name} has no FP8 tensor cores, which begin with sm_89: recipe={config.recipe.name} runs on the torch "
        "reference, with the same numbers but slower than recipe=bf16"
    )


def tested_versions() -> dict[str, str]:
    """Package → version, from constraints.txt: inside the package once installed, else at the top of the checkout."""
    here = Path(__file__).resolve().parent
    places = (here / "constraints.txt", here.parent / "constraints.txt")
    text = next(path for path in places if path.is_file()).read_text(encoding="utf-8")
    return dict(line.split("==") for line in text.splitlines() if re.fullmatch(r"[\w.-]+==\S+", line))


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """The NVIDIA driver's version, or None where no driver answers."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    asked = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.splitlines()[0].strip() if answer.returncode == 0 and answer.stdout.strip() else None
