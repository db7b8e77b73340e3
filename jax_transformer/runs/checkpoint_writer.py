"""Writes a run's checkpoints in the background; `checkpoint_format` describes the files."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import orbax.checkpoint as ocp

from jax_transformer.errors import InputError
from jax_transformer.runs.checkpoint_format import (
    ARRAYS,
    FILES,
    FORMAT,
    RUN,
    describe,
    in_one_line,
    named_arrays,
    orbax_quiet,
)
from jax_transformer.runs.lock import locked
from jax_transformer.runs.state import (
    RunCheckpoint,
    RunSettings,
    progress_to_json,
    settings_to_json,
)
from jax_transformer.runtime import distributed
from jax_transformer.storage.digests import file_digest, json_digest


class RunCheckpoints:
    """Writes a run's checkpoints in the background. A context: leaving it waits for the last one.

    With several processes, all of them gather the arrays and the main process writes them.

    A step's directory appears under its number only when it is complete. Entering the context
    creates the directory, locks out other processes, and removes what killed runs left half
    written.
    """

    def __init__(self, directory: Path, settings: RunSettings) -> None:
        """Store the settings; the context does the work.

        Args:
            directory: Where the newest `settings.training_config.keep_checkpoints` steps are kept.
            settings: The settings of the run, written into every checkpoint.
        """
        self._directory = directory
        self._settings = settings_to_json(settings)
        self._keep = settings.training_config.keep_checkpoints
        self._manager: ocp.CheckpointManager | None = None
        self._opened = contextlib.ExitStack()

    def __enter__(self) -> "RunCheckpoints":
        """Open the directory.

        Raises:
            InputError: It cannot be created or written, or another process writes to it.
        """
        if not distributed.is_main():
            return self
        handlers = ocp.handlers.DefaultCheckpointHandlerRegistry()
        alone = distributed.orbax_alone()
        arrays = DigestingHandler(multiprocessing_options=alone)
        handlers.add(ARRAYS, ocp.args.StandardSave, arrays)
        handlers.add(
            RUN, ocp.args.JsonSave, ocp.JsonCheckpointHandler(multiprocessing_options=alone)
        )
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._keep,
            cleanup_tmp_directories=True,
            save_root_metadata=False,
            create=False,  # it exists already; orbax would need all processes to create it
            # Otherwise the threads of a save whose directory cannot be created block the exit.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
            multiprocessing_options=alone,
        )
        with contextlib.ExitStack() as opened, self._as_input_errors():
            self._directory.mkdir(parents=True, exist_ok=True)
            opened.enter_context(locked(self._directory))
            opened.enter_context(orbax_quiet())
            self._manager = ocp.CheckpointManager(
                self._directory.absolute(), options=options, handler_registry=handlers
            )
            self._opened = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Wait for the last checkpoint; an error that is raised already hides one of the save."""
        errors = self._as_input_errors() if error is None else contextlib.suppress(Exception)
        with self._opened, errors:
            if self._manager is not None:
                self._manager.close()

    def save(self, checkpoint: RunCheckpoint) -> None:
        """Copy a checkpoint and start to write it; a step that exists already is left alone.

        Raises:
            InputError: This checkpoint, or the one before, could not be written.
        """
        step = checkpoint.progress.step
        # Copies, because the next training step reuses the memory of the state.
        arrays = named_arrays(checkpoint)
        if self._manager is None:
            return
        with self._as_input_errors():
            self._manager.wait_until_finished()
            if step in self._manager.all_steps():
                return
            content = {
                "format": FORMAT,
                "settings": self._settings,
                "progress": progress_to_json(checkpoint.progress),
                "arrays": {name: describe(array) for name, array in arrays.items()},
            }
            written = ocp.args.Composite(
                arrays=ocp.args.StandardSave(arrays),
                run=ocp.args.JsonSave({"sha256": json_digest(content), "content": content}),
            )
            self._manager.save(step, args=written, force=True)

    def wait(self) -> None:
        """Return when the last checkpoint is written.

        Raises:
            InputError: It could not be written.
        """
        if self._manager is not None:
            with self._as_input_errors():
                self._manager.wait_until_finished()

    @contextlib.contextmanager
    def _as_input_errors(self) -> Iterator[None]:
        try:
            yield
        except InputError:
            raise
        except Exception as error:  # orbax and the stores below it raise many types
            raise InputError(
                f"{self._directory}: a checkpoint could not be written ({in_one_line(error)}); the "
                "ones before it are whole: free some space or repair the disk, then resume"
            ) from error


class DigestingHandler(ocp.StandardCheckpointHandler):
    """Writes arrays as orbax does, then the sha256 of each file, before the step is committed."""

    def finalize(self, directory: Any) -> None:
        """Write the digests once the arrays are complete."""
        super().finalize(directory)
        written = Path(directory)
        digests = {
            path.relative_to(written).as_posix(): file_digest(path)
            for path in sorted(written.rglob("*"))
            if path.is_file()
        }
        (written / FILES).write_text(json.dumps(digests), "utf-8")
