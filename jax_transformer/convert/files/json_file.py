"""JSON files of a model's folder: an object in a regular file of a bounded size."""

import json
import stat
from functools import partial
from pathlib import Path
from typing import Any

from jax_transformer.convert.files.checks import WeightFileError, faults_named, unique_names

MAX_SIZE = 2**20  # bytes


def read_json(path: Path, *, unique: bool = False) -> dict[str, Any]:
    """Return the JSON object in a file.

    Args:
        path: The file.
        unique: Whether a name that occurs twice in an object is refused; else the last one counts.

    Raises:
        InputError: The file is missing, damaged, no regular file or too long.
    """
    with faults_named(path, "is no readable JSON", OSError, ValueError, RecursionError):
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_SIZE:
            raise WeightFileError(f"{path} is no regular file of at most {MAX_SIZE:,} bytes")
        hook = partial(unique_names, path) if unique else None
        values = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=hook)
    if not isinstance(values, dict):
        raise WeightFileError(f"{path} must hold a JSON object")
    return values


def with_tuples(value: Any) -> Any:
    """Return a value of JSON with tuples in the place of its lists, which are not hashable."""
    if isinstance(value, dict):
        return {name: with_tuples(item) for name, item in value.items()}
    return tuple(map(with_tuples, value)) if isinstance(value, list) else value
