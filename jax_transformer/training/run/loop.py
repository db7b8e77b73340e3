"""The training loop: batches in, progress shown and kept on disk, the best parameters out."""

import dataclasses
import itertools
import json
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from jax_transformer.data.batches import (
    Batch,
    EncodedCorpus,
    PlannedBatch,
    padding_share,
    plan_epoch,
)
from jax_transformer.errors import InputError
from jax_transformer.model import Params
from jax_transformer.runtime import distributed
from jax_transformer.runtime.sharding import make_mesh, undivided
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.mesh import (
    EvaluationStep,
    TrainStep,
    fill_rows,
    sharded_batches,
    sharded_evaluation_step,
    sharded_init_state,
    sharded_train_step,
    state_shapes,
    state_shardings,
)
from jax_transformer.training.run.checkpoints import RunCheckpoints, steps_in
from jax_transformer.training.run.metrics import MetricsLog
from jax_transformer.training.run.nonfinite import NONFINITE_FILE, read_nonfinite, write_nonfinite
from jax_transformer.training.run.progress import Progress
from jax_transformer.training.run.signals import Stopped, StopRequest
from jax_transformer.training.run.state import Position, RunCheckpoint, RunProgress, RunSettings
from jax_transformer.training.step import TrainState

STEPS_PER_REPORT = 10  # metrics are fetched so seldom that the device need not wait for the host
CHECKPOINTS = "run"  # the run's checkpoints, in its directory


@dataclasses.dataclass(frozen=True)
class Run:
    """What a training run is made of and where it is kept.

    Attributes:
        directory: Where its checkpoints, its log and what stopped it are written.
        settings: The model, how it is trained, and on what.
        resumed: Where it goes on from; None starts it.
        stop: Asks it to stop after the step it is in.
        measure: What an evaluation measures beside the loss, of the parameters evaluated, as names
            and values for the log; "validation_bleu" where that selects the best.
        tensorboard: Whether the log is written for TensorBoard as well.
        mesh: The devices; no part of the run, which may go on with others.
        lost_after: Of several processes, the seconds without a step after which they end.
    """

    directory: Path
    settings: RunSettings
    resumed: RunCheckpoint | None = None
    stop: StopRequest = dataclasses.field(default_factory=StopRequest)
    measure: Callable[[Params], dict[str, float]] | None = None
    tensorboard: bool = False
    mesh: Mesh = dataclasses.field(default_factory=make_mesh)
    lost_after: int = 120


class Best(NamedTuple):
    """The best evaluation of a run.

    Attributes:
        params: The parameters evaluated, whole and on the host.
        step: Number of steps made by then.
        score: The validation loss without dropout, in nats a target token; or BLEU with its sign
            turned, as `select_by` says.
    """

    params: Params
    step: int
    score: float


