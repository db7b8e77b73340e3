"""Signals: in a training run the first one lets it save; elsewhere Ctrl-C ends the process."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Whether a signal has asked the run to stop, and what the run finishes before."""

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
    """A run has saved itself and stopped, because a signal asked it to."""

    def __init__(self, message: str, number: signal.Signals) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


@contextlib.contextmanager
def stop_requests(acknowledge: Callable[[str], object]) -> Iterator[StopRequest]:
    """Note the first SIGTERM or SIGINT within this context; a second one ends the process.

    Python runs a signal handler only when the main thread returns from XLA, which may take many
    seconds. So a thread acknowledges the first signal, and obeys the second one at once.
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
    """Call a function with the number of each signal as it arrives, in another thread."""

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


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C end the process at once, with one line and exit code 130.

    Python's KeyboardInterrupt is not enough: jaxlib drops it in a callback and makes an ImportError
    of it while its modules start, and compiled code delays it. What is being written must survive
    a kill anyway. Where SIGINT is ignored, as in the background of a shell, or has another handler
    than Python's own, nothing changes.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def leave(number: int) -> None:
        if number == signal.SIGINT:
            with contextlib.suppress(OSError):
                os.write(2, b"interrupted\n")  # not by sys.stderr, whose lock may be held
            os._exit(128 + signal.SIGINT)

    with received_signals(leave):
        before = signal.signal(signal.SIGINT, lambda *_: None)  # `leave` ends the process
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
