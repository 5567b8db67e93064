"""Who is told about the curve while it grows: the terminal, a picture, Weights & Biases.

All of them get the records that metrics.jsonl gets and none of them is needed to resume or compare a run.
"""

from typing import Any, Protocol


class Logger(Protocol):
    """What the loop calls. A logger keeps floats, never tensors."""

    def log(self, record: dict[str, Any]) -> None:
        """Take one record: plain values by name, ``step`` among them; a value that is not known is None."""

    def close(self) -> None:
        """Write what is left. Called once, also after an error."""
