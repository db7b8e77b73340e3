"""Signals that ask a training run to stop: the first one politely, the second one at once."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Whether a signal has asked the run to stop.

    Attributes:
        signal: The signal that has; None as long as none has.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None


class Stopped(Exception):
    """A run has saved itself and stopped, because a signal asked it to.

    Attributes:
        exit_code: What the program leaves with: 128 plus the signal's number.
    """

    def __init__(self, message: str, number: signal.Signals) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Note the first SIGTERM or SIGINT within this context; a second one ends the process.

    For the main thread, which alone may say what a signal does.
    """
    request = StopRequest()

    def note(number: int, _: FrameType | None) -> None:
        request.signal = signal.Signals(number)
        for one in SIGNALS:
            signal.signal(one, signal.SIG_DFL)

    before = {one: signal.signal(one, note) for one in SIGNALS}
    try:
        yield request
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
