"""Errors of the operating system and of parsers as one line that names the file."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from jax_transformer.errors import InputError


@contextlib.contextmanager
def faults_named(
    path: Path, fault: str, *kinds: type[Exception], error: type[InputError] = InputError
) -> Iterator[None]:
    """Turn errors of these kinds into an input error, with the original error as its cause.

    Args:
        fault: What is wrong with it.
        *kinds: Errors that the called libraries raise for it; their messages name no file.
    """
    try:
        yield
    except InputError:
        raise
    except kinds as cause:
        reason = f": {cause.strerror}" if isinstance(cause, OSError) else ""
        raise error(f"{path} {fault} ({type(cause).__name__}{reason})") from cause


def check_path(path: Path, suffix: str = "") -> None:
    """Refuse a file or folder that the disk cannot hold by its name; changes nothing on the disk.

    Args:
        suffix: What the writer adds to the name while it writes.
    """
    parents = path.absolute().parents
    ancestor = next((parent for parent in parents if os.path.lexists(parent)), path)
    with faults_named(path, "cannot be written; name another output", OSError, ValueError):
        for name in (*path.parent.parts, path.name + suffix):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.lstat(ancestor / name)
