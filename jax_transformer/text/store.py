"""The folder that keeps what was computed from texts: facts, held-out pairs, tokenizers, corpora.

An entry is named by the hash of its inputs. Existing entries are reused and never modified. An
entry is a JSON file with its checksum, written whole by one process at a time.
"""

import contextlib
import dataclasses
import errno
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from jax_transformer.errors import InputError
from jax_transformer.storage.hub import user_cache
from jax_transformer.storage.reading import json_digest, read_bytes
from jax_transformer.storage.writing import staged_file
from jax_transformer.text.parallel_text import FileFacts, TextFiles, no_pairs

FORMAT = 4  # of the entries
MOST_BYTES = 2**28  # the largest entries are the held-out pairs and the tokenizers


def default_store() -> Path:
    """Return the folder in the user's cache that holds what is prepared."""
    cache = user_cache()
    if cache is None:
        raise InputError(
            "there is no home folder to keep encoded text in; name a folder by --prepared, or set "
            "XDG_CACHE_HOME"
        )
    return cache / "prepared"


def write_entry(path: Path, content: Any) -> None:
    """Write JSON content with its checksum, whole or not at all."""
    text = json.dumps(content)
    with one_line_faults(path.parent), staged_file(path) as scratch:
        scratch.write_text(json.dumps({"crc32": zlib.crc32(text.encode()), "content": text}))


def read_entry(path: Path, declared: Any, remedy: str = "delete it") -> Any:
    """Return what `write_entry` has written, as a type; refuse it if any bit of it changed."""
    damaged = f"is damaged; {remedy}"
    content = read_bytes(path, damaged, MOST_BYTES)
    try:
        entry = msgspec.json.decode(content, type=_Entry)
        if zlib.crc32(entry.content.encode()) == entry.crc32:
            return msgspec.json.decode(entry.content, type=declared)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InputError(f"{path}: {damaged} ({error})") from error
    raise InputError(f"{path}: {damaged} (it differs from its checksum)")


def read_or_make(entry: Path, declared: Any, console: Console, make: Callable[[], Any]) -> Any:
    """Return an entry as a type; make it, if it is not there."""
    with locked(entry.parent, console):
        if not entry.exists():
            write_entry(entry, make())
        return read_entry(entry, declared)


@contextlib.contextmanager
def locked(folder: Path, console: Console) -> Iterator[None]:
    """Make a folder, and keep other processes out of it; wait for one that is in it."""
    import fcntl  # not on every platform that can import this file

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
            free = shutil.disk_usage(folder.parent).free / 1e9
            remedy = f"{free:.1f} GB are free; make room, or name another disk with --prepared"
        raise InputError(f"{folder}: {error.strerror}; {remedy}; what is done stays") from error
    except BrokenProcessPool as error:
        raise InputError(
            f"{folder}: a process that encodes was killed, as when memory is full; start again: "
            "what is done stays"
        ) from error


def with_known_facts(store: Path, text: TextFiles, console: Console) -> TextFiles:
    """Return a text with its facts; a file that has not changed is not read again."""
    paths = [os.path.abspath(path) for path in (*text.sources, *text.targets)]
    units = [text.reading.documents, text.reading.columns]  # what counts as a line of a file
    entry = store / "texts" / f"{json_digest([FORMAT, *units, *paths])}.json"
    with locked(entry.parent, console):
        earlier = read_entry(entry, list[FileFacts]) if entry.exists() else []
        with console.status("reading the text"):
            text = text.with_facts(earlier)
        if text.facts != tuple(earlier):
            write_entry(entry, [*map(dataclasses.asdict, text.facts)])
    if not text.pairs:
        raise no_pairs(text.names, 0)
    return text


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    crc32: int
    content: str
