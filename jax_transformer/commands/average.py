"""`jax-transformer average`: the mean of the last checkpoints of a run."""

from pathlib import Path

import tyro

from jax_transformer.training.run import averaging
from jax_transformer.translation import model_folder as checkpoint


def average(
    run: tyro.conf.Positional[Path],
    output: tyro.conf.Positional[Path],
    /,
    last: int = 10,
    overwrite: bool = False,
) -> None:
    """Write the mean of a training run's last checkpoints as a checkpoint for translate.

    Args:
        run: Directory of the run's checkpoints: run/ in the output of train.py.
        output: Directory to write.
        last: How many checkpoints, counted from the newest.
        overwrite: Replace an existing checkpoint.
    """
    checkpoint.check_free(output, overwrite)
    checkpoint.save(output, averaging.average_run(run, last), overwrite)
    print(f"mean of the last {last} checkpoints of {run} written to {output}")
