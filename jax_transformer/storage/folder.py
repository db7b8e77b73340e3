"""The one way to write a folder of files: all files are replaced together, or none.

New files are first written into a hidden staging folder on the same disk, and then moved into the
folder. A failure leaves the old files as they were.
"""

import contextlib
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from jax_transformer.errors import InputError
from jax_transformer.storage.faults import faults_named

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
MODEL_FILES = (CONFIG_FILE, WEIGHTS_FILE, "tokenizer.json")  # of a model that this library trained


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
    """Yield an empty staging folder; when the block ends, move its files into `folder` together.

    A file of the same name is replaced, a symbolic link is replaced and not followed; every other
    file of the folder stays. If the block or the move fails, the folder is as it was before. The
    staging folder of a writer that was killed is removed first. `check_writable` finds most
    reasons to refuse a folder before any work.

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
        with _own_staging_folder(folder) as staging:
            new, old = staging / "new", staging / "old"
            new.mkdir()
            old.mkdir()
            yield new
            for path in (*new.iterdir(), new):
                _to_disk(path)
            if os.path.lexists(folder):
                _replace_files(new, folder, old)
                _to_disk(folder)
            else:
                new.rename(folder)
                _to_disk(folder.parent)


def _staging_path(folder: Path) -> Path:
    """Return the hidden sibling; or, for a mount point, a hidden folder on the same disk in it."""
    folder = folder.absolute()
    parent = folder if os.path.ismount(folder) else folder.parent
    return parent / f".{folder.name}.writing"


@contextlib.contextmanager
def _own_staging_folder(folder: Path) -> Iterator[Path]:
    """Yield the staging folder, empty and locked; remove it afterwards."""
    staging = _staging_path(folder)
    descriptor = _lock(staging, folder)
    try:
        for path in staging.iterdir():  # from a writer that was killed
            path.unlink() if path.is_symlink() or not path.is_dir() else shutil.rmtree(path)
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        os.close(descriptor)


def _lock(staging: Path, folder: Path) -> int:
    """Create the staging folder if it is missing, and return a descriptor that locks it.

    The lock ends with its process. So a staging folder without a lock is that of a killed writer.
    """
    import fcntl  # not on every platform that can read weight files

    while True:
        with contextlib.suppress(FileExistsError):
            staging.mkdir()
        descriptor = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another writer may have finished in the meantime and removed this folder.
            if staging.exists() and os.path.samestat(os.fstat(descriptor), staging.stat()):
                return descriptor
        except BlockingIOError as error:
            os.close(descriptor)
            raise InputError(
                f"{folder}: another process is writing it; wait until that process ends"
            ) from error
        os.close(descriptor)


def _replace_files(new: Path, folder: Path, old: Path) -> None:
    """Move all files from `new` into `folder`; put the files in `old` back if that fails."""
    names = sorted(path.name for path in new.iterdir())
    for name in names:
        if os.path.lexists(folder / name):
            _keep(folder / name, old / name)
    try:
        for name in names:
            os.replace(new / name, folder / name)
    except BaseException:
        for name in names:
            if os.path.lexists(old / name):
                os.replace(old / name, folder / name)
            else:
                (folder / name).unlink(missing_ok=True)
        raise


def _keep(path: Path, backup: Path) -> None:
    """Keep a file under a second name; as a copy on a disk that has no hard links."""
    try:
        os.link(path, backup, follow_symlinks=False)
    except OSError:
        shutil.copy2(path, backup, follow_symlinks=False)


def _to_disk(path: Path) -> None:
    """Wait until a file or the names in a folder are on the disk, so that a power cut is safe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
