"""The one way to write a file: under another name in its folder, then renamed.

A file is the old one or the new one, whenever the process is killed or the power fails. The next
writer of a file replaces what a killed process has left.
"""

import contextlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jax_transformer.errors import InputError
from jax_transformer.storage.reading import errors_naming

WRITING = ".writing."  # before the name of a file or folder that is not whole yet


def exists_already(path: Path, kind: str = "output") -> InputError:
    """Return the error for a path that would be overwritten; `kind` is what is written."""
    return InputError(f"{path}: exists already; name another {kind} or overwrite it (--overwrite)")


def check_path(path: Path, suffix: str = "") -> None:
    """Refuse a name that the disk cannot hold, also with the suffix that a writer adds to it."""
    parents = path.absolute().parents
    ancestor = next((parent for parent in parents if os.path.lexists(parent)), path)
    with errors_naming(path, "cannot be written; name another output", OSError, ValueError):
        for name in (*path.parent.parts, path.name + suffix):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.lstat(ancestor / name)


def check_new_file(path: Path, overwrite: bool, kind: str = "report") -> None:
    """Refuse a file that exists, unless it may be replaced, and one that cannot be written."""
    check_path(path, WRITING)
    if os.path.lexists(path) and (path.is_dir() or not overwrite):
        raise exists_already(path, kind)
    if not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        fault = f"{path.parent} is not a writable folder"
        raise InputError(f"{path}: {fault}; name another or create it")


def json_bytes(values: Mapping[str, Any]) -> bytes:
    """Return the content of a JSON file, as the Hugging Face libraries write it."""
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


def replace_file(path: Path, content: bytes) -> None:
    """Write or replace a file; a symbolic link is replaced, not followed.

    Raises:
        InputError: It cannot be written, or another process is writing it; the old file stays.
    """
    with errors_naming(path, "cannot be written", OSError), staged_file(path) as scratch:
        scratch.write_bytes(content)


@contextlib.contextmanager
def staged_file(path: Path) -> Iterator[Path]:
    """Yield the path of an empty file; when the block ends, it becomes `path`.

    After an error the old file stays. A symbolic link is replaced, not followed.
    """
    path = path.absolute()
    scratch = path.with_name(WRITING + path.name)
    while not locked(descriptor := _opened(scratch), scratch, path):
        pass
    try:
        os.ftruncate(descriptor, 0)  # of what a killed process has left
        yield scratch
        to_disk(scratch)
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    to_disk(path.parent)


def locked(descriptor: int, scratch: Path, path: Path) -> bool:
    """Lock what is being written until its descriptor or process ends; what is not locked is stale.

    False (the descriptor is closed then): another process has just finished `scratch`.
    """
    with contextlib.ExitStack() as unless_locked:
        unless_locked.callback(os.close, descriptor)
        lock(descriptor, f"{path}: another process is writing it; wait until that process ends")
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), scratch.lstat()):
                unless_locked.pop_all()
                return True
    return False


def lock(descriptor: int, busy: str) -> None:
    """Lock an open file or folder, until it is closed or its process ends."""
    import fcntl  # not on every platform that can read weight files

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(busy) from error


def to_disk(path: Path) -> None:
    """Wait until a file or the names in a folder are on the disk, so that a power cut is safe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _opened(scratch: Path) -> int:
    """Open a file for writing, created if it is missing; remove a link or a device there."""
    with contextlib.suppress(FileNotFoundError):
        kind = scratch.lstat().st_mode
        if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
            scratch.unlink()
    return os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
