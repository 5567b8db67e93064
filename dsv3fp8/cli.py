"""`dsv3fp8 COMMAND [key=value …]`: finds the command, and turns what a person can put right into one line.

Commands import what they need when they run, so that help and errors come at once and nothing asks for a GPU.
"""

import errno
import os
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from dsv3fp8 import __version__
from dsv3fp8.errors import LostRank, UserError
from dsv3fp8.last_words import error_line

if TYPE_CHECKING:
    from dsv3fp8.config import RunConfig

USER_ERROR, FAILED, INTERRUPTED = 2, 1, 130
HELP_WORDS = ("-h", "--help", "help")
# What errors that are no OutOfMemoryError say: the CPU's allocator, a GPU that others have filled, cuBLAS's workspace.
OUT_OF_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory", "CUDA out of memory", "CUDA error: out of memory", "STATUS_ALLOC_FAILED",
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit status: 0 done, 1 failed, 2 something for the user to put right, 130 interrupted."""
    try:
        return _leave_with(_guarded(sys.argv[1:] if argv is None else argv))
    except Exception:
        if not _has_met_others():
            raise
        traceback.print_exc()
        return _leave_with(FAILED)


def _leave_with(status: int) -> int:
    """The status; where this process has met other ranks, it ends here.

    Threads of gloo outlive their group. One that lets go of a tensor while Python is taken down is ended by Python in the
    middle of C++, which aborts the process; one that still sends is waited for. So Python is not taken down: everything of
    the run is closed.
    """
    if _has_met_others():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _has_met_others() -> bool:
    ranks = sys.modules.get("dsv3fp8.parallel.ranks")
    return ranks is not None and ranks.has_met()


def _guarded(arguments: list[str]) -> int:
    share_cores()
    try:
        arguments = take_local_rank(arguments)
        return _dispatch(arguments)
    except UserError as error:
        return _fail(str(error), USER_ERROR)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # The reader, such as `head`, has gone. What is still buffered must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _fail("nobody reads the output any more", FAILED)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        place = error.filename or "disk"
        return _fail(f"{place}: {error.strerror}; free some space or set run_dir=PATH elsewhere", FAILED)


def share_cores() -> None:
    """Let torch's CPU threads wait for one another less stubbornly. To be called before torch is loaded.

    libgomp spins for milliseconds at each barrier, and on cores that have other work to do as well everybody then waits for
    whoever was put aside. Tokens/s of the tiny model on two cores, idle and with one core taken: 20000 spins 3,100 and 200,
    1000 spins 2,850 and 730, none at all (OMP_WAIT_POLICY=PASSIVE, for a machine that is always busy) 1,900 and 1,680.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def take_local_rank(arguments: list[str]) -> list[str]:
    """Drop the `--local-rank=N` (or `--local_rank N`) of old launchers; LOCAL_RANK, which torchrun sets, wins."""
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name not in ("--local-rank", "--local_rank"):
            rest.append(word)
            continue
        rank = value if equals else next(words, "")
        if not rank.isdecimal():
            raise UserError(f"{name}={rank}: expected a number; or launch with torchrun, which sets LOCAL_RANK")
        os.environ.setdefault("LOCAL_RANK", rank)
    return rest


def train(arguments: list[str]) -> int:
    """Train a model, or go on with the run that is in run_dir."""
    from dsv3fp8.config import load_config

    if any(word in HELP_WORDS for word in arguments):
        from dsv3fp8.usage import settings_help

        print(settings_help())
        return 0
    if any(word in ("-m", "--multirun") for word in arguments):
        from dsv3fp8.multirun import multirun

        return multirun(arguments)
    config = load_config(arguments)

    from dsv3fp8.doctor import old_gpu_notice
    from dsv3fp8.training.loop import train

    notice = old_gpu_notice(config)
    if notice:
        print(f"dsv3fp8: note: {notice}", file=sys.stderr)
    from dsv3fp8.parallel.ranks import left_alone

    try:
        return train(config)
    except LostRank as error:
        return _fail(left_alone(str(error)), FAILED)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        return _fail(memory_advice(config), FAILED)


def compare(arguments: list[str]) -> int:
    """Train recipes on the same data from the same weights, and report what each costs; or report on runs that exist."""
    from dsv3fp8.observe.compare.command import main

    return main(arguments)


def generate(arguments: list[str]) -> int:
    """Sample text from a run's checkpoint."""
    from dsv3fp8.training.generate import main

    return main(arguments)


