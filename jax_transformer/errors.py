"""The error a caller can mend, and values in its message."""

LONGEST_LINE = 1000  # characters of a message


class InputError(ValueError):
    """Input that cannot be used; the message names the thing, its value and the remedy.

    Programs at the edge (train.py, the command line) print the message as one line and leave
    with exit code 1. Every other exception is a fault of this library and keeps its traceback.
    """

    def __init__(self, *lines: str) -> None:
        """Make each line readable, whatever values it shows; only a report has several lines."""
        super().__init__("\n".join(map(_readable, lines)))


def _readable(line: str) -> str:
    if len(line) > LONGEST_LINE:
        line = f"{line[: LONGEST_LINE - 300]} ... {line[-290:]}"
    if line.isprintable():
        return line
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in line
    )


def shorten(value: object, most: int = 80) -> str:
    """Return any value for a message: in one line, escaped, and at most so many characters."""
    try:
        text = ascii(value[:most] if isinstance(value, str) else value)
    except (ValueError, RecursionError):  # too many digits, or nested too deep
        text = f"a large {type(value).__name__}"
    text = " ".join(text.split()) if "\n" in text else text
    return text if len(text) <= most else f"{text[: most - 3]}..."


def one_line(message: str, most: int = 500) -> str:
    """Return another library's message in one line: it may repeat a file's value."""
    line = " ".join(message[: 4 * most].split())
    line = line if line.isprintable() else ascii(line)[1:-1]
    return line if len(line) <= most else f"{line[: most - 3]}..."
