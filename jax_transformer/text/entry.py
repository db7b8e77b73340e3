"""An entry of the store: a JSON file with its checksum, written whole by one process at a time."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from jax_transformer.errors import InputError
from jax_transformer.storage.reading import read_bytes
from jax_transformer.storage.writing import staged_file

MOST_BYTES = 2**28  # the largest entries are the held-out pairs and the tokenizers


def write_entry(path: Path, content: Any) -> None:
    """Write JSON content with its checksum, whole or not at all."""
    text = json.dumps(content)
    with one_line_faults(path.parent), staged_file(path) as scratch:
        scratch.write_text(json.dumps({"crc32": zlib.crc32(text.encode()), "content": text}))


def read_entry(path: Path, declared: Any, remedy: str = "delete it") -> Any:
    """Return what `write_entry` has written, as a type.

    Raises:
        InputError: Any bit of it changed; the message ends with the remedy.
    """
    damaged = f"is damaged; {remedy}"
    content = read_bytes(path, damaged, MOST_BYTES)
    try:
        entry = msgspec.json.decode(content, type=_Entry)
        if zlib.crc32(entry.content.encode()) == entry.crc32:
            return msgspec.json.decode(entry.content, type=declared)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InputError(f"{path}: {damaged} ({error})") from error
    raise InputError(f"{path}: {damaged} (it differs from its checksum)")


@contextlib.contextmanager
def locked(folder: Path, console: Console) -> Iterator[None]:
    """Make a folder, and keep other processes out of it; wait for one that is in it."""
    with one_line_faults(folder):
        folder.mkdir(parents=True, exist_ok=True)
        opened = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.print(f"another process prepares {folder}; waiting for it")
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


@contextlib.contextmanager
def one_line_faults(folder: Path) -> Iterator[None]:
    """Turn failures of the disk and of workers into one line."""
    try:
        yield
    except OSError as error:
        remedy = "name a folder that can be written with --prepared"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(folder.parent).free
            remedy = (
                f"{free / 1e9:.1f} GB are free; make room, or name another disk with --prepared"
            )
        raise InputError(f"{folder}: {error.strerror}; {remedy}; what is done stays") from error
    except BrokenProcessPool as error:
        raise InputError(
            f"{folder}: a process that encodes was killed, as when memory is full; start again: "
            "what is done stays"
        ) from error


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    crc32: int
    content: str
