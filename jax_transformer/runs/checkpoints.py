"""Reads a run's checkpoints, past damaged ones; `checkpoint_format` describes the files."""

import json
import math
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from rich.console import Console

from jax_transformer.errors import InputError
from jax_transformer.model.parameters import parameter_count
from jax_transformer.runs.checkpoint_format import (
    ARRAYS,
    FILES,
    RUN,
    describe,
    in_one_line,
    is_key,
    named_arrays,
    named_leaves,
    orbax_quiet,
    upgrade,
    upgraded_array_name,
)
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
)
from jax_transformer.runtime import distributed
from jax_transformer.storage.digests import file_digest, json_digest
from jax_transformer.storage.reading import MAX_RECORDS, read_json
from jax_transformer.training.step import init_state

DAMAGED = "damaged"  # folder that unreadable steps are moved to


class DamagedError(InputError):
    """The files of a checkpoint are not those that were written."""


class Restored(NamedTuple):
    """A run that can continue, on any devices.

    Attributes:
        settings: The settings of the run.
        checkpoint: Its progress and its arrays, whole and on the host.
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
    """Read the newest complete checkpoint; report damaged ones and move them aside.

    With several processes the main one reads, and sends the others what it has read.

    Args:
        directory: The directory that `RunCheckpoints` has written to.
        console: Shows one line for each damaged checkpoint.

    Raises:
        InputError: There is no checkpoint, all of them are damaged, the newest undamaged one was
            written by another version of the library, or there are steps of two runs.
    """
    return _broadcast(_newest(directory, console) if distributed.is_main() else None)


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
        check_one_run(directory, restored.settings, (one for one in steps if one < step))
        for step in damaged:
            _move_aside(directory, step)
        return restored
    raise InputError(
        f"{directory}: all of its checkpoints are damaged ({', '.join(map(str, steps))}); "
        "start the run again or restore the directory from a copy"
    )


def read_step(directory: Path, step: int) -> Restored:
    """Read the checkpoint of one step.

    Raises:
        DamagedError: It is damaged.
        InputError: It was written by another version of the library.
    """
    path = directory / str(step)
    try:
        with orbax_quiet():
            return _read(path.absolute())
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except Exception as error:  # a damaged file makes the readers raise many types
        raise DamagedError(f"{path} is damaged ({in_one_line(error)})") from error


class _Described(NamedTuple):
    """What a checkpoint says of itself: its settings, its progress, and its arrays' digests."""

    settings: RunSettings
    progress: RunProgress
    arrays: dict[str, Any]


def _read_description(directory: Path) -> _Described:
    for path in directory.rglob("*"):
        if not path.is_dir() and not path.is_file():  # a FIFO would make orbax wait
            raise ValueError(f"{path.relative_to(directory)} is no regular file")
    alone = distributed.orbax_alone()
    handler = ocp.JsonCheckpointHandler(multiprocessing_options=alone)
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
        content = upgrade(verified(checkpointer.restore(directory / RUN)))
    progress = progress_from_json(content["progress"])
    if str(progress.step) != directory.name:
        raise ValueError(f"it is of step {progress.step}")
    return _Described(settings_from_json(content["settings"]), progress, content["arrays"])


