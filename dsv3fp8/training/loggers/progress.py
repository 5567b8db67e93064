"""The terminal: a live bar with the time left, or plain lines where there is no terminal."""

import math
import sys
import time
from typing import Any

# Seconds between plain lines; the first, the last and those of a validation always appear.
PLAIN_INTERVAL = 5.0


class Progress:
    """``bar``, ``plain`` or ``none``; ``auto`` takes the bar on a terminal. say() prints above the bar."""

    def __init__(self, style: str, total: int, start: int) -> None:
        """`total` steps of the run, of which `start` are done."""
        if style == "auto":
            style = "bar" if sys.stdout.isatty() else "plain"
        self._style = style
        self._total = total
        self._first: tuple[int, float] = (start, time.monotonic())
        self._printed = -math.inf
        self._latest_validation: float | None = None
        if style == "bar":
            from rich import progress as rich

            self._bar = rich.Progress(
                rich.TextColumn("step"),
                rich.MofNCompleteColumn(),
                rich.BarColumn(bar_width=None),
                rich.TextColumn("{task.fields[text]}"),
                rich.TimeRemainingColumn(),
                expand=True,
            )
            self._task = self._bar.add_task("train", total=total, completed=start, text="")
            self._bar.start()

    def say(self, message: str) -> None:
        """Print one line that stays."""
        if self._style == "bar":
            self._bar.console.print(message, markup=False, highlight=False, soft_wrap=True)
        else:
            print(message, flush=True)

    def advance(self, step: int) -> None:
        """Move the bar without new figures, on a step that is not logged."""
        if self._style == "bar":
            self._bar.update(self._task, completed=step)

    def log(self, record: dict[str, Any]) -> None:
        """Show one record."""
        self._latest_validation = record.get("validation_loss") or self._latest_validation
        if self._style == "bar":
            text = describe({**record, "validation_loss": self._latest_validation})
            self._bar.update(self._task, completed=record["step"], text=text)
        elif self._style == "plain":
            step, now = record["step"], time.monotonic()
            due = now - self._printed >= PLAIN_INTERVAL
            if due or step == self._total or record.get("validation_loss") is not None:
                self._printed = now
                print(f"step {step}/{self._total}  {describe(record)}  {self._time_left(step, now)}", flush=True)

    def _time_left(self, step: int, now: float) -> str:
        done, since = step - self._first[0], now - self._first[1]
        seconds = round(since / max(done, 1) * (self._total - step))
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} left"

    def close(self) -> None:
        """Leave the terminal as it was; say() still works."""
        if self._style == "bar":
            self._bar.stop()


def describe(record: dict[str, Any]) -> str:
    """The figures a person watches, on one line."""
    parts = [f"loss {record['loss']:.4f}"]
    if record.get("validation_loss") is not None:
        parts.append(f"validation {record['validation_loss']:.4f}")
    parts.append(f"lr {record['lr']:.2e}")
    if record.get("grad_norm") is not None:
        parts.append(f"norm {record['grad_norm']:.3g}")
    if record.get("tokens_per_second") is not None:
        parts.append(f"{record['tokens_per_second']:,.0f} tokens/s")
    if record.get("bf16_peak_share") is not None:
        parts.append(f"{record['bf16_peak_share']:.1%} of BF16 peak")
    if record.get("skipped"):
        parts.append(f"{record['skipped']} skipped")
    return "  ".join(parts)
