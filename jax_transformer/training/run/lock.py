"""A lock that allows one training in a directory at a time."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from jax_transformer.errors import InputError


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keep other processes out of a directory; the lock ends with the process in every case.

    Raises:
        InputError: Another process holds the lock.
    """
    opened = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"{directory}: another process is training this run; wait for it or end it"
            ) from error
        yield
    finally:
        os.close(opened)
