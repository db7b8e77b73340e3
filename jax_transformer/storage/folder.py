"""The one way to write a folder: into a hidden folder beside it, which is then renamed.

A folder is the old one or the new one, whenever the process is killed. The next writer removes what
a killed one has left; a reader changes nothing.
"""

import contextlib
import ctypes
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from jax_transformer.errors import InputError
from jax_transformer.storage.reading import errors_naming
from jax_transformer.storage.writing import WRITING, exists_already, locked, to_disk

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
# In the output of a run: the folders of its model and of its checkpoints, and its settings.
MODEL, CHECKPOINTS, SETTINGS_FILE = "model", "run", "settings.yaml"
ADAPTER = "adapter"  # its adapter, a folder of PEFT
NEW, OLD = "new", "old"  # folders in the hidden one
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of Linux, for renameat2


def model_folder_of(folder: Path) -> Path:
    """Return the folder of the model itself: that in the output of a run, or the folder."""
    inside = folder / MODEL
    return inside if os.path.lexists(inside / CONFIG_FILE) else folder


def check_free(folder: Path, overwrite: bool) -> None:
    """Refuse a folder that a trained model may not be written to; changes nothing on the disk."""
    if os.path.lexists(folder):
        if not overwrite:
            raise exists_already(folder)
        if not (folder / CONFIG_FILE).is_file():
            raise InputError(
                f"{folder}: is not the folder of a trained model and so is not overwritten; name "
                "another output, or delete it"
            )
    check_writable(folder)


def check_writable(folder: Path) -> None:
    """Refuse a folder that `staged` cannot write; changes nothing on the disk."""
    with errors_naming(folder, "cannot be written; name another folder", OSError):
        if os.path.lexists(folder):
            if folder.is_symlink() or not folder.is_dir() or os.path.ismount(folder):
                raise InputError(
                    f"{folder}: is a link, a mount point or not a folder; name another one"
                )
            _check_files_only(folder)
        ancestors = folder.absolute().parents
        parent = next(parent for parent in ancestors if os.path.lexists(parent))
        for needed in (parent, folder) if folder.exists() else (parent,):
            if not (needed.is_dir() and os.access(needed, os.W_OK)):
                raise InputError(
                    f"{folder}: cannot be written, because {needed} is not a writable directory"
                )
        with contextlib.suppress(FileNotFoundError):
            os.lstat(_hidden(folder))  # raises OSError for a name that is too long


@contextlib.contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """Yield an empty folder; when the block ends, it becomes `folder` by one rename.

    Other files of an existing folder are in the new one as well: a link is not followed. If the
    block or the rename fails, or the process is killed, the folder is as it was before.
    `check_writable` finds most reasons to refuse a folder before any work.

    Raises:
        InputError: The folder cannot be written, or another process is writing it.
    """
    folder = folder.absolute()
    with errors_naming(folder, "cannot be written", OSError):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _hidden_folder(folder) as hidden:
            new = hidden / NEW
            new.mkdir()
            yield new
            exists = os.path.lexists(folder)
            if exists:
                _check_files_only(folder)
                for path in folder.iterdir():
                    if not os.path.lexists(new / path.name):
                        _link_or_copy(path, new / path.name)
            for path in new.iterdir():
                if path.is_file() and not path.is_symlink():  # to open a FIFO would wait
                    to_disk(path)
            to_disk(new)
            if exists:
                _exchange(new, folder, hidden / OLD)
            else:
                new.rename(folder)
            to_disk(folder.parent)


def _check_files_only(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            raise InputError(
                f"{path}: is a folder, which would not be in the new {folder.name}; name another "
                "output, or move it away"
            )


def _exchange(new: Path, folder: Path, old: Path) -> None:
    """Give two folders each other's name, in one step where the system can."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None:
        names = (os.fsencode(new), os.fsencode(folder))
        if rename(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) == 0:
            return
    # Elsewhere a kill between these two leaves the old folder under its hidden name; the next
    # writer gives it its name back.
    folder.rename(old)
    new.rename(folder)


def _hidden(folder: Path) -> Path:
    return folder.absolute().with_name(f"{WRITING}{folder.name}")


@contextlib.contextmanager
def _hidden_folder(folder: Path) -> Iterator[Path]:
    """Create and lock the empty hidden folder of a folder; remove it in the end."""
    hidden, descriptor = _hidden(folder), None
    while descriptor is None:
        hidden.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another process has finished and removed it
            try:
                opened = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except PermissionError:  # a umask of 777 keeps its owner out
                hidden.rmdir()
                raise
            descriptor = opened if locked(opened, hidden, folder) else None
    try:
        old = hidden / OLD
        if not os.path.lexists(folder) and old.is_dir() and not old.is_symlink():
            old.rename(folder)
        for path in hidden.iterdir():
            path.unlink() if path.is_symlink() or not path.is_dir() else shutil.rmtree(path)
        yield hidden
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
        os.close(descriptor)


def _link_or_copy(path: Path, target: Path) -> None:
    """Give a file a second name; copy it on a disk without hard links."""
    try:
        os.link(path, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(path, target, follow_symlinks=False)
