"""`jax-transformer average`: the mean of a run's last checkpoints (Vaswani et al. 2017, 6.1)."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from jax_transformer.errors import InputError
from jax_transformer.runs.checkpoints import check_one_run, read_step, steps_in
from jax_transformer.runs.model_settings import trained_model
from jax_transformer.runs.state import RunSettings
from jax_transformer.storage.folder import CHECKPOINTS
from jax_transformer.storage.writing import WRITING, check_path
from jax_transformer.translation.model_folder import check_free, write


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Write the mean of a training run's last checkpoints as a model for translate.

    Attributes:
        run: Output folder of a training run; the run need not have finished.
        output: Folder to write.
        last: Number of checkpoints, counted from the newest; without it, all that the run kept.
        overwrite: Replace an existing model.
    """

    run: Path
    output: Path
    last: int | None = None
    overwrite: bool = False


def average(arguments: Arguments) -> None:
    """Average the checkpoints of a run."""
    run, output, overwrite = arguments.run, arguments.output, arguments.overwrite
    check_path(output, WRITING)
    check_free(output, overwrite)
    settings, params, steps = average_run(run, arguments.last)
    check_free(output, overwrite)  # again, because this has taken time
    write(output, trained_model(settings, params), settings.origin)
    print(f"mean of the last {len(steps)} checkpoints of {run} written to {output}")


def average_run(
    directory: Path, last: int | None = None
) -> tuple[RunSettings, dict[str, Any], tuple[int, ...]]:
    """Return a run's settings, the mean of its evaluated parameters, and their steps."""
    # The folder of the checkpoints is as good as the output of the run.
    checkpoints = directory / CHECKPOINTS if steps_in(directory / CHECKPOINTS) else directory
    steps = steps_in(checkpoints)
    if not steps:
        raise InputError(f"{directory}: holds no checkpoint of a run; name the output of training")
    if last is not None and not 1 <= last <= len(steps):
        raise InputError(
            f"last={last} must be from 1 to {len(steps)}, the number of checkpoints in "
            f"{checkpoints}; a run with a larger keep_checkpoints keeps more"
        )
    steps = steps[-last:] if last else steps
    params = []
    for step in steps:
        saved = read_step(checkpoints, step)
        params.append(saved.read().state.eval_params)
    check_one_run(checkpoints, saved.settings, steps[:-1])
    return saved.settings, mean(params), tuple(steps)


def mean(params: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean of each parameter, summed in float64 and rounded to its own dtype."""

    def mean_of(*leaves: Array | np.ndarray) -> np.ndarray:
        total = sum(np.asarray(leaf, np.float64) for leaf in leaves)
        return (total / len(leaves)).astype(leaves[0].dtype)

    return jax.tree.map(mean_of, *params)
