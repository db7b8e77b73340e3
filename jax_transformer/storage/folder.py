"""The one way to write a folder of files: all files are replaced together, or none.

New files are first written into a hidden staging folder on the same disk. Before they are moved
into the folder, the old files are kept under a second name, and a journal says that the move has
begun. A failure puts the old files back. After a kill the journal is still there, and `mend`, which
every reader and writer of the folder calls first, puts the old files back.
"""

import contextlib
import errno
import json
import os
import shutil
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from jax_transformer.errors import InputError
from jax_transformer.storage.faults import faults_named
from jax_transformer.storage.reading import read_json
from jax_transformer.storage.writing import WRITING, locked, replace_file, to_disk

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
MODEL_FILES = (CONFIG_FILE, WEIGHTS_FILE, "tokenizer.json")  # of a model that this library trained
# In a staging folder: the new files, the old ones, and the journal. While the journal is there, the
# folder may hold files of both, and the staging folder is needed to mend it.
NEW, OLD, JOURNAL = "new", "old", "journal.json"
LONGEST_WAIT = 10  # seconds, for a writer that moves its files
CREATED = "created"  # in the journal: the names that the folder did not have before


def check_free(folder: Path, overwrite: bool) -> None:
    """Refuse a folder that a trained model may not be written to; changes nothing on the disk.

    Args:
        folder: The folder of the trained model.
        overwrite: Whether a trained model that is already there may be replaced.

    Raises:
        InputError: The folder exists and may not be replaced, or it cannot be created.
    """
    if os.path.lexists(folder):
        if not overwrite:
            raise InputError(f"{folder}: exists already; name another output or overwrite it")
        if not (folder / CONFIG_FILE).is_file():
            raise InputError(
                f"{folder}: is not the folder of a trained model and so is not overwritten; name "
                "another output, or delete it"
            )
    check_writable(folder, MODEL_FILES)


def check_writable(folder: Path, names: Collection[str]) -> None:
    """Refuse a folder that `staged` cannot write; changes nothing on the disk.

    Args:
        folder: The folder; it and its parents need not exist.
        names: Names of the files that will be written; existing files may be replaced.

    Raises:
        InputError: The folder is a symbolic link or no folder, a name in it belongs to a folder,
            or a folder that must be changed is not writable.
    """
    with faults_named(folder, "cannot be written; name another folder", OSError):
        if os.path.lexists(folder) and (folder.is_symlink() or not folder.is_dir()):
            raise InputError(f"{folder}: is a link or no folder; name another one")
        for name in names:
            if (folder / name).is_dir() and not (folder / name).is_symlink():
                raise InputError(f"{folder / name}: is a folder; remove it to write the file")
        ancestors = folder.absolute().parents
        parent = next(parent for parent in ancestors if os.path.lexists(parent))
        for needed in (parent, folder) if folder.exists() else (parent,):
            if not (needed.is_dir() and os.access(needed, os.W_OK)):
                raise InputError(
                    f"{folder}: cannot be written, because {needed} is no writable directory"
                )
        with contextlib.suppress(FileNotFoundError):
            os.lstat(_staging_path(folder))  # raises OSError for a name that is too long


@contextlib.contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """Yield an empty folder; when the block ends, move its files into `folder` together.

    A file of the same name is replaced, a symbolic link is replaced and not followed; every other
    file of the folder stays. If the block or the move fails, the folder is as it was before. If the
    process is killed, the next call that reads or writes the folder mends it. `check_writable`
    finds most reasons to refuse a folder before any work.

    Args:
        folder: The folder to write; it and its parents are created.

    Yields:
        A folder for the new files; it must not contain folders.

    Raises:
        InputError: The folder cannot be written, or another process is writing it.
    """
    folder = folder.absolute()
    with faults_named(folder, "cannot be written", OSError):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _staging_folder(folder) as staging:
            _undo(folder, staging)
            new = staging / NEW
            new.mkdir()
            yield new
            for path in (*new.iterdir(), new):
                to_disk(path)
            if os.path.lexists(folder):
                _replace_files(folder, staging)
            else:
                new.rename(folder)
                to_disk(folder.parent)


