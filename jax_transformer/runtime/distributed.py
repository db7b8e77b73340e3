"""Several processes, one on each host, that train one model together with `jax.distributed`.

All of them run the same program. Process 0, the main process, prints and writes for all.
"""

import contextlib
import hashlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Annotated, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Bool
from msgspec import Meta

from jax_transformer.config import LARGEST
from jax_transformer.config.declared import checked
from jax_transformer.errors import InputError

GRACE = 5  # seconds by which the watchdog, with its one line, is earlier than JAX, which aborts
LAUNCHERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")  # the variable holds a step's tasks
TPU_HOSTS = "TPU_WORKER_HOSTNAMES"  # separated by commas
# Words in the errors that JAX raises when the process it communicates with has ended.
LOST = ("gloo", "nccl", "connection", "unavailable", "deadline_exceeded", "heartbeat")


class Watchdog:
    """Ends the process with one line and exit code 1 if `alive` is not called for some time.

    A main thread that waits for a device or for another process runs no Python, so a thread of this
    context ends the process. None seconds watch nothing.
    """

    def __init__(self, seconds: float | None, message: str) -> None:
        self._seconds, self._message = seconds, message
        self._deadline = float("inf")
        self._ended = threading.Event()

    def __enter__(self) -> "Watchdog":
        self.alive()
        if self._seconds is not None:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def alive(self) -> None:
        """Restart the time."""
        if self._seconds is not None:
            self._deadline = time.monotonic() + self._seconds

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend the limit during work of unknown length; then restart the time."""
        self._deadline = float("inf")
        try:
            yield
        finally:
            self.alive()

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self._seconds / 10)):
            if time.monotonic() > self._deadline:
                # Without Python's buffers and its exit, which may both wait for the main thread.
                os.write(sys.__stderr__.fileno(), f"{self._message}\n".encode())
                os._exit(1)


def initialize(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    *,
    start_timeout: int = 300,
    lost_after: int = 120,
) -> None:
    """Join the processes of a run, before JAX uses a device. A single process does nothing.

    `jax.distributed.initialize` aborts the process with a stack trace when it fails, so this
    function checks first what can be checked. If the first three are None and Slurm, Open MPI or a
    TPU slice has started several tasks, JAX finds the values.

    Args:
        coordinator: host:port of process 0; the port must be free there.
        process_id: Number of this process, from 0.
        start_timeout: Seconds within which all processes must have joined.
        lost_after: Seconds of silence after which a process counts as lost.
    """
    named = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    detection = None  # JAX's own, of what a cluster says
    # JAX hands these numbers on as int32.
    checked("lost_after", lost_after, Annotated[int, Meta(ge=1, le=LARGEST)])
    missing = [name for name, value in named.items() if value is None]
    if len(missing) == len(named):
        if not _launched_together():
            return
        where = "as the cluster says"
    elif missing:
        raise InputError(f"{missing[0]}=None: name all of {', '.join(named)}, or none")
    else:
        host, port = _checked_address(coordinator)
        checked("num_processes", num_processes, Annotated[int, Meta(ge=1, le=LARGEST)])
        checked("process_id", process_id, Annotated[int, Meta(ge=0, le=num_processes - 1)])
        if num_processes == 1:
            return
        if process_id == 0:
            _check_is_here(host, port)
        where = f"at coordinator={coordinator}"
        # Named processes do not use what JAX detects of a cluster, not even its devices.
        detection = "deactivate"

    # The handler of SIGTERM of this service would replace Python's handler.
    jax.config.update("jax_enable_preemption_service", False)
    message = (
        f"error: not all processes have come together {where} within {start_timeout} s; start "
        "each once, all with the same num_processes"
    )
    with Watchdog(float(start_timeout), message):
        try:
            jax.distributed.initialize(
                coordinator,
                num_processes,
                process_id,
                cluster_detection_method=detection,
                initialization_timeout=start_timeout + GRACE,
                heartbeat_timeout_seconds=lost_after + GRACE,
                # At the end the others wait for what process 0 still writes; heartbeats continue.
                shutdown_timeout_seconds=24 * 60 * 60,
            )
        except (ValueError, RuntimeError) as error:
            line = " ".join(str(error).split())
            names = "coordinator, num_processes and process_id"
            raise InputError(
                f"the processes cannot be joined {where} ({line}); name {names}"
            ) from error
        jax.devices()  # here the processes exchange the lists of their devices


def is_main() -> bool:
    """Return whether this process prints and writes: the only process, or process 0."""
    return _alone() or jax.process_index() == 0


def check_agreement(facts: dict[str, str]) -> None:
    """Refuse to continue, on every process, if their facts, values by name, differ."""
    if _alone():
        return
    # Names first: processes that gather arrays of different shapes would wait forever.
    if _differing(["\n".join(facts)]).any():
        raise InputError("the processes run different versions of the library; use one")
    differences = [
        f"{name} on process {', '.join(map(str, np.flatnonzero(column)))}"
        for name, column in zip(facts, _differing([*facts.values()]).T, strict=True)
        if column.any()
    ]
    if differences:
        raise InputError(
            f"not the same as on process 0: {'; '.join(differences)}; start all processes with the "
            "same settings, files and version"
        )


def _differing(values: list[str]) -> Bool[np.ndarray, "processes values"]:
    """Return which values of each process differ from those of process 0."""
    digests = b"".join(hashlib.sha256(value.encode()).digest() for value in values)
    local = np.frombuffer(digests, np.uint8).reshape(len(values), -1)
    gathered = multihost_utils.process_allgather(local)  # [processes, values, 32]
    return np.any(gathered != gathered[0], axis=2)


def agreed_signal(received: signal.Signals | None) -> signal.Signals | None:
    """Return the signal that any process has received; all call this after the same step."""
    if _alone():
        return received
    numbers = multihost_utils.process_allgather(np.int32(received or 0))
    return signal.Signals(int(numbers.max())) if numbers.any() else None


def to_host(array: jax.Array | np.ndarray | np.generic) -> np.ndarray:
    """Return a copy of the whole array; all processes call this if it is spread over them."""
    is_local = not isinstance(array, jax.Array) or (
        array.is_fully_addressable or array.is_fully_replicated
    )
    return np.array(array if is_local else multihost_utils.process_allgather(array, tiled=True))


def from_main(content: bytes | None) -> bytes:
    """Return the content, at most 2 GiB, of the main process, on every process, bit for bit."""
    if _alone():
        return content
    size = multihost_utils.broadcast_one_to_all(np.int32(len(content) if is_main() else 0))
    array = np.frombuffer(content, np.uint8) if is_main() else np.zeros(int(size), np.uint8)
    return multihost_utils.broadcast_one_to_all(array).tobytes()


def any_process(flag: bool) -> bool:
    """Return whether the flag is True on any of the processes; all of them must call this."""
    if _alone():
        return flag
    return bool(multihost_utils.process_allgather(np.int32(flag)).any())


def step_watchdog(lost_after: int) -> Watchdog:
    """Return the watchdog of a run's steps; in a single process it watches nothing."""
    if _alone():
        return Watchdog(None, "")
    return Watchdog(
        float(lost_after),
        f"error: {_name()} has seen no step end for {lost_after} s: another process hangs or "
        "is lost; end the remaining processes and start all again with --resume, or raise "
        "--lost-after if a step takes so long",
    )


