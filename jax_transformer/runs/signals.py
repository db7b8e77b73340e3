"""Signals: one that stops a training run lets it save, the second one ends it at once."""

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

    received = 0

    def answer(number: int) -> None:
        nonlocal received
        if number not in SIGNALS:
            return
        received += 1
        if received > 1:
            os._exit(128 + number)
        if acknowledge is not None:
            with contextlib.suppress(OSError):  # nobody may read standard output any more
                name = signal.Signals(number).name
                again = "press Ctrl-C" if number == signal.SIGINT else f"send {name}"
                acknowledge(
                    f"{name}: stopping after {request.current_work}, the run is then saved; "
                    f"{again} again to end at once without saving"
                )

    with received_signals(answer):
        before = {name: signal.signal(name, note) for name in SIGNALS}
        try:
            yield request
        finally:
            for name, handler in before.items():
                signal.signal(name, handler)


@contextlib.contextmanager
def received_signals(answer: Callable[[int], object]) -> Iterator[None]:
    """Call a function with the number of each signal as it arrives, in another thread.

    The handlers of the signals are called as well, later. To be entered in the main thread.

    Args:
        answer: Called with the number of a signal that has a handler of Python's.
    """

    def watch() -> None:
        while number := reader.recv(1):
            answer(number[0])

    # The C part of Python writes the number of each signal into this socket as it arrives.
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    watching = threading.Thread(target=watch, name="signals", daemon=True)
    watching.start()
    wakeup_before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup_before)
        writer.close()
        watching.join()
        reader.close()
