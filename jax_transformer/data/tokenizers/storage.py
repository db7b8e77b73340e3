"""The files of tokenizers on the disk."""

import json
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jax_transformer.data.tokenizers.tokenizer import Tokenizer
from jax_transformer.errors import InputError

MAX_FILE_SIZE = 2**28  # bytes of a tokenizer file


def read_files(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Return the content of files in a folder.

    Raises:
        InputError: One is missing, is no regular file, or is too large.
    """
    contents = {}
    for name in names:
        path = folder / name
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_FILE_SIZE:
                raise InputError(f"{path}: not a regular file of at most {MAX_FILE_SIZE:,} bytes")
            contents[name] = path.read_bytes()
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}; a tokenizer file must be there") from error
    return contents


def write_files(folder: Path, tokenizer: Tokenizer) -> None:
    """Write a tokenizer's files into an existing folder."""
    for name, content in tokenizer.files().items():
        (folder / name).write_bytes(content)


def parse_json(content: bytes, name: str) -> dict[str, Any]:
    """Return the JSON object in a file.

    Args:
        content: The file.
        name: The name of the file in error messages.

    Raises:
        InputError: The content is no JSON object.
    """
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"{name}: is no readable JSON ({reason:.100}); copy it again") from error
    if not isinstance(values, dict):
        raise InputError(f"{name}: must hold a JSON object; copy it again")
    return values


def check_settings(
    settings: Mapping[str, Any], defaults: Mapping[str, Any], name: str
) -> dict[str, Any]:
    """Return the settings of a tokenizer, with the defaults of those that are absent.

    Raises:
        InputError: A setting is unknown.
    """
    unknown = sorted(settings.keys() - defaults.keys())
    if unknown:
        raise InputError(
            f"{name}: the tokenizer has the setting {unknown[0]!r}, which this version does not "
            "know; use the version that wrote it"
        )
    return {**defaults, **settings}
