"""The output directory of a run: what it may hold before the run, and the lock on it."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from jax_transformer.errors import InputError
from jax_transformer.runs.checkpoints import HALF_WRITTEN, START, locked
from jax_transformer.runs.metrics import EVENTS, METRICS_FILE, read_metrics
from jax_transformer.storage.folder import (
    CHECKPOINTS,
    CONFIG_FILE,
    MODEL,
    SETTINGS_FILE,
    check_writable,
)
from jax_transformer.storage.reading import errors_naming
from jax_transformer.storage.writing import WRITING, check_path


def check_output(directory: Path, overwrite: bool) -> None:
    """Refuse a directory that a new run may not write to; changes nothing.

    A run that ended before its first checkpoint and its first evaluation leaves its directory free.
    """
    check_path(directory, WRITING)
    has_begun = _has_only_begun(directory)
    if has_begun and (overwrite or not _is_evaluated(directory)):
        return
    if os.path.lexists(directory):
        is_finished = not directory.is_symlink() and (directory / MODEL / CONFIG_FILE).is_file()
        if not overwrite:
            remedy = "overwrite it (--overwrite), " if has_begun or is_finished else ""
            remedy = f"name another output, {remedy}or --resume its run"
            raise InputError(f"{directory}: exists already; {remedy}")
        if not is_finished:
            fault = "is not the output of a finished run and so is not overwritten"
            raise InputError(f"{directory}: {fault}; name another output, or delete it")
    with errors_naming(directory, "cannot be written; name another output", OSError):
        check_writable(directory / MODEL)


@contextlib.contextmanager
def exclusive_folder(directory: Path, check: Callable[[], None], new: bool) -> Iterator[None]:
    """Create a directory unless it exists, keep other runs out of it, and `check` it after that.

    If this run is refused before its first checkpoint and evaluation, a directory that was created
    here, or is `new`, is removed again.
    """
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    missing = [directory, directory.parent] if new else missing
    with errors_naming(directory, "cannot be written; name another output", OSError):
        directory.mkdir(parents=True, exist_ok=True)
    with locked(directory):
        check()
        try:
            yield
        except InputError:
            if missing and _has_only_begun(directory) and not _is_evaluated(directory):
                shutil.rmtree(directory, ignore_errors=True)
                with contextlib.suppress(OSError):  # another program may use them by now
                    for parent in missing[1:]:
                        parent.rmdir()
            raise


def _has_only_begun(directory: Path) -> bool:
    """Return whether a directory holds only the first files of a run, or none; no checkpoint."""
    if directory.is_symlink() or not directory.is_dir():
        return False
    names = {path.name for path in directory.iterdir() if not path.name.startswith(WRITING)}
    checkpoints = [path.name for path in (directory / CHECKPOINTS).glob("*")]
    known = names <= {SETTINGS_FILE, METRICS_FILE, EVENTS, CHECKPOINTS}
    return known and all(HALF_WRITTEN in name or name == START for name in checkpoints)


def _is_evaluated(directory: Path) -> bool:
    return any("validation_loss" in report for report in read_metrics(directory / METRICS_FILE))
