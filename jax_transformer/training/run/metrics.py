"""The log of a run: a line of JSON for each report, and events for TensorBoard.

Each line is an object with "step" and some of these values: "loss", "learning_rate",
"tokens_per_second" and "rejected", the steps since the last report that left the parameters
unchanged (earlier versions wrote "left_out"); "validation_loss" and "validation_bleu".
"""

import json
from pathlib import Path
from typing import Any

from jax_transformer.storage.reading import MAX_RECORDS, read_bytes
from jax_transformer.storage.writing import replace_file

METRICS_FILE = "metrics.jsonl"
EVENTS = "tensorboard"


class MetricsLog:
    """Writes metrics.jsonl, and beside it, if wanted, a folder that TensorBoard reads.

    A resumed run repeats the steps after its checkpoint: their lines are dropped first, so that
    each step is reported once.
    """

    def __init__(self, directory: Path | None, step: int = 0, tensorboard: bool = False) -> None:
        """Open the log in a directory that exists.

        Args:
            directory: Where the log is written; None writes none.
            step: Steps made so far; lines of later ones are dropped.
            tensorboard: Whether to write events as well.

        Raises:
            ModuleNotFoundError: Events are wanted and tensorboardX is missing.
        """
        self._events, self._file = None, None
        if directory is None:
            return
        if tensorboard:
            from tensorboardX import SummaryWriter

            self._events = SummaryWriter(str(directory / EVENTS), purge_step=step + 1)
        path = directory / METRICS_FILE
        kept = [entry for entry in read_metrics(path) if entry["step"] <= step]
        replace_file(path, "".join(map(_line, kept)).encode())
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, **values: float | int) -> None:
        """Append one report; the file has it when this returns."""
        if self._file is not None:
            self._file.write(_line({"step": step} | values))
            self._file.flush()
        if self._events is not None:
            for name, value in values.items():
                self._events.add_scalar(name, value, step)

    def close(self) -> None:
        """Close the files."""
        if self._file is not None:
            self._file.close()
        if self._events is not None:
            self._events.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the reports of a file, the oldest first; a line that is no report ends them.

    A process that is killed while it writes leaves a line that is cut off, always the last one.

    Raises:
        InputError: The file is no regular file, or longer than `MAX_RECORDS`.
    """
    if not path.exists():
        return []
    reports = []
    for line in read_bytes(path, "is no readable log", MAX_RECORDS).splitlines():
        try:
            report = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(report, dict) or not isinstance(report.get("step"), int):
            break
        reports.append(report)
    return reports


def _line(report: dict[str, Any]) -> str:
    return json.dumps(report) + "\n"
