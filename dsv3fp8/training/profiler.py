"""torch.profiler on a few steps of a run, chosen by ``training.profile``."""

from pathlib import Path

import torch
from torch import profiler

WAIT, WARM_UP = 1, 1  # steps of the session that are left out, since they allocate and compile


class StepProfiler:
    """Records `steps` steps from the third of the session on; does nothing for 0."""

    def __init__(self, steps: int, directory: Path, first_step: int) -> None:
        """`first_step`: the session's first step. Writes trace-step-N.json (chrome://tracing, Perfetto) and a table."""
        self._directory = directory
        self._name = f"step-{first_step + WAIT + WARM_UP:08d}"
        self._profiler: profiler.profile | None = None
        if steps:
            activities = [profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(profiler.ProfilerActivity.CUDA)
            self._profiler = profiler.profile(
                activities=activities,
                schedule=profiler.schedule(wait=WAIT, warmup=WARM_UP, active=steps, repeat=1),
                on_trace_ready=self._write,
            )
            self._profiler.start()

    def step(self) -> None:
        """Call after every step."""
        if self._profiler:
            self._profiler.step()

    def close(self) -> None:
        """Write what was recorded, if the run ended before all of it was."""
        if self._profiler:
            self._profiler.stop()

    def _write(self, recorded: profiler.profile) -> None:
        self._directory.mkdir(exist_ok=True)
        recorded.export_chrome_trace(str(self._directory / f"trace-{self._name}.json"))
        operations = recorded.key_averages()
        on_gpu = any(operation.self_device_time_total for operation in operations)
        by = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        table = operations.table(sort_by=by, row_limit=50, max_name_column_width=80)
        (self._directory / f"table-{self._name}.txt").write_text(table, encoding="utf-8")
