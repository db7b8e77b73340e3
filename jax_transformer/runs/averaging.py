"""The mean of several checkpoints of a run: one model, as in section 6.1 of Vaswani et al. 2017."""

from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from jax_transformer.errors import InputError
from jax_transformer.model.transformer import Params
from jax_transformer.runs.checkpoints import check_one_run, read_step, steps_in
from jax_transformer.runs.state import RunSettings
from jax_transformer.storage.folder import CHECKPOINTS


class Averaged(NamedTuple):
    """The mean of checkpoints.

    Attributes:
        settings: The settings of the run, with the config and the tokenizer.
        params: The mean of the evaluated parameters: of the EMA where the run has one.
        steps: The steps of the checkpoints, ascending.
    """

    settings: RunSettings
    params: Params
    steps: tuple[int, ...]


def average_run(directory: Path, last: int | None = None) -> Averaged:
    """Return the mean of the last checkpoints of a run.

    Args:
        directory: The output of the run, or the folder of checkpoints (run/) in it.
        last: Number of checkpoints, counted from the newest; None takes all that the run kept.

    Raises:
        InputError: There is no checkpoint or there are fewer than `last`, one is damaged, or
            they are of several runs.
    """
    checkpoints = directory / CHECKPOINTS if steps_in(directory / CHECKPOINTS) else directory
    steps = steps_in(checkpoints)
    if not steps:
        raise InputError(
            f"{directory}: holds no checkpoint of a run; name the output of a training run"
        )
    if last is not None and not 1 <= last <= len(steps):
        raise InputError(
            f"last={last} must be from 1 to {len(steps)}, the number of checkpoints in "
            f"{checkpoints}; a run with a larger keep_checkpoints keeps more"
        )
    steps = steps[-last:] if last else steps
    params = []
    for step in steps:
        restored = read_step(checkpoints, step)
        params.append(restored.checkpoint.state.eval_params)
    check_one_run(checkpoints, restored.settings, steps[:-1])
    return Averaged(restored.settings, average(params), tuple(steps))


def average(params: list[Params]) -> Params:
    """Return the mean of each parameter, summed in float64 and rounded to its own dtype."""

    def mean(*leaves: Array | np.ndarray) -> np.ndarray:
        total = sum(np.asarray(leaf, np.float64) for leaf in leaves)
        return (total / len(leaves)).astype(leaves[0].dtype)

    return jax.tree.map(mean, *params)
