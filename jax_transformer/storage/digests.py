"""The sha256 of what is on the disk, for models and for the checkpoints of runs."""

import hashlib
import json
from pathlib import Path
from typing import Any

from jax_transformer.storage.reading import open_regular


def json_digest(content: Any) -> str:
    """Return the sha256 of JSON content, whatever the order of its names."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def file_digest(path: Path, largest: int | None = None) -> str:
    """Return the sha256 of a regular file."""
    with open_regular(path, "cannot be read", largest) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
