"""A run's checkpoints: each process writes and reads its own part of the arrays, by orbax.

A directory holds a folder for each step, and `start`: the tokenizer's files and the model's origin,
which no step changes. A step holds the arrays in orbax's files, and `run.json`: everything else,
and the sha256 of each of these files.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh
from rich.console import Console

from jax_transformer.errors import InputError, shorten
from jax_transformer.model.tree import parameter_count
from jax_transformer.runs.state import (
    KEPT,
    RunCheckpoint,
    RunProgress,
    RunSettings,
    check_same,
    progress_from_json,
    progress_to_json,
    settings_from_json,
    settings_to_json,
    start_files,
)
from jax_transformer.runtime import distributed
from jax_transformer.storage.reading import json_digest
from jax_transformer.storage.writing import lock
from jax_transformer.training.step import state_shapes, state_shardings

FORMAT = 9  # of what a step's folder holds; raised with each change of it
RUN, START = "run.json", "start"
DAMAGED = "damaged"  # folder that unreadable steps are moved to
HALF_WRITTEN = "orbax-checkpoint-tmp"  # in the name of a folder that is not whole


class DamagedError(InputError):
    """The files of a checkpoint are not those that were written."""


class CheckpointFolder(NamedTuple):
    """A checkpoint on disk, the folder of a step, whose files are those that were written."""

    directory: Path
    settings: RunSettings
    progress: RunProgress

    def read(self, mesh: Mesh | None = None) -> RunCheckpoint:
        """Return the checkpoint: its arrays on a mesh, or without one whole and on the host."""
        shapes = _shapes(self.settings, self.progress)
        targets = named_leaves(shapes)
        if mesh is None:
            targets = {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in targets.items()}
        else:
            places = state_shardings(mesh, self.settings.config, self.settings.training_config)
            best = None if shapes.best_params is None else places.params
            shardings = named_leaves(RunCheckpoint(self.progress, places, best))
            targets = {
                name: leaf.update(sharding=shardings[name]) for name, leaf in targets.items()
            }
        # Arrays that are read at the same time take no more memory beside their parts than the
        # largest one; orbax would read them all at once.
        largest = max(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in targets.values())
        handler = ocp.StandardCheckpointHandler(restore_concurrent_gb=(largest + 1) / 10**9)
        damage = _errors_as(DamagedError, f"{self.directory} is damaged")
        with _orbax_quiet(), damage, ocp.Checkpointer(handler) as reader:
            arrays = reader.restore(
                self.directory.resolve(), args=ocp.args.StandardRestore(targets)
            )
        tree = jax.tree.structure((shapes.state, shapes.best_params))
        state, best_params = jax.tree.unflatten(tree, [arrays[name] for name in targets])
        state = state._replace(key=jax.random.wrap_key_data(state.key))
        return RunCheckpoint(self.progress, state, best_params)


class CheckpointWriter:
    """Writes a run's checkpoints in the background. A context: leaving it waits for the last one.

    A step's folder appears under its number only when it is complete. Entering the context creates
    the directory, locks out other runs, and removes what killed runs left half written.
    """

    def __init__(self, directory: Path, settings: RunSettings) -> None:
        self._directory, self._settings = directory, settings

    def __enter__(self) -> "CheckpointWriter":
        with contextlib.ExitStack() as opened, self._as_input_errors():
            if distributed.is_main():
                self._directory.mkdir(parents=True, exist_ok=True)
                opened.enter_context(locked(self._directory))
                for path in self._directory.glob(f"*{HALF_WRITTEN}*"):
                    shutil.rmtree(path)
                self._write_start()
            self._steps = steps_in(self._directory)
            opened.enter_context(_orbax_quiet())
            self._handler = DescribingHandler()
            self._writer = ocp.AsyncCheckpointer(
                self._handler,
                # Otherwise the threads of a save whose directory cannot be created block the exit.
                async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
                checkpoint_metadata_store=ocp.metadata.metadata_store(enable_write=False),
            )
            self._opened = opened.pop_all()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        """Wait for the last checkpoint; an error that is raised already hides one of the save."""
        errors = contextlib.nullcontext() if error is None else contextlib.suppress(Exception)
        with self._opened, errors, contextlib.closing(self._writer):
            self.wait()

    def save(self, checkpoint: RunCheckpoint) -> None:
        """Copy a checkpoint and start to write it; a step that exists already is left alone.

        All processes call this, and each writes the parts of the arrays that its devices hold.
        """
        step = checkpoint.progress.step
        self.wait()
        with self._as_input_errors():
            if step in self._steps:
                return
            self._steps.append(step)
            if distributed.is_main():
                self._write_start()  # somebody may have deleted the directory
            # The next training step reuses the memory of the state. Orbax copies arrays of NumPy,
            # which it also writes in half of the time; one process alone has all of them.
            copy = np.asarray if jax.process_count() == 1 else jnp.copy
            state = checkpoint.state
            state = state._replace(key=jax.random.key_data(state.key))  # the words of the key
            leaves = named_leaves(checkpoint._replace(state=state))
            arrays = {name: copy(leaf) for name, leaf in leaves.items()}
            self._handler.description = {
                "format": FORMAT,
                "settings": settings_to_json(self._settings),
                "progress": progress_to_json(checkpoint.progress),
                "arrays": {name: _described(array) for name, array in arrays.items()},
            }
            self._writer.save(self._directory.resolve() / str(step), args=DescribedSave(arrays))

    def wait(self) -> None:
        """Return when the last checkpoint is written and those that are not kept are deleted."""
        with self._as_input_errors():
            self._writer.wait_until_finished()
            keep = self._settings.training_config.keep_checkpoints
            for step in steps_in(self._directory)[:-keep] if distributed.is_main() else ():
                shutil.rmtree(self._directory / str(step))

    def _write_start(self) -> None:
        """Write the files that no step changes, all of them or none, unless they are there."""
        if (self._directory / START).exists():
            return
        staging = self._directory / f"{START}.{HALF_WRITTEN}"
        staging.mkdir(parents=True, exist_ok=True)
        for name, content in start_files(self._settings).items():
            (staging / name).write_bytes(content)
        staging.rename(self._directory / START)

    def _as_input_errors(self) -> contextlib.AbstractContextManager[None]:
        remedy = "; the ones before it are whole: free some space or repair the disk, then resume"
        fault = f"{self._directory}: a checkpoint could not be written"
        return _errors_as(InputError, fault, remedy)


class DescribingHandler(ocp.StandardCheckpointHandler):
    """Writes arrays as orbax does, then `run.json`, before the step is committed."""

    description: dict[str, Any]

    def finalize(self, directory: os.PathLike[str]) -> None:
        """Write the description, with the size and sha256 of each file of the arrays."""
        super().finalize(directory)
        directory = Path(directory)
        files = {
            str(path.relative_to(directory)): [path.stat().st_size, _file_digest(path)]
            for path in _files(directory)
        }
        content = self.description | {"files": files}
        run = {"sha256": json_digest(content), "content": content}
        (directory / RUN).write_text(json.dumps(run))


@ocp.args.register_with_handler(DescribingHandler, for_save=True, for_restore=True)
class DescribedSave(ocp.args.StandardSave):
    """The arrays that a `DescribingHandler` saves."""


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keep other processes out of a directory; the lock ends with the process."""
    opened = os.open(directory, os.O_RDONLY)
    try:
        lock(opened, f"{directory}: another process is training this run; wait for it or end it")
        yield
    finally:
        os.close(opened)


