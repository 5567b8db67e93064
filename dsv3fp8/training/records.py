"""Where the figures of a run go: its metrics file and those who follow its curve. The first rank alone has any."""

from contextlib import ExitStack
from typing import Any

from dsv3fp8.training.metrics import MetricsFile
from dsv3fp8.training.reporting import Reporters
from dsv3fp8.training.setup import Run


class Records:
    """Writes and speaks on the first rank; on the others every call does nothing."""

    def __init__(self, run: Run, stack: ExitStack) -> None:
        """`stack` closes what is opened here, also after an error."""
        self._metrics: MetricsFile | None = None
        self._reporters: Reporters | None = None
        if run.ranks.first:
            self._metrics = MetricsFile(run.directory.metrics, after_step=run.state.step)
            stack.callback(self._metrics.close)
            self._reporters = Reporters(run, self._metrics.history)
            stack.callback(self._reporters.close)

    def append(self, record: dict[str, Any]) -> None:
        """One record, to the file first."""
        if self._metrics and self._reporters:
            self._metrics.append(record)
            self._reporters.log(record)

    def advance(self, step: int) -> None:
        """A step without figures is done."""
        if self._reporters:
            self._reporters.advance(step)

    def say(self, message: str) -> None:
        """Show a line on the terminal."""
        if self._reporters:
            self._reporters.say(message)

    def sync(self) -> None:
        """Make all records survive a lost machine."""
        if self._metrics:
            self._metrics.sync()

    def conclude(self, message: str) -> None:
        """The run's last words."""
        if self._reporters:
            self._reporters.conclude(message)
