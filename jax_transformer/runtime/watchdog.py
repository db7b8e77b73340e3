"""Ends a process that makes no progress any more, whatever its main thread waits for."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator


class Watchdog:
    """Ends the process with one line and exit code 1 if `alive` is not called for some time.

    A main thread that waits for a device or for another process runs no Python and cannot give up
    by itself. A thread of this context ends the process instead. None seconds watch nothing.
    """

    def __init__(self, seconds: float | None, message: str) -> None:
        self._seconds, self._message = seconds, message
        self._deadline = float("inf")
        self._ended = threading.Event()

    def __enter__(self) -> "Watchdog":
        self.alive()
        if self._seconds is not None:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def alive(self) -> None:
        """Restart the time."""
        if self._seconds is not None:
            self._deadline = time.monotonic() + self._seconds

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend the limit during work of unknown length; then restart the time."""
        self._deadline = float("inf")
        try:
            yield
        finally:
            self.alive()

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self._seconds / 10)):
            if time.monotonic() > self._deadline:
                # Without Python's buffers and its exit, which may both wait for the main thread.
                os.write(sys.__stderr__.fileno(), f"{self._message}\n".encode())
                os._exit(1)
