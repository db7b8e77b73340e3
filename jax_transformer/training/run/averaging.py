"""One model from several moments of a run: the mean of their parameters."""

from pathlib import Path

import jax
import numpy as np
from jaxtyping import Array

from jax_transformer.errors import InputError
from jax_transformer.model import Params
from jax_transformer.training.run.checkpoints import read_step, steps_in
from jax_transformer.translation.model_folder import Checkpoint


def average_run(directory: Path, last: int) -> Checkpoint:
    """Return the mean of a run's last checkpoints, as section 6.1 evaluates its models.

    Args:
        directory: A run's checkpoints, as train.py keeps them beneath its output in run/.
        last: How many of them.

    Raises:
        InputError: There are fewer, or one of them is damaged.
    """
    steps = steps_in(directory)
    if not 1 <= last <= len(steps):
        raise InputError(
            f"last={last} must be from 1 to {len(steps)}, the checkpoints in {directory}; "
            "train with a larger keep_checkpoints to have more"
        )
    read = [read_step(directory, step) for step in steps[-last:]]
    settings = read[-1].settings
    params = average([one.checkpoint.state.eval_params for one in read])
    return Checkpoint(settings.config, settings.tokenizer, params)


def average(params: list[Params]) -> Params:
    """Return the mean of each parameter, summed in float64, in its own dtype."""

    def mean(*leaves: Array | np.ndarray) -> np.ndarray:
        total = sum(np.asarray(leaf, np.float64) for leaf in leaves)
        return (total / len(leaves)).astype(leaves[0].dtype)

    return jax.tree.map(mean, *params)