def steps_in(directory: Path) -> list[int]:
    """Return the steps that a directory of checkpoints holds, the oldest first."""
    if not os.path.isdir(directory):  # unlike Path.is_dir, it takes a name of any length
        return []
    names = [path.name for path in directory.iterdir() if path.name.isdecimal()]
    return sorted(int(name) for name in names if name == str(int(name)))


def restore(directory: Path, console: Console) -> CheckpointFolder:
    """Find the newest complete checkpoint; report damaged ones and move them aside.

    All processes call this. Each checks a share of the files, and reads the description.
    """
    steps = json.loads(distributed.from_main(json.dumps(steps_in(directory)).encode()))
    if not steps:
        raise InputError(f"{directory}: holds no checkpoint of a run; start one without resume")
    damaged = []
    for step in reversed(steps):
        saved = error = None
        try:
            saved = read_step(directory, step)
        except DamagedError as caught:
            error = caught
        if distributed.any_process(error is not None):
            error = error or f"{directory / str(step)} is damaged"
            console.print(f"WARNING: {error}; going back to the checkpoint before it")
            damaged.append(step)
            continue
        check_one_run(directory, saved.settings, (older for older in steps if older < step))
        for name in map(str, damaged if distributed.is_main() else ()):
            aside = directory / DAMAGED / name
            shutil.rmtree(aside, ignore_errors=True)
            aside.parent.mkdir(exist_ok=True)
            (directory / name).rename(aside)
        return saved
    names = ", ".join(map(str, steps))
    raise InputError(f"{directory}: all of its checkpoints are damaged ({names}); use a copy of it")


def read_step(directory: Path, step: int) -> CheckpointFolder:
    """Check the files of one step and read its description."""
    path = directory / str(step)
    try:
        with _orbax_quiet(), _errors_as(DamagedError, f"{path} is damaged"):
            settings, progress, content = _read_description(path)
            _check_arrays(settings, progress, content["arrays"])
            _check_files(path, content["files"])
    except DamagedError:
        raise
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    return CheckpointFolder(path, settings, progress)


def check_one_run(directory: Path, newest: RunSettings, older: Iterable[int]) -> None:
    """Refuse older steps of another run than the newest one's; damaged steps are passed over."""
    for step in older:
        path = directory / str(step)
        try:
            settings, *_ = _read_description(path)
        except Exception:  # it is damaged, and nothing of it is needed
            continue
        try:
            check_same(settings, newest, step)
        except InputError as error:
            reason = str(error).partition(KEPT)[0]
            raise InputError(
                f"{path}: is of another run than the newest step beside it ({reason}); remove it"
            ) from error


