"""The error a caller can mend."""

LONGEST_LINE = 1000  # characters of a message


class InputError(ValueError):
    """Input that cannot be used; the message names the thing, its value and the remedy.

    Programs at the edge (train.py, the command line) print the message as one line and leave
    with exit code 1. Every other exception is a fault of this library and keeps its traceback.
    """

    def __init__(self, message: str = "") -> None:
        """Keep both ends of a line that a value of any length has made too long to read."""
        lines = message.split("\n")
        super().__init__("\n".join(map(_readable, lines)))


def _readable(line: str) -> str:
    if len(line) <= LONGEST_LINE:
        return line
    return f"{line[: LONGEST_LINE - 300]} ... {line[-290:]}"
