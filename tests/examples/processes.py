"""The programs of docs/examples for Ray, as processes of this machine. Linux only."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
WORKER, REPLICA = "ray::MapWorker", "ray::ServeReplica"  # names of Ray's processes


def descendants(ancestor: int, name: str) -> list[int]:
    """Return the processes of a name that a process has started, itself or through others."""
    parents, names = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            process = int(folder.name)
            parents[process] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            names[process] = (folder / "cmdline").read_text()

    def descends(process: int) -> bool:
        return process == ancestor or (process in parents and descends(parents[process]))

    return [process for process in names if names[process].startswith(name) and descends(process)]


def finished(command: list[str], path: str = str(ROOT), **options) -> subprocess.CompletedProcess:
    """Return a program that has ended, and what it has said; it imports from a path."""
    options |= {"env": os.environ | {"PYTHONPATH": path}, "check": False}
    return subprocess.run(command, capture_output=True, text=True, **options)


def translate_command(model: Path, source: Path, output: Path) -> list[str]:
    """Return the command of this library that translates a file."""
    program = [sys.executable, "-m", "jax_transformer.commands.main", "translate", str(model)]
    return [*program, f"--input={source}", f"--output={output}"]


def ray_command(model: Path, source: Path, output: Path, workers: int, lines: int) -> list[str]:
    """Return the command of the example that translates a file."""
    program = [sys.executable, str(EXAMPLES / "ray_translate.py"), str(model)]
    options = [f"--workers={workers}", f"--lines={lines}"]
    return [*program, f"--input={source}", f"--output={output}", *options]
