"""Signals that stop a training run: the first one lets it save, the second ends it at once."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Whether a signal has asked the run to stop.

    Attributes:
        signal: The signal that was received; None before.
        current_work: What the run finishes before it stops, for the acknowledgement.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.current_work = "this step"

    @contextlib.contextmanager
    def during(self, work: str) -> Iterator[None]:
        """Name the work that a signal received in this context waits for."""
        before, self.current_work = self.current_work, work
        try:
            yield
        finally:
            self.current_work = before


class Stopped(Exception):
    """A run has saved itself and stopped, because a signal asked it to.

    Attributes:
        exit_code: The exit code of the program: 128 plus the number of the signal.
    """

    def __init__(self, message: str, number: signal.Signals) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


@contextlib.contextmanager
def stop_requests(acknowledge: Callable[[str], object] | None = None) -> Iterator[StopRequest]:
    """Note the first SIGTERM or SIGINT within this context; a second one ends the process.

    Python runs a signal handler in the main thread, and only when that returns from XLA, which may
    take many seconds. A thread therefore acknowledges the first signal and obeys the second one
    at once.

    To be entered in the main thread: Python allows no other thread to set signal handlers.

    Args:
        acknowledge: Shows one line when the first signal arrives; called in another thread.
    """
    request = StopRequest()

    def note(number: int, _: FrameType | None) -> None:
        request.signal = signal.Signals(number)
        for name in SIGNALS:
            signal.signal(name, signal.SIG_DFL)

    # The C part of Python writes the number of each signal into this socket as it arrives.
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    watching = threading.Thread(
        target=_watch, args=(reader, request, acknowledge), name="signals", daemon=True
    )
    watching.start()
    wakeup_before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    before = {name: signal.signal(name, note) for name in SIGNALS}
    try:
        yield request
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
        signal.set_wakeup_fd(wakeup_before)
        writer.close()
        watching.join()
        reader.close()


def _watch(
    reader: socket.socket, request: StopRequest, acknowledge: Callable[[str], object] | None
) -> None:
    """Acknowledge the first signal, end the process at the second, until the writer closes."""
    received = 0
    while number := reader.recv(1):
        if number[0] not in SIGNALS:
            continue
        received += 1
        if received > 1:
            os._exit(128 + number[0])
        if acknowledge is not None:
            with contextlib.suppress(OSError):  # nobody may read standard output any more
                name = signal.Signals(number[0]).name
                again = "press Ctrl-C" if number[0] == signal.SIGINT else f"send {name}"
                acknowledge(
                    f"{name}: stopping after {request.current_work}, the run is then saved; "
                    f"{again} again to end at once without saving"
                )
