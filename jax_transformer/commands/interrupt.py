"""Ctrl-C outside of the steps of a training: one line, exit code 130, at any moment."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from jax_transformer.runs.signals import received_signals

EXIT_CODE = 128 + signal.SIGINT


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C end the process at once, with one line and exit code 130.

    Python's KeyboardInterrupt is not enough: jaxlib drops it in a callback and makes an ImportError
    of it while its modules start, and compiled code delays it. What is being written must survive
    a kill at any moment anyway; the next call removes what is half written.

    Where SIGINT is ignored, as in the background of a shell, or has another handler than Python's
    own, nothing changes.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    with received_signals(_leave):
        before = signal.signal(signal.SIGINT, _wait)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def _leave(number: int) -> None:
    if number == signal.SIGINT:
        with contextlib.suppress(OSError):
            os.write(2, b"interrupted\n")  # not by sys.stderr, whose lock may be held
        os._exit(EXIT_CODE)


def _wait(number: int, frame: FrameType | None) -> None:
    """Do nothing, in the main thread, while `_leave` ends the process from another one."""
