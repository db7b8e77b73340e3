"""The error a caller can mend."""


class InputError(ValueError):
    """Input that cannot be used; the message names the thing, its value and the remedy.

    Programs at the edge (train.py, the command line) print the message as one line and leave
    with exit code 1. Every other exception is a fault of this library and keeps its traceback.
    """
