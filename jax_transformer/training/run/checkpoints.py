"""A run's checkpoints on disk: a directory with a subdirectory for each step, written by orbax.

A step holds `arrays`, with the sha256 of each of its files, and `run`, JSON with all the rest, the
sha256 of each array among it.
"""

import contextlib
import hashlib
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from rich.console import Console

from jax_transformer.errors import InputError
from jax_transformer.runtime import distributed
from jax_transformer.training.run.lock import locked
from jax_transformer.training.run.state import (
    RunCheckpoint,
    RunProgress,
    RunSettings,
    progress_from_json,
    progress_to_json,
    settings_from_json,
    settings_to_json,
)
from jax_transformer.training.step import init_state

FORMAT = 1  # of what a step's directory holds
ARRAYS, RUN = "arrays", "run"
FILES = "files.json"  # sha256 of each file of `arrays`
DAMAGED = "damaged"  # where steps go that cannot be read


class RunCheckpoints:
    """Writes a run's checkpoints, in the background; a context, which ends when all are written.

    Of several processes all gather the arrays and the main one writes them.

    A step's directory appears whole or not at all, under its number. Entering the context makes the
    directory, keeps other processes out of it, and removes what killed runs left half written.
    """

    def __init__(self, directory: Path, settings: RunSettings) -> None:
        """Describe the checkpoints; the context does the work.

        Args:
            directory: Where the steps are kept, `settings.training_config.keep_checkpoints` of
                them.
            settings: What each checkpoint says that the run is made of.
        """
        self._directory = directory
        self._settings = settings_to_json(settings)
        self._keep = settings.training_config.keep_checkpoints
        self._manager: ocp.CheckpointManager | None = None
        self._opened = contextlib.ExitStack()

    def __enter__(self) -> "RunCheckpoints":
        """Open the directory.

        Raises:
            InputError: It cannot be made or written, or another process writes to it.
        """
        if not distributed.is_main():
            return self
        handlers = ocp.handlers.DefaultCheckpointHandlerRegistry()
        alone = distributed.orbax_alone()
        arrays = _DigestingHandler(multiprocessing_options=alone)
        handlers.add(ARRAYS, ocp.args.StandardSave, arrays)
        handlers.add(
            RUN, ocp.args.JsonSave, ocp.JsonCheckpointHandler(multiprocessing_options=alone)
        )
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._keep,
            cleanup_tmp_directories=True,
            save_root_metadata=False,
            create=False,  # made already; orbax would want all processes for it
            # Otherwise threads of a save whose directory cannot be made hold up the exit.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
            multiprocessing_options=alone,
        )
        with contextlib.ExitStack() as opened, self._errors_told():
            self._directory.mkdir(parents=True, exist_ok=True)
            opened.enter_context(locked(self._directory))
            opened.enter_context(_orbax_quiet())
            self._manager = ocp.CheckpointManager(
                self._directory.absolute(), options=options, handler_registry=handlers
            )
            self._opened = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Wait for the last checkpoint; an error that is on its way already is the one told."""
        told = self._errors_told() if error is None else contextlib.suppress(Exception)
        with self._opened, told:
            if self._manager is not None:
                self._manager.close()

    def save(self, checkpoint: RunCheckpoint) -> None:
        """Copy a checkpoint and begin to write it; a step that is there already is left alone.

        Raises:
            InputError: It, or the one before, could not be written.
        """
        step = checkpoint.progress.step
        # Copies, since the next training step reuses the memory of the state.
        arrays = named_arrays(checkpoint)
        if self._manager is None:
            return
        with self._errors_told():
            self._manager.wait_until_finished()
            if step in self._manager.all_steps():
                return
            content = {
                "format": FORMAT,
                "settings": self._settings,
                "progress": progress_to_json(checkpoint.progress),
                "arrays": {name: _describe(array) for name, array in arrays.items()},
            }
            written = ocp.args.Composite(
                arrays=ocp.args.StandardSave(arrays),
                run=ocp.args.JsonSave({"sha256": _json_digest(content), "content": content}),
            )
            self._manager.save(step, args=written, force=True)

    def wait(self) -> None:
        """Return when the last checkpoint is written.

        Raises:
            InputError: It could not be.
        """
        if self._manager is not None:
            with self._errors_told():
                self._manager.wait_until_finished()

    @contextlib.contextmanager
    def _errors_told(self) -> Iterator[None]:
        try:
            yield
        except InputError:
            raise
        except Exception as error:  # orbax and the stores under it raise many kinds
            raise InputError(
                f"{self._directory}: a checkpoint could not be written ({_line(error)}); the ones "
                "before it are whole: make room or mend the place, then resume"
            ) from error


class DamagedError(InputError):
    """A checkpoint's files are not what was written."""


