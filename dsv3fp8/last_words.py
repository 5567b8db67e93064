"""What a process still says when it ends in the middle of something: from a signal handler, or not from its main thread."""

import os

SHOW_CURSOR = b"\x1b[?25h"  # a live bar hides it


def error_line(message: str) -> str:
    """An error as the command line shows it: one line."""
    return f"dsv3fp8: error: {message}\n"


def say_at_once(text: str) -> None:
    """To standard error, unbuffered: a print may be under way in the main thread."""
    os.write(2, text.encode())


def show_cursor() -> None:
    """On a terminal whose live bar has no time to go."""
    if os.isatty(1):
        os.write(1, SHOW_CURSOR)
