"""Ctrl-C outside of the steps of a training: one line, exit code 130, at any moment."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

from jax_transformer.training.run.signals import received_signals

EXIT_CODE = 128 + signal.SIGINT
GRACE = 5.0  # seconds in which half-written files can be removed


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C end the program, wherever it is; a second one ends it at once.

    The first one raises KeyboardInterrupt, so that half-written files are removed. Python delays
    this exception until compiled code returns, and drops it in some callbacks. The process
    therefore ends without it after `GRACE` seconds. After the exception a further Ctrl-C ends the
    process by the signal.

    Where SIGINT is ignored, as in the background of a shell, or has another handler, nothing
    changes.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    timer = threading.Timer(GRACE, os._exit, (EXIT_CODE,))
    timer.daemon = True
    received = 0

    def end_soon(number: int) -> None:
        nonlocal received
        if number != signal.SIGINT:
            return
        received += 1
        if received > 1:
            os._exit(EXIT_CODE)
        timer.start()

    with received_signals(end_soon):
        try:
            yield
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            raise
        finally:
            timer.cancel()
