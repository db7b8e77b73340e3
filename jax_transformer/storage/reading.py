"""Text of a regular file of a bounded size; JSON files of a model's folder: an object each."""

import json
import stat
from functools import partial
from pathlib import Path
from typing import Any

from jax_transformer.errors import InputError
from jax_transformer.storage.faults import faults_named, unique_names

MAX_SIZE = 2**20  # bytes


def read_json(path: Path, *, unique: bool = False) -> dict[str, Any]:
    """Return the JSON object in a file.

    Args:
        path: The file.
        unique: Whether a name that occurs twice in an object is refused; else the last one counts.

    Raises:
        InputError: The file is missing, damaged, no regular file or too long.
    """
    fault = "is no readable JSON"
    text = read_text(path, fault)
    with faults_named(path, fault, ValueError, RecursionError):
        hook = partial(unique_names, path) if unique else None
        values = json.loads(text, object_pairs_hook=hook)
    if not isinstance(values, dict):
        raise InputError(f"{path} must hold a JSON object")
    return values


def read_text(path: Path, fault: str) -> str:
    """Return the UTF-8 text of a regular file of at most `MAX_SIZE` bytes.

    Args:
        path: The file.
        fault: What the message says of a file that cannot be read, as "is no readable JSON".

    Raises:
        InputError: The file is missing, no regular file, too long or no UTF-8.
    """
    with faults_named(path, fault, OSError, ValueError):
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_SIZE:
            raise InputError(f"{path} is no regular file of at most {MAX_SIZE:,} bytes")
        return path.read_text(encoding="utf-8")


def with_tuples(value: Any) -> Any:
    """Return a value of JSON with tuples in the place of its lists, which are not hashable."""
    if isinstance(value, dict):
        return {name: with_tuples(item) for name, item in value.items()}
    return tuple(map(with_tuples, value)) if isinstance(value, list) else value