class Restored(NamedTuple):
    """A run that can go on, on whatever devices.

    Attributes:
        settings: What it is made of.
        checkpoint: How far it has come; its arrays are whole, and on the host.
    """

    settings: RunSettings
    checkpoint: RunCheckpoint


def steps_in(directory: Path) -> list[int]:
    """Return the steps that a directory of checkpoints holds, the oldest first."""
    if not directory.is_dir():
        return []
    names = [path.name for path in directory.iterdir() if path.name.isdecimal()]
    return sorted(int(name) for name in names if name == str(int(name)))


def restore(directory: Path, console: Console) -> Restored:
    """Read the newest checkpoint that is whole; damaged ones are told of and moved aside.

    Of several processes the main one reads, and hands the others what it has read.

    Args:
        directory: What `RunCheckpoints` has written to.
        console: Shows a line for each damaged checkpoint.

    Raises:
        InputError: There is no checkpoint, none of them is whole, or the newest that is was
            written by another version of the library.
    """
    return _handed_out(_newest(directory, console) if distributed.is_main() else None)


def _newest(directory: Path, console: Console) -> Restored:
    steps = steps_in(directory)
    if not steps:
        raise InputError(f"{directory}: holds no checkpoint of a run; start one without resume")
    damaged = []
    for step in reversed(steps):
        try:
            restored = read_step(directory, step)
        except DamagedError as error:
            console.print(f"WARNING: {error}; going back to the checkpoint before it")
            damaged.append(step)
            continue
        for step in damaged:
            _move_aside(directory, step)
        return restored
    raise InputError(
        f"{directory}: all of its checkpoints are damaged ({', '.join(map(str, steps))}); "
        "start the run anew or restore the directory from a copy"
    )


def read_step(directory: Path, step: int) -> Restored:
    """Read the checkpoint of one step.

    Raises:
        DamagedError: It is damaged.
        InputError: It was written by another version of the library.
    """
    path = directory / str(step)
    try:
        with _orbax_quiet():
            return _read(path.absolute())
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except Exception as error:  # whatever a damaged file makes the readers raise
        raise DamagedError(f"{path} is damaged ({_line(error)})") from error


def _read(directory: Path) -> Restored:
    alone = distributed.orbax_alone()
    handler = ocp.JsonCheckpointHandler(multiprocessing_options=alone)
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
        read = checkpointer.restore(directory / RUN)
    content = read["content"]
    if _json_digest(content) != read["sha256"]:
        raise ValueError(f"{RUN}: its sha256 differs")
    if content["format"] != FORMAT:
        raise InputError(
            f"is of format {content['format']}, but this version of the library reads {FORMAT}"
        )
    settings = settings_from_json(content["settings"])
    arrays = _read_arrays(directory / ARRAYS, content["arrays"])
    progress = progress_from_json(content["progress"])
    if str(progress.step) != directory.name:
        raise ValueError(f"it is of step {progress.step}")

    shapes = _shapes(settings, progress)
    for name, leaf in _named(shapes):
        if name not in arrays or not _fits(arrays[name], leaf):
            raise InputError(f"{name} is missing or of another shape; use the version it is of")
    return Restored(settings, _filled(shapes, arrays))


def _shapes(settings: RunSettings, progress: RunProgress) -> RunCheckpoint:
    state = jax.eval_shape(lambda: init_state(settings.config, settings.training_config))
    return RunCheckpoint(progress, state, None if progress.best_step is None else state.params)


def _filled(shapes: RunCheckpoint, arrays: dict[str, np.ndarray]) -> RunCheckpoint:
    leaves = [_from_host(arrays[name], leaf) for name, leaf in _named(shapes)]
    tree = jax.tree.structure((shapes.state, shapes.best_params))
    return RunCheckpoint(shapes.progress, *jax.tree.unflatten(tree, leaves))


