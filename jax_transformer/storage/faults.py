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
    """Turn errors of these kinds, whose messages name no file, into an input error."""
    try:
        yield
    except InputError:
        raise
    except kinds as cause:
        reason = f": {cause.strerror}" if isinstance(cause, OSError) else ""
        raise error(f"{path} {fault} ({type(cause).__name__}{reason})") from cause


def exists_already(path: Path, kind: str = "output") -> InputError:
    """Return the error for a path that would be overwritten; `kind` is what is written."""
    remedy = f"name another {kind} or overwrite it (--overwrite)"
    return InputError(f"{path}: exists already; {remedy}")


def check_path(path: Path, suffix: str = "") -> None:
    """Refuse a name that the disk cannot hold, also with the suffix that a writer adds to it."""
    parents = path.absolute().parents
    ancestor = next((parent for parent in parents if os.path.lexists(parent)), path)
    with faults_named(path, "cannot be written; name another output", OSError, ValueError):
        for name in (*path.parent.parts, path.name + suffix):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.lstat(ancestor / name)