def verified(read: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a checkpoint's description.

    Args:
        read: The JSON object in the file: "content" and its "sha256".

    Raises:
        ValueError: The content is not the one that was written.
    """
    if json_digest(read["content"]) != read["sha256"]:
        raise ValueError(f"{RUN}: its sha256 differs")
    return read["content"]


def check_one_run(directory: Path, newest: RunSettings, older: Iterable[int]) -> None:
    """Refuse steps of another run, which were put beside those of this one.

    Args:
        directory: The directory of checkpoints.
        newest: The settings of the newest step.
        older: Steps before it; damaged ones are passed over.

    Raises:
        InputError: A step has other settings; the message names both values.
    """
    for step in older:
        path = directory / str(step)
        try:
            with orbax_quiet():
                settings = _read_description(path.absolute()).settings
        except Exception:  # it is damaged, and nothing of it is needed
            continue
        try:
            check_same(settings, newest, step)
        except InputError as error:
            reason = str(error).removesuffix(KEPT)
            raise InputError(
                f"{path}: is of another run than the newest step beside it ({reason}); remove the "
                "steps that do not belong there"
            ) from error


def _read(directory: Path) -> Restored:
    settings, progress, described = _read_description(directory)
    _check_held(settings, described)
    arrays = {
        upgraded_array_name(name): array
        for name, array in _read_arrays(directory / ARRAYS, described).items()
    }
    shapes = _shapes(settings, progress)
    for name, leaf in named_leaves(shapes):
        if name not in arrays or not _fits(arrays[name], leaf):
            raise InputError(
                f"{name} is missing or of another shape; use the version of the library that "
                "wrote the checkpoint"
            )
    if others := sorted(arrays.keys() - {name for name, _ in named_leaves(shapes)}):
        raise InputError(f"{others[0]} is of no model of its config; use a copy of the directory")
    return Restored(settings, _filled(shapes, arrays))


def _check_held(settings: RunSettings, described: dict[str, Any]) -> None:
    """Refuse a config of more parameters than the arrays have numbers, before it is traced."""
    held = sum(math.prod(array["shape"]) for array in described.values())
    if (claimed := parameter_count(settings.config)) > held:
        raise InputError(
            f"its config has {claimed:,} parameters, but its arrays have only {held:,} numbers; "
            "restore the directory from a copy"
        )


def _shapes(settings: RunSettings, progress: RunProgress) -> RunCheckpoint:
    """Return the checkpoint with shapes and dtypes in the place of arrays."""
    state = jax.eval_shape(lambda: init_state(settings.config, settings.training_config))
    return RunCheckpoint(progress, state, None if progress.best_step is None else state.params)


def _filled(shapes: RunCheckpoint, arrays: dict[str, np.ndarray]) -> RunCheckpoint:
    leaves = [_from_host(arrays[name], leaf) for name, leaf in named_leaves(shapes)]
    tree = jax.tree.structure((shapes.state, shapes.best_params))
    return RunCheckpoint(shapes.progress, *jax.tree.unflatten(tree, leaves))


def _broadcast(restored: Restored | None) -> Restored:
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
    for name, leaf in named_leaves(shapes):
        like = jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf
        own = arrays[name].tobytes() if restored is not None else None
        arrays[name] = np.frombuffer(distributed.from_main(own), like.dtype).reshape(like.shape)
    return Restored(settings, _filled(shapes, arrays))


def _read_arrays(directory: Path, described: dict[str, Any]) -> dict[str, np.ndarray]:
    blanks = {
        name: np.empty(array["shape"], jnp.dtype(array["dtype"]))
        for name, array in described.items()
    }
    # No file is longer than all arrays and what orbax writes beside them.
    largest = 2 * sum(blank.nbytes for blank in blanks.values()) + MAX_RECORDS
    # Damage is detected before orbax reads: the threads of orbax would keep complaining about it.
    try:
        for name, digest in read_json(directory / FILES, MAX_RECORDS).items():
            if not (directory / name).is_file():
                raise ValueError(f"{ARRAYS}/{name} is missing")
            if file_digest(directory / name, largest) != digest:
                raise ValueError(f"{ARRAYS}/{name}: its sha256 differs")
    except InputError as error:  # it is damaged, and not of another version
        raise ValueError(str(error)) from error
    alone = distributed.orbax_alone()
    with ocp.StandardCheckpointer(multiprocessing_options=alone) as checkpointer:
        arrays = checkpointer.restore(directory, blanks)
    for name, array in arrays.items():
        if describe(array) != described[name]:
            raise ValueError(f"{name}: its sha256 differs")
    return arrays


def _from_host(array: np.ndarray, like: Any) -> np.ndarray | jax.Array:
    return jax.random.wrap_key_data(array) if is_key(like) else array


def _fits(array: np.ndarray, like: Any) -> bool:
    expected = jax.eval_shape(jax.random.key_data, like) if is_key(like) else like
    return (array.shape, array.dtype) == (expected.shape, expected.dtype)


def _move_aside(directory: Path, step: int) -> None:
    aside = directory / DAMAGED / str(step)
    shutil.rmtree(aside, ignore_errors=True)
    aside.parent.mkdir(exist_ok=True)
    (directory / str(step)).rename(aside)
