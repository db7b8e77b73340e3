"""Python programs that tests run in processes of their own, and what a process may write."""

import contextlib
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_python(*arguments, devices=None, environment=None, cwd=ROOT, timeout=None, read=None):
    """Run Python until it ends well; return what it has said.

    Args:
        devices: Number of devices of its CPU; None is as many as here.
        environment: Variables that differ from those here.
        read: The text that it reads from stdin.
    """
    changed = dict(environment or {})
    if devices is not None:
        flags = f"--xla_force_host_platform_device_count={devices}"
        changed |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {flags}"}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=os.environ | changed,
        timeout=timeout,
        input=read,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@contextlib.contextmanager
def largest_file(size):
    """Let the system refuse to make a larger file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def free_port():
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


class TwoPrograms:
    """Two Python programs with a log each; killed at the end, whatever happens."""

    def __init__(self, directory, code, arguments, environment):
        """Start them; `arguments` and `environment` are functions of the index of a program."""
        self.logs = [directory / f"{index}.log" for index in range(2)]
        self.processes = []
        for index, log in enumerate(self.logs):
            with log.open("wb") as file:
                started = subprocess.Popen(
                    [sys.executable, "-c", code, *map(str, arguments(index))],
                    cwd=ROOT,
                    env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment(index),
                    stdout=file,
                    stderr=file,
                )
            self.processes.append(started)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()

    def text(self, index):
        return self.logs[index].read_text(errors="replace")
