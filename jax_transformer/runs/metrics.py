"""The reports of a run: shown on the console, and kept in a log of JSON and for TensorBoard.

Each line of the log is an object with "step" and some of these values: "loss", "learning_rate",
"tokens_per_second" and "rejected", the steps since the last report that left the parameters
unchanged; "examples_" and a task, of a mixed corpus: those since the last report; "validation_loss"
and "validation_bleu".
"""

import contextlib
import json
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console

from jax_transformer.storage.reading import MAX_RECORDS, errors_naming, read_bytes
from jax_transformer.storage.writing import replace_file
from jax_transformer.training.step import Metrics

METRICS_FILE = "metrics.jsonl"
EVENTS = "tensorboard"
SHORTEST = 1e-6  # seconds that some steps take at least, where the clock does not move on
LONGEST = 10**9  # seconds that are shown as left at most
SECONDS_PER_LINE = 10  # between two lines of progress, where there is no terminal


class MetricsLog:
    """Writes metrics.jsonl, and beside it, if wanted, a folder that TensorBoard reads.

    A resumed run repeats the steps after its checkpoint, so their lines are dropped first.
    `is_damaged` says whether reports before the checkpoint are missing or cannot be read.
    """

    def __init__(self, directory: Path | None, step: int = 0, tensorboard: bool = False) -> None:
        """Open the log after `step` steps, in a directory that exists; None writes no log."""
        self._events, self._file, self._path = None, None, None
        self.is_damaged = False
        if directory is None:
            return
        if tensorboard:
            self._events = _open_events(directory / EVENTS, step)
        path = directory / METRICS_FILE
        reports, whole = _read(path)
        kept = [entry for entry in reports if entry["step"] <= step]
        # The last step of a checkpoint was reported before the checkpoint was written.
        self.is_damaged = not whole or (step > 0 and all(entry["step"] != step for entry in kept))
        replace_file(path, "".join(map(_line, kept)).encode())
        self._path, self._file = path, path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, float | int]) -> None:
        """Append one report, of values by name; the file has it when this returns."""
        if self._file is not None:
            with errors_naming(self._path, "cannot be written", OSError):
                self._file.write(_line({"step": step, **values}))
                self._file.flush()
        if self._events is not None:
            from tensorboardX.proto.event_pb2 import Event
            from tensorboardX.summary import scalar

            for name, value in values.items():
                event = Event(wall_time=time.time(), step=step, summary=scalar(name, value))
                self._events.write_event(event)
            self._events.flush()

    def close(self) -> None:
        """Close the files."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # `write` has raised it already
                self._file.close()
        if self._events is not None:
            self._events.close()


def _open_events(folder: Path, step: int) -> Any:
    """Return a new file of events, which drops those of later steps in earlier files.

    The writer of tensorboardX without its thread, whose pauses are differences of two times of day:
    it ends where the clock was set back by 25 days, and the run would wait for it. TensorBoard
    reads the files in the order of their names, which begin with their number.
    """
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    folder.mkdir(exist_ok=True)
    writer = EventsWriter(str(folder / f"events.{len([*folder.iterdir()]):06}"))
    restart = SessionLog(status=SessionLog.START)
    writer.write_event(Event(wall_time=time.time(), step=step + 1, session_log=restart))
    return writer


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the reports in `path`, a metrics.jsonl, the oldest first, without unreadable lines."""
    return _read(path)[0]


def _read(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """Return the reports, and whether every line but the last, which a kill cuts off, is one."""
    if not path.exists():
        return [], True
    lines = read_bytes(path, "is no readable log", MAX_RECORDS).split(b"\n")
    reports = [_report(line) for line in lines]
    return [report for report in reports if report is not None], None not in reports[:-1]


def _report(line: bytes) -> dict[str, Any] | None:
    try:
        report = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return report if isinstance(report, dict) and type(report.get("step")) is int else None


def _line(report: dict[str, Any]) -> str:
    return json.dumps(report) + "\n"


class Progress:
    """Shows how far a run is; on leaving the context, one line about the whole run."""

    def __init__(
        self, console: Console, first: int, steps: int, tasks: tuple[str, ...] = ()
    ) -> None:
        """Start after the `first` steps, made before the run was resumed, of all its steps."""
        self._tasks = tasks
        self._console = console
        self._first, self._steps = first, steps
        self._live_line = console.status("")  # which shows nothing where there is no terminal
        self._tokens, self._seconds = 0, 0.0

    def __enter__(self) -> "Progress":
        self._started = self._window_started = self._line_shown = time.monotonic()
        self._live_line.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live_line.stop()
        if self._tokens:
            minutes = max(time.monotonic() - self._started, 0) / 60
            self._console.print(
                f"trained for {minutes:.1f} minutes, at "
                f"{self._tokens / self._seconds:,.0f} target tokens/s between the evaluations"
            )

    def report(self, step: int, metrics: list[Metrics]) -> dict[str, float]:
        """Show the steps since the last report; return their numbers for the log."""
        now = time.monotonic()
        seconds = max(now - self._window_started, SHORTEST)
        tokens = sum(int(each.target_tokens) for each in metrics)
        accepted = [each for each in metrics if each.finite and not each.spike]
        nonfinite = sum(not each.finite for each in metrics)
        rejected = len(metrics) - len(accepted)
        if rejected:
            self._console.print(
                f"step {step:,}: {rejected} of the last {len(metrics)} steps rejected: loss or "
                f"gradient not finite ({nonfinite}), spike of the loss ({rejected - nonfinite})"
            )
        values = {
            "learning_rate": float(metrics[-1].learning_rate),
            "tokens_per_second": tokens / seconds,
            "rejected": rejected,
        }
        counts = zip(*(each.task_counts for each in metrics), strict=True)
        values |= {
            f"examples_{task}": sum(of) for task, of in zip(self._tasks, counts, strict=False)
        }
        shown_loss = "unknown (all steps rejected)"
        if accepted:
            counts = [int(each.target_tokens) for each in accepted]
            losses = map(lambda each, count: float(each.loss) * count, accepted, counts)
            values["loss"] = sum(losses) / max(sum(counts), 1)
            shown_loss = f"{values['loss']:#.4g}"
        seconds_per_step = max(now - self._started, 0) / (step - self._first)
        left = timedelta(seconds=round(min(seconds_per_step * (self._steps - step), LONGEST)))
        line = (
            f"step {step:,}/{self._steps:,}  loss {shown_loss}  learning rate "
            f"{values['learning_rate']:.2e}  {values['tokens_per_second']:,.0f} tokens/s  "
            f"{left} left"
        )
        self._live_line.update(line)
        waits = 0 <= now - self._line_shown < SECONDS_PER_LINE
        if not self._console.is_terminal and not waits:
            self._console.print(line)
            self._line_shown = now
        self._window_started = now
        self._tokens, self._seconds = self._tokens + tokens, self._seconds + seconds
        return values

    def report_validation(self, step: int, losses: dict[str, float]) -> None:
        """Show the mean of the validation losses of all tasks, and each, if there are several."""
        loss, several = sum(losses.values()) / len(losses), len(losses) > 1
        shown = "".join(f", {task} {each:#.4g}" for task, each in losses.items() if several)
        self._console.print(f"step {step:,}: validation loss {loss:#.4g} nats a token{shown}")

    def skip_time(self) -> None:
        """Leave the time since the last report, of an evaluation, out of the speed of the steps."""
        self._window_started = time.monotonic()
