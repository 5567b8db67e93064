"""SIGTERM and SIGINT end a run between two steps, with a checkpoint; a second one ends it at once."""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

from dsv3fp8.last_words import say_at_once, show_cursor
from dsv3fp8.parallel.ranks import ALONE, Ranks

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """While open, the first signal is only remembered. Does nothing outside the main thread.

    signal: what one of the ranks was sent, as far as they have told one another in `heard`.
    """

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self.signal: signal.Signals | None = None
        self._ranks = ranks
        self._own: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {each: signal.signal(each, self._remember) for each in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and self._ranks.count > 1:
            return  # this process ends, and is to say why: torchrun sends its signal to all who are left as soon as one is gone
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def heard(self) -> bool:
        """Whether any rank was sent a signal: the same answer on all of them."""
        number = self._ranks.largest(self._own or 0)
        self.signal = signal.Signals(number) if number else None
        return self.signal is not None

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self._own is None:
            self._own = signal.Signals(number)
            # Of many ranks none promises what hangs on all of them: one may be gone, which is why torchrun sends a signal.
            if self._ranks.count == 1:
                say_at_once(f"\n{self._own.name}: saving after this step; once more to stop at once\n")
            return
        # Not to be waited for any longer: the kernel ends the process, wherever it is.
        show_cursor()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as shells count: 143 for SIGTERM, 130 for SIGINT."""
        assert self.signal is not None
        return 128 + self.signal
