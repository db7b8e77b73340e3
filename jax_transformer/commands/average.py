"""`jax-transformer average`: the mean of the last checkpoints of a run."""

from pathlib import Path

from jax_transformer.runs.averaging import average_run
from jax_transformer.runs.run_model import trained_model
from jax_transformer.storage.faults import check_path
from jax_transformer.storage.writing import WRITING
from jax_transformer.translation.model_folder import check_free, save


def average(
    run: Path,
    output: Path,
    /,
    last: int | None = None,
    overwrite: bool = False,
) -> None:
    """Write the mean of a training run's last checkpoints as a model for translate.

    Args:
        run: Output folder of a training run; the run need not have finished.
        output: Folder to write.
        last: Number of checkpoints, counted from the newest; if None, all that the run kept.
        overwrite: Replace an existing model.
    """
    check_path(output, WRITING)
    check_free(output, overwrite)
    settings, params, steps = average_run(run, last)
    save(output, trained_model(settings, params), overwrite, settings.origin)
    print(f"mean of the last {len(steps)} checkpoints of {run} written to {output}")
