"""A lock that allows one training in a directory at a time."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from jax_transformer.storage.writing import lock


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keep other processes out of a directory; the lock ends with the process in every case.

    Raises:
        InputError: Another process holds the lock.
    """
    opened = os.open(directory, os.O_RDONLY)
    try:
        lock(opened, f"{directory}: another process is training this run; wait for it or end it")
        yield
    finally:
        os.close(opened)
