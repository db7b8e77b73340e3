"""Draw tries, have them run by a process for each kind, count what became of them, keep faults."""

import collections
import dataclasses
import json
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.attack.outcomes import Outcome, Result
from benchmarks.attack.worker import KINDS, serve

WEIGHTS = {  # of the draw of a kind
    **{"files": 8, "settings": 5, "texts": 3, "calls": 4, "kills": 2},
    "surroundings": 3,
}
SECONDS = {"files": 30, "settings": 30, "texts": 60, "calls": 60, "kills": 90}  # then it hangs
SECONDS_OF_OTHERS = 60
MOST_GROWTH = 300 * 2**20  # bytes of a try
READY_SECONDS = 300  # for the preparation of a try, which may make a model first
LIFETIME = 400  # tries of a process; then a fresh one, because compiled programs stay in memory
KEPT = 3  # tries of one fault that are kept


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a try may take.

    Attributes:
        growth: Bytes by which the memory may grow.
        seconds: Seconds after which a try hangs, by kind.
    """

    growth: int = MOST_GROWTH
    seconds: Mapping[str, float] = dataclasses.field(default_factory=lambda: dict(SECONDS))


class Worker:
    """A process that runs tries of one kind; a new one after a hang or a crash."""

    def __init__(self, kind: str, module: str, stock: Path, quick: bool) -> None:
        self._arguments = (kind, module, stock, quick)
        self._process: Any = None
        self._connection: Connection | None = None
        self._tries = 0

    def run(self, seed: int, folder: Path, limits: Limits) -> Result:
        """Run a try in a new folder; return what became of it."""
        kind = self._arguments[0]
        if self._process is None or self._tries >= LIFETIME:
            self._start()
        self._tries += 1
        seconds = limits.seconds.get(kind, SECONDS_OF_OTHERS)
        self._connection.send((seed, folder, seconds))
        what = self._receive(READY_SECONDS)
        if not isinstance(what, str):
            death = self._death(folder)  # a fault of the attack, and not of the library
            return Result(kind, seed, "", Outcome.UNPREPARED, death, _first_frame(death))
        started = time.monotonic()
        result = self._receive(seconds + 1)
        if isinstance(result, Result):
            if result.growth > limits.growth and not result.outcome.is_fault:
                result.outcome, result.cause = Outcome.MEMORY, what.split(";")[0]
            return result
        hangs = self._process.is_alive() and self._process.exitcode is None
        death = self._death(folder)
        outcome = Outcome.HANG if hangs else Outcome.CRASH
        result = Result(kind, seed, what, outcome, death, _first_frame(death))
        result.seconds = time.monotonic() - started
        return result

    def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
            self._process = None

    def _start(self) -> None:
        self.stop()
        context = get_context("forkserver")  # each start is a fork of a process that has imported
        context.set_forkserver_preload([*KINDS.values()])
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, *self._arguments), daemon=False)
        self._process.start()
        theirs.close()
        self._tries = 0

    def _receive(self, seconds: float) -> Any:
        """Return what the process sends, None if it sends nothing or ends."""
        try:
            return self._connection.recv() if self._connection.poll(seconds) else None
        except (EOFError, ConnectionResetError):
            self._process.join(5)
            return None

    def _death(self, folder: Path) -> str:
        """End the process; return how it ended and the stack that it has left."""
        code = self._process.exitcode
        self.stop()
        log = folder.with_suffix(".stack")
        stack = log.read_text(errors="replace") if log.exists() else ""
        how = "it was still running"
        if code is not None:
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{how}\n{stack[-6000:]}"


def _first_frame(stack: str) -> str:
    """Return the innermost line of the library in a stack of faulthandler."""
    lines = [line.strip() for line in stack.splitlines() if "jax_transformer/" in line]
    return lines[0] if lines else "outside the library"


class Survey:
    """What became of all tries; the folder `keep` gets those that are faults."""

    def __init__(self, keep: Path) -> None:
        self.keep = keep
        self.outcomes: dict[str, collections.Counter[Outcome]] = {
            kind: collections.Counter() for kind in KINDS
        }
        self.slowest: dict[str, Result] = {}
        self.largest: dict[str, Result] = {}
        self.faults: dict[tuple[str, str, str], list[Result]] = {}

    def add(self, result: Result, folder: Path) -> None:
        """Count a result; keep its folder if it is one of the first of a fault."""
        kind = result.kind
        self.outcomes.setdefault(kind, collections.Counter())[result.outcome] += 1
        if kind not in self.slowest or result.seconds > self.slowest[kind].seconds:
            self.slowest[kind] = result
        if kind not in self.largest or result.growth > self.largest[kind].growth:
            self.largest[kind] = result
        if not result.outcome.is_fault:
            return
        same = self.faults.setdefault((kind, result.outcome, result.cause), [])
        same.append(result)
        if len(same) <= KEPT:
            self._keep(result, folder)

    @property
    def tries(self) -> int:
        """Number of tries."""
        return sum(sum(counts.values()) for counts in self.outcomes.values())

    def _keep(self, result: Result, folder: Path) -> None:
        place = self.keep / f"{result.kind}-{result.seed}"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        described = dataclasses.asdict(result) | {"repeat": repeat_line(result)}
        (place / "result.json").write_text(json.dumps(described, indent=2) + "\n")
        (place / "detail.txt").write_text(
            f"{repeat_line(result)}\n{result.what}\n{result.detail}\n"
        )
        if folder.is_dir():
            folder.rename(place / "input")


def repeat_line(result: Result) -> str:
    """Return the command that repeats a try."""
    return f"python -m benchmarks.attack --only {result.kind}:{result.seed}"


def draws(seed: int, kinds: Mapping[str, float]) -> Iterator[tuple[str, int]]:
    """Yield the kind and the seed of each try, without end."""
    draw = np.random.default_rng(seed)
    names, weights = list(kinds), np.array(list(kinds.values()), float)
    while True:
        kind = names[draw.choice(len(names), p=weights / weights.sum())]
        yield kind, int(draw.integers(2**32))


def attack(
    tries: Iterator[tuple[str, int]],
    survey: Survey,
    scratch: Path,
    *,
    until: float = float("inf"),
    quick: bool = False,
    limits: Limits | None = None,
    modules: Mapping[str, str] = KINDS,
) -> None:
    """Run tries one after the other, until they or the time are over.

    Args:
        tries: Kind and seed of each.
        scratch: An empty folder.
        until: When to stop, by `time.monotonic`.
        quick: As for `serve`.
    """
    workers = {kind: Worker(kind, name, scratch / "stock", quick) for kind, name in modules.items()}
    try:
        for number, (kind, seed) in enumerate(tries):
            if time.monotonic() > until:
                return
            folder = scratch / f"try{number}"
            survey.add(workers[kind].run(seed, folder, limits or Limits()), folder)
            shutil.rmtree(folder, ignore_errors=True)
            folder.with_suffix(".stack").unlink(missing_ok=True)
    finally:
        for worker in workers.values():
            worker.stop()
