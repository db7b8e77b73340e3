"""Ends a process that has stopped to make progress, whatever its main thread waits for."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator


class Watchdog:
    """Ends the process with exit code 1 when it has not been `alive` for a time; a context.

    A main thread that waits for a device, or for another process, runs no Python and so cannot
    give up by itself: a thread of the watchdog's does it for it.
    """

    def __init__(self, seconds: float | None, message: str) -> None:
        """Describe the watchdog; the context lets it loose.

        Args:
            seconds: Longest time without a sign of life; None watches nothing.
            message: The line on standard error that it leaves with.
        """
        self._seconds, self._message = seconds, message
        self._deadline = float("inf")
        self._ended = threading.Event()

    def __enter__(self) -> "Watchdog":
        """Begin to watch; the time counts from here."""
        self.alive()
        if self._seconds is not None:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Watch no longer."""
        self._ended.set()

    def alive(self) -> None:
        """Count the time anew."""
        if self._seconds is not None:
            self._deadline = time.monotonic() + self._seconds

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let a work of unknown length take its time; then count anew."""
        self._deadline = float("inf")
        try:
            yield
        finally:
            self.alive()

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self._seconds / 10)):
            if time.monotonic() > self._deadline:
                # Past Python's buffers and its exit, which both may wait for the main thread.
                os.write(sys.__stderr__.fileno(), f"{self._message}\n".encode())
                os._exit(1)
