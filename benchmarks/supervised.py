"""Kill train.py every 30 seconds and start it again: python -m benchmarks.supervised --minutes 10.

A supervisor, as a cluster has one, starts the program with --resume whenever it has died. When the
minutes are over the run is left alone, and has to end with the bits of one that was never killed.
"""

import dataclasses
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.kill_resume import ROOT, losses, state_digest
from jax_transformer.runs.checkpoints import steps_in
from jax_transformer.runs.metrics import METRICS_FILE, read_metrics
from jax_transformer.storage.folder import CHECKPOINTS


@dataclasses.dataclass
class Supervision:
    """What became of the run.

    Attributes:
        kills: Processes killed.
        starts: Processes started, the last one among them, which came to its end.
        seconds: From the first start to the end.
        steps_lost: Steps in the log that no checkpoint had, for each kill.
    """

    kills: int = 0
    starts: int = 0
    seconds: float = 0.0
    steps_lost: list[int] = dataclasses.field(default_factory=list)


def start(output: Path, steps: int, interval: int) -> subprocess.Popen:
    """Start train.py on the number words, or go on with the run that is there."""
    if steps_in(output / CHECKPOINTS):
        options = ["--resume"]
    else:  # the first start, or one after a run that died before it had saved anything
        options = ["--steps", str(steps), "--evaluation-interval", str(interval)]
    command = [sys.executable, "train.py", "--output", str(output), *options]
    with (output.parent / f"{output.name}.log").open("ab") as log:
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)


def supervise(
    output: Path, steps: int, interval: int, seconds: float, kill_every: float
) -> Supervision:
    """Train to the end, with a kill every so often until the time is over.

    Args:
        output: Directory of the run; not there yet.
        steps: Length of the run.
        interval: Steps between two checkpoints.
        seconds: For how long there are kills; 0 trains without.
        kill_every: Seconds between the start of a process and its end.

    Raises:
        CalledProcessError: A process ended by itself, and with an error.
    """
    supervision, started = Supervision(), time.monotonic()
    while True:
        process = start(output, steps, interval)
        supervision.starts += 1
        killing = time.monotonic() - started < seconds
        try:
            code = process.wait(timeout=kill_every if killing else None)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            supervision.kills += 1
            supervision.steps_lost.append(_steps_lost(output))
            continue
        if code:
            log = (output.parent / f"{output.name}.log").read_text(errors="replace")
            raise subprocess.CalledProcessError(code, "train.py", log[-2000:])
        supervision.seconds = time.monotonic() - started
        return supervision


def _steps_lost(output: Path) -> int:
    metrics = output / METRICS_FILE
    logged = [report["step"] for report in read_metrics(metrics)] if metrics.exists() else []
    return max(logged, default=0) - max(steps_in(output / CHECKPOINTS), default=0)


def show(killed: Supervision, unbroken: Supervision, same: bool) -> Table:
    """Return what was measured as a table."""
    table = Table("measured", "number", title=f"{killed.kills} kills in {killed.seconds:.0f} s")
    rows = {
        "processes started": killed.starts,
        "most steps lost by a kill": max(killed.steps_lost, default=0),
        "run without kills": f"{unbroken.seconds:.0f} s",
        "goodput, its share of the killed run's time": f"{unbroken.seconds / killed.seconds:.0%}",
        "same state and log as without kills": "yes" if same else "NO",
    }
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table


def main(
    minutes: float = 10, kill_every: float = 30, steps: int = 12_000, interval: int = 100
) -> None:
    """Train with kills and without, compare, print the table; leave with 1 where they differ.

    Args:
        minutes: For how long processes are killed.
        kill_every: Seconds that a process is given.
        steps: Steps of the run; enough for it not to end before the minutes have.
        interval: Steps between two checkpoints.
    """
    with tempfile.TemporaryDirectory() as directory:
        runs = [Path(directory) / name for name in ("killed", "unbroken")]
        killed = supervise(runs[0], steps, interval, 60 * minutes, kill_every)
        unbroken = supervise(runs[1], steps, interval, 0, kill_every)
        digests = {state_digest(run, steps) for run in runs}
        same = len(digests) == 1 and losses(runs[0]) == losses(runs[1])
    Console().print(show(killed, unbroken, same))
    if not same or killed.kills == 0:
        sys.exit(1)


if __name__ == "__main__":
    tyro.cli(main)
