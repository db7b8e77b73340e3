"""A file with the batches that stopped a run because they were not finite, and their pairs."""

import json
from collections.abc import Iterable
from pathlib import Path

from jax_transformer.errors import InputError
from jax_transformer.runs.state import Position
from jax_transformer.storage.reading import MAX_RECORDS, read_json
from jax_transformer.storage.writing import replace_file
from jax_transformer.text.corpus import Corpus
from jax_transformer.text.plan import epoch_layout, plan_window
from jax_transformer.training.config import TrainingConfig

NONFINITE_FILE = "nonfinite_batches.json"


def write_nonfinite(
    directory: Path,
    positions: Iterable[Position],
    encoded: Corpus,
    training_config: TrainingConfig,
) -> Path:
    """Write batches, each with the indices of its training pairs; return the file.

    An existing file is replaced.
    """
    layout = epoch_layout(encoded, training_config)
    batches = []
    for epoch, window, batch in positions:
        plan = plan_window(encoded, training_config, layout, epoch, window)
        place = {"epoch": epoch, "window": window, "batch": batch}
        batches.append(place | {"pairs": plan[batch].members.tolist()})
    path = directory / NONFINITE_FILE
    replace_file(path, (json.dumps({"batches": batches}, indent=2) + "\n").encode())
    return path


def read_nonfinite(directory: Path) -> tuple[Position, ...]:
    """Return the batches that `write_nonfinite` has written; none if there is no file."""
    path = directory / NONFINITE_FILE
    if not path.exists():
        return ()
    try:
        batches = read_json(path, MAX_RECORDS)["batches"]
        names = Position._fields
        return tuple(Position(*(int(one[name]) for name in names)) for one in batches)
    except (ValueError, LookupError, TypeError) as error:
        raise InputError(f"{path}: is damaged ({error}); repair or delete it") from error