def mend(folder: Path) -> None:
    """Undo the move that a killed writer of a folder has begun, and remove what it has left.

    Nothing happens if there is no such writer, or if one is running that has not begun to move its
    files; a reader waits for one that has.

    Raises:
        InputError: The folder holds files of two models, and cannot be mended.
    """
    folder = Path(os.path.realpath(folder))
    staging = _staging_path(folder)
    end = time.monotonic() + LONGEST_WAIT
    while os.path.isdir(staging) and not os.path.islink(staging):
        try:
            descriptor = _lock(staging, folder)
        except FileNotFoundError:  # a writer has finished
            continue
        except OSError:  # this user may not read what another one has left
            return
        except InputError:
            if not os.path.lexists(staging / JOURNAL):
                return
            if time.monotonic() > end:
                raise
            time.sleep(0.01)
            continue
        try:
            _undo(folder, staging)
            staging.rmdir()
        except OSError as error:
            if not os.path.lexists(staging / JOURNAL):
                return  # a folder that may only be read is whole
            raise InputError(
                f"{folder}: a process that was killed has left it half-written, and it cannot be "
                f"mended ({error.strerror}); make it and its parent writable"
            ) from error
        finally:
            os.close(descriptor)


def _staging_path(folder: Path) -> Path:
    """Return the hidden sibling; or, for a mount point, a hidden folder on the same disk in it."""
    folder = folder.absolute()
    parent = folder if os.path.ismount(folder) else folder.parent
    return parent / f"{WRITING}{folder.name}"


@contextlib.contextmanager
def _staging_folder(folder: Path) -> Iterator[Path]:
    """Create and lock the staging folder of a folder; remove it unless it holds a journal."""
    staging, descriptor = _staging_path(folder), None
    while descriptor is None:
        staging.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            descriptor = _lock(staging, folder)
    try:
        yield staging
    finally:
        if not os.path.lexists(staging / JOURNAL):
            shutil.rmtree(staging, ignore_errors=True)
        os.close(descriptor)


def _lock(staging: Path, folder: Path) -> int:
    """Return a descriptor that keeps other processes out of a staging folder.

    Raises:
        InputError: Another process is writing the folder.
        FileNotFoundError: Another process has finished and removed the staging folder.
        OSError: It cannot be read, or is a symbolic link.
    """
    descriptor = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    if not locked(descriptor, staging, folder):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(staging))
    return descriptor


def _replace_files(folder: Path, staging: Path) -> None:
    """Move all new files into a folder; put the old ones back if that fails."""
    old, names = staging / OLD, sorted(path.name for path in (staging / NEW).iterdir())
    old.mkdir()
    created = [name for name in names if not os.path.lexists(folder / name)]
    for name in names:
        if name not in created:
            _keep(folder / name, old / name)
    to_disk(old)
    replace_file(staging / JOURNAL, json.dumps({CREATED: created}).encode())
    try:
        for name in names:
            os.replace(staging / NEW / name, folder / name)
        to_disk(folder)
    except BaseException:
        _put_back(folder, staging)
        raise
    _end(staging)


def _undo(folder: Path, staging: Path) -> None:
    """Put the old files back where a killed writer has begun to move its files; empty `staging`."""
    if os.path.lexists(staging / JOURNAL):
        _put_back(folder, staging)
    for path in staging.iterdir():
        path.unlink() if path.is_symlink() or not path.is_dir() else shutil.rmtree(path)


def _put_back(folder: Path, staging: Path) -> None:
    """Put the old files back; this may itself be killed at any moment and started again."""
    created = read_json(staging / JOURNAL).get(CREATED)
    # A folder may come from somebody else, with a journal beside it.
    if not isinstance(created, list) or not all(map(_is_plain, created)):
        raise InputError(f"{staging / JOURNAL}: is damaged; copy the folder again")
    if folder.is_dir():  # a user may have deleted it since
        for name in os.listdir(staging / OLD):
            os.replace(staging / OLD / name, folder / name)
        for name in created:
            (folder / name).unlink(missing_ok=True)
        to_disk(folder)
    _end(staging)


def _is_plain(name: object) -> bool:
    """Return whether a value is the name of a file in the folder itself."""
    return isinstance(name, str) and name not in ("", ".", "..") and "/" not in name


def _end(staging: Path) -> None:
    """Remove the journal: from here on the folder is whole."""
    (staging / JOURNAL).unlink()
    to_disk(staging)


def _keep(path: Path, backup: Path) -> None:
    """Keep a file under a second name; as a copy on a disk that has no hard links."""
    try:
        os.link(path, backup, follow_symlinks=False)
    except OSError:
        shutil.copy2(path, backup, follow_symlinks=False)
        if not backup.is_symlink():
            to_disk(backup)