def train(run: Run, training: EncodedCorpus, validation: EncodedCorpus, console: Console) -> Best:
    """Train a model, from its initial parameters or from where a run was left.

    A checkpoint of the run is written before the first step, at every `evaluation_interval` and at
    the end. A run that is killed and resumed ends with the same bits as one that is not.

    Args:
        run: What is trained, and where it is kept.
        training: Pairs to learn from.
        validation: Pairs whose loss, at every `evaluation_interval` and at the end, says which
            parameters are the best.
        console: Shows the progress: live on a terminal, as lines elsewhere. Compilation is timed
            apart.

    Raises:
        InputError: A setting is out of range, a checkpoint could not be written, too many steps
            in a row were not finite, or the loss was not before any evaluation.
        Stopped: `run.stop` has asked for it; the run is saved.
    """
    config, training_config = run.settings.config, run.settings.training_config
    training_config.check()
    for line in undivided(state_shapes(config, training_config).params, run.mesh, config):
        console.print(f"WARNING: {line}")
    progress, state, best_params = _start(run)
    stopped_by = None
    plan = _plan(training, run, epoch=0)
    console.print(f"{len(plan):,} batches an epoch, {padding_share(training, plan):.1%} padding")
    started = time.monotonic()
    with console.status("compiling"):
        steps = _compile_steps(state, plan, run)
    console.print(f"{len(steps)} batch shapes compiled in {time.monotonic() - started:.1f} s")
    validation_plan = _plan(validation, run, epoch=0)
    evaluate = sharded_evaluation_step(run.mesh, config, training_config)

    logged = progress.step - len(progress.window)
    last = training_config.steps
    with (
        RunCheckpoints(run.directory / CHECKPOINTS, run.settings) as checkpoints,
        closing(_log(run, logged)) as log,
        Progress(console, progress.step, last) as shown,
        distributed.step_watchdog(run.lost_after) as watchdog,
    ):
        checkpoints.save(RunCheckpoint(progress, state, best_params))
        batches = _batches(training, run, progress)
        for position, batch in itertools.islice(batches, max(last - progress.step, 0)):
            if _out_of_patience(progress, training_config):
                break
            state, metrics = steps[batch.src.shape](state, batch)
            progress = progress._replace(
                step=progress.step + 1,
                next=Position(position.epoch, position.batch + 1),
                window=(*progress.window, (position, metrics)),
            )
            evaluating = progress.step % training_config.evaluation_interval == 0
            evaluating |= progress.step == last
            reporting = evaluating or len(progress.window) >= STEPS_PER_REPORT
            if reporting:
                progress = progress._replace(window=jax.device_get(progress.window))
                told = shown.report(progress.step, [metrics for _, metrics in progress.window])
                log.write(progress.step, **told)
                progress = _counted(progress)
                watchdog.alive()
                if len(progress.nonfinite) >= STEPS_PER_REPORT:
                    raise _stopped_by_nonfinite(run, progress, training)
            if evaluating:
                held_out = sharded_batches(run.mesh, validation, validation_plan)
                with watchdog.paused():
                    loss = _mean_loss(state.eval_params, held_out, evaluate)
                    measured = _measured(run, state.eval_params) if math.isfinite(loss) else {}
                shown.report_validation(progress.step, loss)
                log.write(progress.step, validation_loss=loss, **measured)
                if not math.isfinite(loss):
                    break
                by_bleu = training_config.select_by == "bleu"
                score = -measured["validation_bleu"] if by_bleu else loss
                progress = progress._replace(
                    evaluations_since_best=progress.evaluations_since_best + 1
                )
                if progress.best_score is None or score < progress.best_score:
                    # A copy, because the next step's arrays take the place of these.
                    best_params = jax.tree.map(jnp.copy, state.eval_params)
                    progress = progress._replace(
                        best_score=score, best_step=progress.step, evaluations_since_best=0
                    )
            if reporting or jax.process_count() == 1:  # all stop after the same step
                stopped_by = distributed.agreed_signal(run.stop.signal)
            if evaluating or stopped_by:
                with watchdog.paused():
                    checkpoints.save(RunCheckpoint(progress, state, best_params))
            if stopped_by:
                break
        with watchdog.paused():
            checkpoints.wait()
            # The last ones to ask, and the others, which wait here for what is written.
            stopped_by = distributed.agreed_signal(run.stop.signal)
    if stopped_by:
        raise Stopped(
            f"stopped by {stopped_by.name}: step {progress.step:,} is saved in {run.directory}; "
            "resume goes on from there",
            stopped_by,
        )
    if best_params is None:
        raise InputError(
            f"warmup_steps={training_config.warmup_steps} and the learning rate made the "
            "validation loss not finite; use gentler ones"
        )
    return Best(
        jax.tree.map(distributed.to_host, best_params), progress.best_step, progress.best_score
    )


def _log(run: Run, step: int) -> MetricsLog:
    """Open the run's log; that of a process which is not the main one goes nowhere."""
    if not distributed.is_main():
        return MetricsLog(None)
    run.directory.mkdir(parents=True, exist_ok=True)
    return MetricsLog(run.directory, step, run.tensorboard)


def _measured(run: Run, params: Params) -> dict[str, float]:
    if run.measure is None:
        return {}
    measured = run.measure(jax.tree.map(distributed.to_host, params))
    # The numbers of one process count, for another one's may differ in a bit.
    return json.loads(distributed.from_main(json.dumps(measured).encode()))


def discard_run(directory: Path) -> None:
    """Remove what an earlier run has left of itself in a directory; a trained model stays."""
    shutil.rmtree(directory / CHECKPOINTS, ignore_errors=True)
    (directory / NONFINITE_FILE).unlink(missing_ok=True)