def _handed_out(restored: Restored | None) -> Restored:
    """Return what the main process has restored, on every process."""
    if jax.process_count() == 1:
        return restored
    content, arrays = {}, {}
    if restored is not None:
        content["settings"] = settings_to_json(restored.settings)
        content["progress"] = progress_to_json(restored.checkpoint.progress)
        arrays = named_arrays(restored.checkpoint)
    content = json.loads(distributed.from_main(json.dumps(content).encode()))
    settings = settings_from_json(content["settings"])
    shapes = _shapes(settings, progress_from_json(content["progress"]))
    for name, leaf in _named(shapes):
        like = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
        own = arrays[name].tobytes() if restored is not None else None
        arrays[name] = np.frombuffer(distributed.from_main(own), like.dtype).reshape(like.shape)
    return Restored(settings, _filled(shapes, arrays))


def _read_arrays(directory: Path, described: dict[str, Any]) -> dict[str, np.ndarray]:
    # Damage is found here and not by orbax, whose threads would go on complaining.
    for name, digest in json.loads((directory / FILES).read_text("utf-8")).items():
        if not (directory / name).is_file():
            raise ValueError(f"{ARRAYS}/{name} is missing")
        if _file_digest(directory / name) != digest:
            raise ValueError(f"{ARRAYS}/{name}: its sha256 differs")
    blanks = {
        name: np.empty(one["shape"], jnp.dtype(one["dtype"])) for name, one in described.items()
    }
    alone = distributed.orbax_alone()
    with ocp.StandardCheckpointer(multiprocessing_options=alone) as checkpointer:
        arrays = checkpointer.restore(directory, blanks)
    for name, array in arrays.items():
        if _describe(array) != described[name]:
            raise ValueError(f"{name}: its sha256 differs")
    return arrays


class _DigestingHandler(ocp.StandardCheckpointHandler):
    """Writes arrays as orbax does, and the sha256 of each file, before the step is committed."""

    def finalize(self, directory: Any) -> None:
        super().finalize(directory)
        written = Path(directory)
        digests = {
            path.relative_to(written).as_posix(): _file_digest(path)
            for path in sorted(written.rglob("*"))
            if path.is_file()
        }
        (written / FILES).write_text(json.dumps(digests), "utf-8")


def named_arrays(checkpoint: RunCheckpoint) -> dict[str, np.ndarray]:
    """Return copies of the arrays of a checkpoint by their paths; a random key as its words.

    All processes must ask, and each gets them whole.
    """
    return {name: _to_host(leaf) for name, leaf in _named(checkpoint)}


def _named(checkpoint: RunCheckpoint) -> list[tuple[str, Any]]:
    """Return every array of a checkpoint with its path, in the order of the tree's leaves."""
    tree = {"state": checkpoint.state, "best_params": checkpoint.best_params}
    names = []
    for part in ("state", "best_params"):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree[part]):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            names.append((f"{part}/{name}", leaf))
    return names


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _to_host(leaf: Any) -> np.ndarray:
    return distributed.to_host(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def _from_host(array: np.ndarray, like: Any) -> np.ndarray | jax.Array:
    return jax.random.wrap_key_data(array) if _is_key(like) else array


def _fits(array: np.ndarray, like: Any) -> bool:
    expected = jax.eval_shape(jax.random.key_data, like) if _is_key(like) else like
    return (array.shape, array.dtype) == (expected.shape, expected.dtype)


def _describe(array: np.ndarray) -> dict[str, Any]:
    digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
    return {"dtype": str(array.dtype), "shape": list(array.shape), "sha256": digest}


def _json_digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _move_aside(directory: Path, step: int) -> None:
    aside = directory / DAMAGED / str(step)
    shutil.rmtree(aside, ignore_errors=True)
    aside.parent.mkdir(exist_ok=True)
    (directory / str(step)).rename(aside)


def _line(error: Exception) -> str:
    """Return an error in one line, without the settings that a store adds to it."""
    return " ".join(f"{type(error).__name__}: {error}".split(" [tensorstore_spec")[0].split())[:300]


@contextlib.contextmanager
def _orbax_quiet() -> Iterator[None]:
    """Keep orbax's log of an error away, a traceback from every thread; the error is raised too."""
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)
