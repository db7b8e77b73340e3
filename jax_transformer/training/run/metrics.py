"""What a run tells of itself as it goes: a line of JSON for each report, and TensorBoard's events.

Each line is an object with "step" and the values that the report is about.
"""

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from jax_transformer.errors import InputError

METRICS_FILE = "metrics.jsonl"
EVENTS = "tensorboard"


class MetricsLog:
    """Writes metrics.jsonl, and beside it, where asked for, a folder that TensorBoard reads.

    A resumed run writes again what came after the step it goes on from: those lines are dropped
    first, so that each step is told of once.
    """

    def __init__(self, directory: Path | None, step: int = 0, tensorboard: bool = False) -> None:
        """Open the log in a directory that exists.

        Args:
            directory: Where it is kept; None keeps nothing.
            step: Steps made so far; lines of later ones are dropped.
            tensorboard: Whether to write events as well.

        Raises:
            InputError: TensorBoard's events are wanted and tensorboardX is missing.
        """
        self._events, self._file = None, None
        if directory is None:
            return
        if tensorboard:
            check_tensorboard()
            from tensorboardX import SummaryWriter

            self._events = SummaryWriter(str(directory / EVENTS), purge_step=step + 1)
        path = directory / METRICS_FILE
        kept = [entry for entry in read_metrics(path) if entry["step"] <= step]
        scratch = path.with_suffix(".writing")
        scratch.write_text("".join(map(_line, kept)), encoding="utf-8")
        os.replace(scratch, path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, **values: float | int) -> None:
        """Add one report; it is in the file when this returns."""
        if self._file is not None:
            self._file.write(_line({"step": step} | values))
            self._file.flush()
        if self._events is not None:
            for name, value in values.items():
                self._events.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        if self._file is not None:
            self._file.close()
        if self._events is not None:
            self._events.close()


def check_tensorboard() -> None:
    """Refuse to write TensorBoard's events where the library for it is missing.

    Raises:
        InputError: It is missing.
    """
    if importlib.util.find_spec("tensorboardX") is None:
        raise InputError(
            "tensorboard=True needs tensorboardX; install jax-transformer[tensorboard]"
        )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the reports of a file, the oldest first; a line that was cut off ends them.

    A process that is killed as it writes leaves such a line, and only at the end.
    """
    if not path.exists():
        return []
    reports = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            reports.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return reports


def _line(report: dict[str, Any]) -> str:
    return json.dumps(report) + "\n"