def _read_description(step: Path) -> tuple[RunSettings, RunProgress, dict[str, Any]]:
    for path in (*_files(step), *_files(step.parent / START)):
        if not path.is_file():  # a FIFO, which would never end
            raise ValueError(f"{path.relative_to(step.parent)} is not a regular file")
    content = verified(json.loads((step / RUN).read_text()))
    version = content.get("format")
    if type(version) is not int or version != FORMAT:
        raise InputError(
            f"is of format {shorten(version)}, but this version of the library reads format "
            f"{FORMAT}; use the version that wrote it"
        )
    progress = progress_from_json(content["progress"])
    if str(progress.step) != step.name:
        raise ValueError(f"it is of step {progress.step}")
    return settings_from_json(content["settings"], step.parent / START), progress, content


def verified(read: dict[str, Any]) -> dict[str, Any]:
    """Return the "content" of a checkpoint's description, whose "sha256" stands beside it."""
    if json_digest(read["content"]) != read["sha256"]:
        raise ValueError(f"{RUN}: its sha256 differs")
    return read["content"]


def _check_arrays(settings: RunSettings, progress: RunProgress, described: dict[str, Any]) -> None:
    """Refuse a config whose arrays are not those that are described."""
    # This comes first: the shapes of an absurd config take long to trace.
    numbers = sum(math.prod(array["shape"]) for array in described.values())
    if (count := parameter_count(settings.config)) > numbers:
        raise InputError(
            f"its config has {count:,} parameters, but its arrays have only {numbers:,} numbers; "
            "restore the directory from a copy"
        )
    leaves = named_leaves(_shapes(settings, progress))
    expected = {name: _described(leaf) for name, leaf in leaves.items()}
    for name, description in expected.items():
        if described.get(name) != description:
            raise InputError(f"{name} is missing or of another shape; use the version of its run")
    for name in sorted(described.keys() - expected.keys()):
        raise InputError(f"{name} belongs to no model of its config; use a copy of the directory")


def _check_files(step: Path, files: dict[str, list[Any]]) -> None:
    """Compare the digests of this process' share of the files, before orbax reads any of them."""
    for name, (size, digest) in sorted(files.items())[jax.process_index() :: jax.process_count()]:
        path = step / name
        if not path.is_file() or path.stat().st_size != size:  # before a long file is read
            raise ValueError(f"{name} is missing or of another size")
        if _file_digest(path) != digest:
            raise ValueError(f"{name}: its sha256 differs")


def named_leaves(checkpoint: RunCheckpoint) -> dict[str, Any]:
    """Return every array of a checkpoint by its path, in order."""
    return {
        f"{part}/{jax.tree_util.keystr(path, simple=True, separator='/')}": leaf
        for part in ("state", "best_params")
        for path, leaf in jax.tree_util.tree_leaves_with_path(getattr(checkpoint, part))
    }


def _shapes(settings: RunSettings, progress: RunProgress) -> RunCheckpoint:
    """Return shapes and dtypes in the place of arrays, and of the random key those of its words."""
    state = state_shapes(settings.config, settings.training_config)
    state = state._replace(key=jax.eval_shape(jax.random.key_data, state.key))
    return RunCheckpoint(progress, state, None if progress.best_step is None else state.params)


def _described(array: Any) -> dict[str, Any]:
    return {"dtype": str(array.dtype), "shape": list(array.shape)}


def _files(directory: Path) -> list[Path]:
    """Return everything below a directory that is not a directory, in order."""
    return sorted(path for path in directory.rglob("*") if not path.is_dir())


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _errors_as(kind: type[InputError], fault: str, remedy: str = "") -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # orbax, the stores below it and damaged files raise many types
        raise kind(f"{fault} ({_in_one_line(error)}){remedy}") from error


def _in_one_line(error: Exception) -> str:
    """Return an error as one line; of one of tensorstore, only what the system said."""
    text = " ".join(str(error).split(" [tensorstore_spec")[0].split())
    # The code stands before or behind the spec, as it happens.
    if code := re.search(r"os_error_code='(\d+)'", str(error)):
        text = os.strerror(int(code[1]))
    return f"{type(error).__name__}: {text}"[:300]


@contextlib.contextmanager
def _orbax_quiet() -> Iterator[None]:
    """Silence what orbax and tensorstore say of an error beside raising it.

    Orbax logs a traceback, and closes its event loop at the first write that fails. Each write that
    ends later prints that the loop is closed, so after an error these lines stay silent.
    """
    log, hook = logging.getLogger("absl"), sys.unraisablehook
    level = log.level

    def without_closed_loops(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    log.setLevel(logging.CRITICAL)
    sys.unraisablehook = without_closed_loops
    try:
        yield
        sys.unraisablehook = hook
    finally:
        log.setLevel(level)