def _start(run: Run) -> RunCheckpoint:
    """Return what the run starts from on its mesh, told of the batches that stopped it before."""
    config, training_config = run.settings.config, run.settings.training_config
    if run.resumed is None:
        if steps_in(run.directory / CHECKPOINTS):
            raise InputError(f"{run.directory}: holds a run already; resume it or name another")
        return RunCheckpoint(
            RunProgress(), sharded_init_state(run.mesh, config, training_config), None
        )
    progress = run.resumed.progress
    nonfinite = json.dumps(read_nonfinite(run.directory)).encode()
    nonfinite = [Position(*one) for one in json.loads(distributed.from_main(nonfinite))]
    skipped = tuple(dict.fromkeys((*progress.skipped, *nonfinite)))
    if skipped != progress.skipped:
        progress = progress._replace(skipped=skipped, nonfinite=())
    state_of, best_of = run.resumed.state, run.resumed.best_params
    where = state_shardings(run.mesh, config, training_config)
    state = jax.device_put(state_of, where, may_alias=False)
    best_params = best_of and jax.device_put(best_of, where.params, may_alias=False)
    return RunCheckpoint(progress, state, best_params)


def _out_of_patience(progress: RunProgress, training_config: TrainingConfig) -> bool:
    patience = training_config.patience
    return patience is not None and progress.evaluations_since_best >= patience


def _counted(progress: RunProgress) -> RunProgress:
    """Return the progress with its window, now reported, counted and gone."""
    nonfinite = progress.nonfinite
    for position, metrics in progress.window:
        if len(nonfinite) < STEPS_PER_REPORT:
            nonfinite = () if metrics.finite else (*nonfinite, position)
    rejected = sum(not metrics.finite or metrics.spike for _, metrics in progress.window)
    return progress._replace(
        window=(), nonfinite=nonfinite, rejected=progress.rejected + int(rejected)
    )


def _stopped_by_nonfinite(run: Run, progress: RunProgress, training: EncodedCorpus) -> InputError:
    bad = (*progress.skipped, *progress.nonfinite)
    path = run.directory / NONFINITE_FILE
    if distributed.is_main():
        write_nonfinite(run.directory, bad, training, run.settings.training_config)
    return InputError(
        f"step {progress.step:,}: {len(progress.nonfinite)} steps in a row were not finite; their "
        f"batches are in {path}, and a resumed run skips them; if others follow, use a gentler "
        "learning rate"
    )


def _mean_loss(params: Params, batches: Iterable[Batch], evaluate: EvaluationStep) -> float:
    sums = [evaluate(params, batch) for batch in batches]
    total, count = np.sum(jax.device_get(sums), axis=0)
    return float(total / count)


def _plan(encoded: EncodedCorpus, run: Run, epoch: int) -> list[PlannedBatch]:
    training_config = run.settings.training_config
    plan = plan_epoch(encoded, training_config, epoch)
    return fill_rows(plan, run.mesh, training_config.num_microbatches)


def _batches(
    encoded: EncodedCorpus, run: Run, progress: RunProgress
) -> Iterator[tuple[Position, Batch]]:
    """Yield the batches from `progress.next` on, without those to skip, epoch after epoch."""
    for epoch in itertools.count(progress.next.epoch):
        plan = _plan(encoded, run, epoch)
        first = progress.next.batch if epoch == progress.next.epoch else 0
        positions = (Position(epoch, index) for index in range(first, len(plan)))
        kept = [position for position in positions if position not in progress.skipped]
        planned = [plan[position.batch] for position in kept]
        yield from zip(kept, sharded_batches(run.mesh, encoded, planned), strict=True)


def _compile_steps(
    state: TrainState, plan: list[PlannedBatch], run: Run
) -> dict[tuple[int, int], TrainStep]:
    """Compile the training step for every batch shape, [rows, length], of the plan."""
    training_config = run.settings.training_config
    step, steps = sharded_train_step(run.mesh, run.settings.config, training_config), {}
    for shape in sorted({(planned.rows, planned.length) for planned in plan}):
        ids = jax.ShapeDtypeStruct(shape, jnp.int32)
        segments = None if training_config.batching == "buckets" else ids
        batch = Batch(ids, ids, ids, segments, segments)
        steps[shape] = step.lower(state, batch).compile()
    return steps
