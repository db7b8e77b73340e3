"""The log of a run: a line of JSON for each report, and events for TensorBoard.

Each line is an object with "step" and some of these values: "loss", "learning_rate",
"tokens_per_second" and "rejected", the steps since the last report that left the parameters
unchanged; "validation_loss" and "validation_bleu".
"""

import contextlib
import json
from pathlib import Path
from typing import Any

from jax_transformer.storage.reading import MAX_RECORDS, errors_naming, read_bytes
from jax_transformer.storage.writing import replace_file

METRICS_FILE = "metrics.jsonl"
EVENTS = "tensorboard"


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
            from tensorboardX import SummaryWriter

            self._events = SummaryWriter(str(directory / EVENTS), purge_step=step + 1)
        path = directory / METRICS_FILE
        reports, whole = _read(path)
        kept = [entry for entry in reports if entry["step"] <= step]
        # The last step of a checkpoint was reported before the checkpoint was written.
        self.is_damaged = not whole or (step > 0 and all(entry["step"] != step for entry in kept))
        replace_file(path, "".join(map(_line, kept)).encode())
        self._path, self._file = path, path.open("a", encoding="utf-8")

    def write(self, step: int, **values: float | int) -> None:
        """Append one report; the file has it when this returns."""
        if self._file is not None:
            with errors_naming(self._path, "cannot be written", OSError):
                self._file.write(_line({"step": step} | values))
                self._file.flush()
        if self._events is not None:
            for name, value in values.items():
                self._events.add_scalar(name, value, step)

    def close(self) -> None:
        """Close the files."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # `write` has raised it already
                self._file.close()
        if self._events is not None:
            self._events.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the reports of a file, the oldest first; lines that cannot be read are left out."""
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
