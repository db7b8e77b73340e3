"""Systems that are timed in turn, each in a process of its own.

In one process the thread pools and allocations of one system would be there while another is
timed.
"""

import time
from collections.abc import Callable, Mapping
from multiprocessing import Pipe, active_children, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from jaxtyping import Float

from jax_transformer.text.text_files import decode_lines, open_text

System = Callable[..., Any]  # of a task, the work that is timed


def start(loaders: Mapping[str, Callable[..., System]], *arguments: Any) -> dict[str, Connection]:
    """Return, by name, the connection to a process that serves each system.

    Args:
        loaders: Functions of a module that return a system.
        arguments: What they are called with.
    """
    connections = {}
    for name, load in loaders.items():
        connections[name], theirs = Pipe()
        process = get_context("spawn").Process(
            target=_serve, args=(load, arguments, theirs), daemon=True
        )
        process.start()
        theirs.close()  # so that a process that dies is noticed here
    return connections


def _serve(load: Callable[..., System], arguments: tuple, connection: Connection) -> None:
    """Load a system, then answer each task by its result and the seconds it took."""
    run = load(*arguments)
    while (task := connection.recv()) is not None:
        run(*task)  # a discarded call right before each timed one
        begun = time.perf_counter()
        result = run(*task)
        connection.send((result, time.perf_counter() - begun))


def time_in_turn(
    systems: Mapping[str, Connection], task: tuple, rounds: int
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Return each system's last result, and its seconds in each round, A B C A B C."""
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    results: dict[str, Any] = {}
    for _ in range(rounds):
        for name, connection in systems.items():
            connection.send(task)
            results[name], taken = connection.recv()
            seconds[name].append(taken)
    return results, seconds


def stop(systems: Mapping[str, Connection]) -> None:
    """End the processes, and with them their hold on a device."""
    for connection in systems.values():
        connection.send(None)
    for process in active_children():
        process.join()


def spread(ratios: Float[np.ndarray, " rounds"]) -> str:
    """Return the least, the median and the most of some ratios."""
    return f"{min(ratios):.2f} - {median(ratios):.2f} - {max(ratios):.2f}"


def processor() -> str:
    """Return the name of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.split(": ")[1] for line in lines if line.startswith("model name"))


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file."""
    with open_text(path) as file:
        return list(decode_lines(file, str(path)))