def fail(error: Exception) -> NoReturn:
    """End the program with an error: an `InputError` as one line, and exit code 1."""
    if _alone():
        if isinstance(error, InputError):
            sys.exit(f"error: {error}")
        raise error
    # One of several processes ends at once: Python's exit would wait for the others.
    message = " ".join(str(error).split())[:300]
    if isinstance(error, InputError):
        line = f"error: {_name()}: {message}"
    elif any(word in message.lower() for word in LOST):
        remedy = "read its output, and start all again with --resume"
        line = f"error: {_name()} has lost another process ({message}); {remedy}"
    else:
        traceback.print_exception(error)
        line = f"error: {_name()} has failed; the others end as well"
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        print(line, file=sys.stderr, flush=True)
    os._exit(1)


def _alone() -> bool:
    return not jax.distributed.is_initialized()


def _name() -> str:
    return f"process {jax.process_index()} of {jax.process_count()}"


def _launched_together() -> bool:
    tasks = [os.environ.get(name, "1") for name in LAUNCHERS]
    several_tasks = any(number.isdecimal() and int(number) > 1 for number in tasks)
    return several_tasks or "," in os.environ.get(TPU_HOSTS, "")


def _checked_address(coordinator: str) -> tuple[str, int]:
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise InputError(
            f"coordinator={coordinator!r} must be host:port, with a port from 1 to {2**16 - 1}"
        )
    return host.strip("[]"), int(port)


def _check_is_here(host: str, port: int) -> None:
    """Refuse a port that is in use, and an address that does not lead to this process."""
    try:
        listener = socket.create_server(("", port))
    except OSError as error:
        raise InputError(
            f"coordinator={host}:{port}: the port cannot be used ({error.strerror}); name another"
        ) from error
    with listener:
        try:
            socket.create_connection((host, port), timeout=10).close()
        except OSError as error:
            raise InputError(
                f"coordinator={host}:{port} does not lead to process 0 ({error}); name its host"
            ) from error
