"""The exceptions meant for a person to read: the command line prints them as a single line, without a traceback."""


class UserError(Exception):
    """Something the user can put right: ONE line with the key or file, the value and the remedy.

    Raise it before any work starts. A bug of ours is an assert or another exception, which keeps its traceback.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(line.strip() for line in message.splitlines()))


class LostRank(Exception):
    """Another rank is gone, and this one cannot go on without it; says which, in words."""