def consolidate(arguments: list[str]) -> int:
    """Write all weights of a checkpoint into one file, however many ranks wrote it."""
    from dsv3fp8.training.consolidate import main

    return main(arguments)


def map_(arguments: list[str]) -> int:
    """Run one block and draw what precision everything ran in, forward and backward."""
    from dsv3fp8.observe.map.command import main

    try:
        return main(arguments)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        asked = " ".join(["map", *arguments])
        return _fail(f"out of memory in `{asked}`: lower tokens or model.experts, or take a smaller model", FAILED)


def drift(arguments: list[str]) -> int:
    """Measure how far FP8 sums stray from the exact ones, promoted and not: tables, figures, a page."""
    from dsv3fp8.observe.drift.command import main

    try:
        return main(arguments)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        return _fail(f"out of memory in `{' '.join(['drift', *arguments])}`: take size=small, or another device", FAILED)


def bench(arguments: list[str]) -> int:
    """Time kernels, a linear, a layer or training steps on a Hopper GPU, beside their peers: tables, JSON, a page."""
    from dsv3fp8.observe.bench.command import main

    try:
        return main(arguments)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        return _fail(f"out of memory in `{' '.join(['bench', *arguments])}`: end what else uses the GPU, or take less", FAILED)


def plan(arguments: list[str]) -> int:
    """Say what a model takes on so many GPUs, without one: memory, bytes on the wire, time of a step."""
    from dsv3fp8.observe.plan.command import main

    return main(arguments)


def export(arguments: list[str]) -> int:
    """Write a run's checkpoint as a Hugging Face directory: BF16, FP8 or FP32."""
    from dsv3fp8.hub.export_run import main

    return main(arguments)


def import_(arguments: list[str]) -> int:
    """Make a run directory of a Hugging Face checkpoint of DeepSeek-V2 or V3, for `train` to go on with."""
    from dsv3fp8.hub.import_run import main

    return main(arguments)


def doctor(arguments: list[str]) -> int:
    """Print what this machine can do, tested against installed versions, and which backend each op takes."""
    from dsv3fp8.doctor import main

    return main(arguments)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train, "compare": compare, "generate": generate, "consolidate": consolidate, "export": export,
    "import": import_, "map": map_, "drift": drift, "bench": bench, "plan": plan, "doctor": doctor,
}  # fmt: skip


def out_of_memory(error: BaseException) -> bool:
    """Host or device memory has run out. torch's own class is looked up only where torch is loaded."""
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    return any(words in str(error) for words in OUT_OF_MEMORY)


def memory_advice(config: "RunConfig") -> str:
    """One line with what to change, and the values it has now."""
    training = config.training
    advice = [f"lower training.context={training.context}", f"take a smaller model than model={config.model.name}"]
    if config.optimizer.moments != "bf16":
        advice.append("store the moments in BF16 with optimizer.moments=bf16")
    if config.recipe.recompute != "norms_and_up":
        advice.insert(0, "keep less for backward with recipe.recompute=norms_and_up, which changes no bit of the run")
    if training.batch > 1:
        advice.insert(0, f"lower training.batch={training.batch} and raise training.accumulate={training.accumulate}")
    return f"out of memory: {', or '.join(advice)}"


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in HELP_WORDS:
        print(_help())
        return 0 if arguments else USER_ERROR
    name, *rest = arguments
    if name in ("-V", "--version", "version"):
        print(f"dsv3fp8 {__version__}")
        return 0
    if name not in COMMANDS:
        hint = f"did you mean `train {name}`?" if "=" in name else f"there are {', '.join(COMMANDS)}"
        raise UserError(f"{name}: no such command; {hint}")
    return COMMANDS[name](rest)


def _help() -> str:
    commands = "\n".join(f"  {name:<13}{(command.__doc__ or '').splitlines()[0]}" for name, command in COMMANDS.items())
    return (
        f"Usage: dsv3fp8 COMMAND [key=value …]   (version {__version__}; also: python -m dsv3fp8 COMMAND)\n\n"
        f"{commands}\n\n"
        "Start with `dsv3fp8 train`; `dsv3fp8 train --help` lists the groups and every key."
    )


def _fail(message: str, status: int) -> int:
    """One line, also where many ranks fail."""
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    if alone or _speaks(message if status == USER_ERROR else None):
        print(error_line(message), end="", file=sys.stderr)
    return status


def _speaks(once: str | None) -> bool:
    from dsv3fp8.parallel.ranks import speaks

    return speaks(once)
