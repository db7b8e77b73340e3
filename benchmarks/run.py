"""Time whole training commands of two commits: python -m benchmarks.run OLD NEW --source F ...

The arguments after the commits are those of train.py. Each round runs both programs, each from its
own files on a core of its own, and the next round exchanges the cores. Needs git, and Linux
(sched_setaffinity).
"""

import dataclasses
import io
import os
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.systems import processor, spread
from jax_transformer.runs.metrics import METRICS_FILE, read_metrics

ROOT = Path(__file__).parent.parent


@dataclasses.dataclass
class Comparison:
    """What is compared.

    Attributes:
        old: A commit.
        new: Another commit.
        rounds: How often each is run.
    """

    old: tyro.conf.Positional[str]
    new: tyro.conf.Positional[str]
    rounds: int = 2


class Training(NamedTuple):
    """What a training command took.

    Attributes:
        tokens_per_second: Target tokens, the median of its reports but the first.
        seconds: From the start of the process to its end.
        user: Seconds of processor time in the program.
        system: Seconds of processor time in the operating system.
        faults: Minor page faults, in thousands.
        megabytes: Peak memory.
    """

    tokens_per_second: float
    seconds: float
    user: float
    system: float
    faults: float
    megabytes: float


def start(folder: Path, output: Path, arguments: list[str], core: int) -> subprocess.Popen:
    """Start train.py of one commit, without compilations that an earlier start has kept."""
    with log_of(output).open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "train.py", "--output", str(output), *arguments],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(folder), "XDG_CACHE_HOME": f"{output}.cache"},
            stdout=log,
            stderr=log,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )


def log_of(output: Path) -> Path:
    """Return the file that has what the training of an output printed."""
    return output.with_name(f"{output.name}.log")


def measured(output: Path, seconds: float, usage: resource.struct_rusage) -> Training:
    """Return what the training took that wrote an output."""
    reports = read_metrics(output / METRICS_FILE)
    speeds = [report["tokens_per_second"] for report in reports if "tokens_per_second" in report]
    return Training(
        median(speeds[1:]),
        seconds,
        usage.ru_utime,
        usage.ru_stime,
        usage.ru_minflt / 1000,
        usage.ru_maxrss / 1000,
    )


def extract(commit: str, folder: Path) -> Path:
    """Write the files of a commit into a folder; return it."""
    command = ["git", "archive", commit]
    archive = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    return folder


def run_both(
    folders: dict[str, Path], outputs: dict[str, Path], cores: list[int], arguments: list[str]
) -> dict[str, Training]:
    """Run the training of both commits side by side, each on its core.

    Raises:
        CalledProcessError: One ended with an error.
    """
    begun, results = time.monotonic(), {}
    processes = {
        start(folder, outputs[commit], arguments, core).pid: commit
        for (commit, folder), core in zip(folders.items(), cores, strict=True)
    }
    while len(results) < len(processes):
        process, status, usage = os.wait4(-1, 0)
        commit = processes[process]
        if status:
            log = log_of(outputs[commit]).read_text(errors="replace")
            raise subprocess.CalledProcessError(status, f"train.py of {commit}", log[-2000:])
        results[commit] = measured(outputs[commit], time.monotonic() - begun, usage)
    return results


def show(old: str, new: str, rounds: list[dict[str, Training]]) -> Table:
    """Return a table of both commits, and of the ratios in each round."""
    table = Table("", old, new, "new / old", title=processor())
    for field in Training._fields:
        values = {
            commit: np.array([getattr(results[commit], field) for results in rounds])
            for commit in (old, new)
        }
        medians = [f"{np.median(column):,.0f}" for column in values.values()]
        table.add_row(field.replace("_", " "), *medians, spread(values[new] / values[old]))
    return table


def main(comparison: Comparison, arguments: list[str]) -> None:
    """Run the trainings of two commits and print what they took."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        commits = comparison.old, comparison.new
        folders = {commit: extract(commit, folder / commit) for commit in commits}
        rounds = []
        for number in track(range(comparison.rounds), "rounds"):
            outputs = {commit: folder / f"{commit}-{number}" for commit in commits}
            rounds.append(run_both(folders, outputs, cores[:: (-1) ** number], arguments))
    Console().print(show(*commits, rounds))


if __name__ == "__main__":
    main(*tyro.cli(Comparison, return_unknown_args=True))
