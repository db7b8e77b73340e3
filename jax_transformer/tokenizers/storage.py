"""The files of tokenizers on the disk."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jax_transformer.errors import InputError
from jax_transformer.storage.reading import MAX_TOKENIZER, read_bytes
from jax_transformer.tokenizers.tokenizer import Tokenizer


def read_files(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Return the content of files in a folder.

    Raises:
        InputError: One is missing, is no regular file, or is too large.
    """
    fault = "cannot be read; a tokenizer file must be there"
    return {name: read_bytes(folder / name, fault, MAX_TOKENIZER) for name in names}


def write_files(folder: Path, tokenizer: Tokenizer) -> None:
    """Write a tokenizer's files into an existing folder."""
    for name, content in tokenizer.files().items():
        (folder / name).write_bytes(content)


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
