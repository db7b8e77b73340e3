"""A long translation that is killed again and again: python -m benchmarks.streaming MODEL INPUT.

First `jax-transformer translate` runs without a break, and its memory is read from /proc while it
runs. Then the same command is killed by SIGKILL at random moments and resumed. Both outputs must
have the same bytes. Linux only.
"""

import hashlib
import itertools
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tyro
from rich.console import Console

from benchmarks.systems import processor, read_lines

PAGE = 4096  # bytes


class Sample(NamedTuple):
    """The memory of a process at one moment.

    Attributes:
        lines: Input lines whose translations were on the disk.
        resident: Resident memory in bytes.
    """

    lines: int
    resident: int


def write_input(path: Path, lines: list[str], count: int) -> None:
    """Write `count` lines: the given ones, again and again, each time in another order."""
    random = np.random.default_rng(0)
    with path.open("w", encoding="utf-8") as file:
        for start in range(0, count, len(lines)):
            order = random.permutation(len(lines))[: count - start]
            file.writelines(f"{lines[index]}\n" for index in order)


def command(model: Path, source: Path, output: Path, options: list[str]) -> list[str]:
    """Return the command that translates a file and resumes where there is something to resume."""
    program = [sys.executable, "-m", "jax_transformer.commands.main", "translate", str(model)]
    return [*program, f"--input={source}", f"--output={output}", "--resume", *options]


def lines_done(output: Path) -> int:
    """Return the number of lines whose translations are on the disk."""
    try:
        return json.loads(output.with_name(output.name + ".part.json").read_text())["lines"]
    except FileNotFoundError:
        return 0


def watched(process: subprocess.Popen, output: Path) -> Iterator[Sample]:
    """Yield the memory of a process a few times a second until it ends."""
    while process.poll() is None:
        pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
        yield Sample(lines_done(output), pages * PAGE)
        time.sleep(0.2)


def run_unbroken(arguments: list[str], output: Path) -> tuple[list[Sample], float]:
    """Return the memory of a run without kills, and its seconds."""
    started = time.monotonic()
    process = subprocess.Popen(arguments)
    samples = list(watched(process, output))
    if process.wait():
        raise RuntimeError(f"the command failed with exit code {process.returncode}")
    return samples, time.monotonic() - started


def run_killed(arguments: list[str], seconds: float, kills: int) -> int:
    """Kill the command `kills` times at random moments of `seconds`; return how often it started.

    A process that is killed has worked for at least one share of `seconds`, so that all moments
    of the translation are hit.
    """
    random = np.random.default_rng(0)
    for start in itertools.count(1):
        process = subprocess.Popen(arguments, stderr=subprocess.DEVNULL)
        try:
            wait = random.uniform(0.3, 1.3) * seconds / (kills + 1) if start <= kills else None
            process.wait(wait)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            continue
        if process.returncode:
            raise RuntimeError(f"the command failed with exit code {process.returncode}")
        return start
    raise AssertionError("unreachable")


def memory_at(samples: list[Sample], lines: float) -> int:
    """Return the largest memory until `lines` lines were on the disk, in bytes."""
    return max(sample.resident for sample in samples if sample.lines <= lines)


def sha256(path: Path) -> str:
    """Return the sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(
    model: tyro.conf.Positional[Path],
    source: tyro.conf.Positional[Path],
    /,
    lines: int = 1_000_000,
    kills: int = 10,
    beam: int = 1,
    max_tokens: int = 4096,
    window: int = 8192,
) -> None:
    """Translate a long input without and with kills; print memory, speed and digests.

    Args:
        model: Folder of a trained model.
        source: Text whose lines are repeated.
        lines: Lines of the input.
        kills: How often the second run is killed.
        beam: Hypotheses that beam search keeps.
        max_tokens: As for `jax-transformer translate`.
        window: As for `jax-transformer translate`.
    """
    options = [f"--beam={beam}", f"--max-tokens={max_tokens}", f"--window={window}"]
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_input(folder / "input", read_lines(source), lines)
        outputs = [folder / "unbroken", folder / "killed"]
        commands = [command(model, folder / "input", output, options) for output in outputs]
        samples, seconds = run_unbroken(commands[0], outputs[0])
        early, late = (memory_at(samples, share * lines) for share in (0.1, 1.0))
        console.print(
            f"{lines:,} lines in {seconds:.0f} s, {lines / seconds:,.0f} lines/s. Largest memory: "
            f"{early / 1e6:.0f} MB until 10 % of the input, {late / 1e6:.0f} MB until 100 %, "
            f"{late / early - 1:+.1%}."
        )
        starts = run_killed(commands[1], seconds, kills)
        digests = [sha256(output) for output in outputs]
        same = "the same bytes" if len({*digests}) == 1 else "OTHER BYTES"
        console.print(f"{starts - 1} kills by SIGKILL, {starts} starts: {same}.")
        console.print(*digests, sep="\n")
        console.print(f"{' '.join(options)}; {processor()}.")


if __name__ == "__main__":
    tyro.cli(main)
