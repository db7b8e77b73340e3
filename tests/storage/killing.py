"""Runs a function in a process that is killed before one of its changes of the disk."""

import os
import signal
import sys
from collections.abc import Callable

CHANGES = {"os.rename", "os.link", "os.symlink", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def killed_before(moment: int, function: Callable[[], object]) -> bool:
    """Run a function in a fork of this process, which is killed before its n-th change of the disk.

    Python tells an audit hook of each change before it is made, whichever function makes it; a call
    of the C library tells it the library and the name of the function.

    Args:
        moment: The change, from 1.
        function: What changes the disk.

    Returns:
        Whether there were that many changes.
    """
    pid = os.fork()
    if pid == 0:
        left = moment

        def kill(event: str, arguments: tuple) -> None:
            nonlocal left
            changes = event in CHANGES or (event == "open" and arguments[2] & WRITING)
            changes = changes or (event == "ctypes.dlsym" and arguments[1] == "renameat2")
            left -= bool(changes)
            if changes and left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(kill)
            function()
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code not in (0, -signal.SIGKILL):
        raise RuntimeError(f"the writer failed by itself, with exit code {code}")
    return code != 0
