"""metrics.jsonl: one JSON object a line, the record that plots, comparisons and a resumed run read.

JSON has no NaN. A value that is not finite is written as null, and the line says which in ``nonfinite``:
``{"step": 3, "loss": null, "nonfinite": {"loss": "nan"}}``; reading gives the value back. A line cut short by a kill is
the last one and is ignored; a resumed run drops it along with every line after its checkpoint.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv3fp8.errors import UserError
from dsv3fp8.training.run_directory import write_atomically

# Fields that hang on the machine and the moment; all others repeat bit for bit when a run does.
TIMING_FIELDS = frozenset(
    {
        "seconds", "tokens_per_second", "model_tflops", "bf16_peak_share", "fp8_peak_share",
        "rss_peak_gb", "cuda_allocated_peak_gb", "cuda_reserved_peak_gb",
    }
)  # fmt: skip


class MetricsFile:
    """Appends records to metrics.jsonl, each on the disk's side of a flush before append() returns."""

    def __init__(self, path: Path, after_step: int) -> None:
        """Open for appending after `after_step`; lines of later steps, which are about to be run again, are dropped."""
        self.path = path
        kept = [record for record in read_metrics(path) if record["step"] <= after_step] if path.exists() else []
        # The records so far, as they were appended.
        self.history: list[dict[str, Any]] = kept
        write_atomically(path, "".join(_line(record) for record in kept))
        self._file = path.open("a", encoding="utf-8")

    def append(self, record: dict[str, Any]) -> None:
        """Write one record; UserError if the disk is full."""
        try:
            self._file.write(_line(record))
            self._file.flush()
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}; free some space and run again") from error

    def sync(self) -> None:
        """Make all lines survive a lost machine."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # what the disk did not take is still in the buffer; append() has said so
            self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole records of a metrics.jsonl, values that are not finite as floats; UserError for a broken line."""
    return list(_read(path))


def _read(path: Path) -> Iterator[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        if not line.endswith("\n"):
            return  # cut short while it was written
        try:
            record = json.loads(line)
            restored = {name: float(value) for name, value in record.pop("nonfinite", {}).items()}
            whole = {name: restored.get(name, value) for name, value in record.items()}
        except (ValueError, AttributeError, TypeError) as error:
            raise UserError(f"{path}, line {number} is no JSON object: delete the line") from error
        if not isinstance(whole.get("step"), int):
            raise UserError(f"{path}, line {number} has no step: delete the line")
        for name, value in whole.items():
            if value is not None and not isinstance(value, int | float):
                raise UserError(f"{path}, line {number}: {name}={json.dumps(value)} is no number: delete the line")
        yield whole


def _line(record: dict[str, Any]) -> str:
    bad = {name: str(value) for name, value in record.items() if isinstance(value, float) and not math.isfinite(value)}
    if bad:
        record = {**record, **dict.fromkeys(bad), "nonfinite": bad}
    return json.dumps(record, allow_nan=False) + "\n"


def expert_balance(load: Tensor) -> dict[str, float | None]:
    """Two numbers for the worst-balanced MoE layer, from token counts [moe_layers, experts] of one optimizer step.

    ``expert_load_max``: tokens of the busiest expert over the mean; 1 is even. ``expert_load_entropy``: entropy of the
    shares over that of an even split; 1 is even, 0 is one expert for all. None without MoE layers or tokens.
    """
    counts = load.detach().to("cpu", torch.float64)
    counts = counts[counts.sum(dim=-1) > 0] if counts.numel() else counts
    if not counts.numel():
        return {"expert_load_max": None, "expert_load_entropy": None}
    experts = counts.shape[-1]
    shares = counts / counts.sum(dim=-1, keepdim=True)
    entropy = torch.special.entr(shares).sum(dim=-1) / math.log(experts) if experts > 1 else torch.ones(len(counts))
    return {
        "expert_load_max": float((shares.amax(dim=-1) * experts).max()),
        "expert_load_entropy": float(entropy.min()),
    }
