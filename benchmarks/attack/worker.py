"""A process that runs tries of one kind, and measures the time and the memory of each."""

import faulthandler
import importlib
import os
import resource
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from benchmarks.attack.outcomes import Attempt, Result, judge

GUARD = 6 * 2**30  # bytes of address space beyond those of the start; more is a MemoryError
KINDS = {  # the module of each kind has a function `prepare`
    "files": "benchmarks.attack.files",
    "settings": "benchmarks.attack.settings",
    "texts": "benchmarks.attack.texts",
    "calls": "benchmarks.attack.calls",
    "kills": "benchmarks.attack.kills",
    "surroundings": "benchmarks.attack.surroundings",
}


def memory(name: str) -> int:
    """Return a number of bytes from /proc/self/status, as of VmRSS, VmHWM or VmSize."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise KeyError(name)


def serve(connection: Connection, kind: str, module: str, stock: Path, quick: bool) -> None:
    """Run tries until the connection ends.

    For each (seed, folder, limit) that is received, what is done is sent when the try is ready,
    and its `Result` when it is over. After `limit` seconds the stack is written to the log.

    Args:
        stock: The folder that keeps what is attacked.
        quick: Whether to attack only what is made within a second.
    """
    os.environ |= {"XDG_CACHE_HOME": str(stock / "cache"), "TOKENIZERS_PARALLELISM": "false"}
    stock.mkdir(parents=True, exist_ok=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash leaves no image of the memory
    prepare = importlib.import_module(module).prepare
    guarded = False
    while True:
        try:
            seed, folder, limit = connection.recv()
        except EOFError:
            return
        folder.mkdir(parents=True)
        os.chdir(folder)
        attempt = prepare(np.random.default_rng(seed), folder, stock, quick)
        if not guarded:  # what the first try loads is no part of a try
            size = memory("VmSize") + GUARD
            resource.setrlimit(resource.RLIMIT_AS, (size, size))
            guarded = True
        connection.send(attempt.what)
        with folder.with_suffix(".stack").open("w") as log:
            faulthandler.enable(log)
            faulthandler.dump_traceback_later(limit, file=log)
            result = measure(kind, seed, attempt)
            faulthandler.cancel_dump_traceback_later()
            faulthandler.disable()
        connection.send(result)


def measure(kind: str, seed: int, attempt: Attempt) -> Result:
    """Run an attempt; return what became of it, how long it took and how much memory."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, started = memory("VmRSS"), time.monotonic()
    outcome, detail, cause = judge(attempt)
    seconds, growth = time.monotonic() - started, memory("VmHWM") - before
    return Result(kind, seed, attempt.what, outcome, detail, cause, seconds, growth)
