"""The training loop: batches in, progress shown and kept on disk, the best parameters out."""

import contextlib
import dataclasses
import itertools
import json
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from jax_transformer.errors import InputError
from jax_transformer.model.transformer import Params
from jax_transformer.model.tree import unsplit_warnings
from jax_transformer.runs.checkpoints import CheckpointFolder, CheckpointWriter, steps_in
from jax_transformer.runs.mesh import fill_rows, filled_rows, sharded_batches, sharded_epoch
from jax_transformer.runs.metrics import METRICS_FILE, MetricsLog, Progress
from jax_transformer.runs.signals import Stopped, StopRequest
from jax_transformer.runs.state import (
    MOST_NONFINITE,
    Position,
    RunCheckpoint,
    RunProgress,
    RunSettings,
)
from jax_transformer.runtime import distributed
from jax_transformer.runtime.sharding import make_mesh
from jax_transformer.storage.folder import CHECKPOINTS
from jax_transformer.storage.reading import MAX_RECORDS, read_json
from jax_transformer.storage.writing import replace_file
from jax_transformer.text.batches import Batch, padding_share
from jax_transformer.text.bpe_dropout import BPEDropout, ResampledCorpus
from jax_transformer.text.corpus import Corpus
from jax_transformer.text.plan import EpochLayout, epoch_layout, plan_epoch, plan_window
from jax_transformer.training.distillation import Teacher
from jax_transformer.training.step import (
    EvaluationStep,
    TrainStep,
    batch_shapes,
    sharded_evaluation_step,
    sharded_init_state,
    sharded_train_step,
    with_kept,
)

NONFINITE_FILE = "nonfinite_batches.json"
STEPS_PER_REPORT = 10  # metrics are fetched this seldom so that the device need not wait


@dataclasses.dataclass(frozen=True)
class Run:
    """A training run and where it is kept; it may be resumed on another mesh.

    At each evaluation `measure` gets the step and the parameters, and returns values by name for
    the log beside the loss: "validation_bleu" or "validation_chrf" if that selects the best.
    """

    directory: Path
    settings: RunSettings
    resumed: CheckpointFolder | None = None  # None starts a new run
    stop: StopRequest = dataclasses.field(default_factory=StopRequest)
    measure: Callable[[int, Params], dict[str, float]] | None = None
    tensorboard: bool = False
    mesh: Mesh = dataclasses.field(default_factory=make_mesh)
    lost_after: int = 120  # seconds without a step after which several processes end
    params: Params | None = None  # of a new run, float32 and on the host; None draws them
    # The checkpoint of the run in --init; the argument `init_keeps` names the parts to take.
    init_checkpoint: CheckpointFolder | None = None
    teachers: tuple[Teacher, ...] = ()  # that the steps learn from, on the mesh: one, or none


class Best(NamedTuple):
    """The best evaluation of a run."""

    params: Params  # whole and on the host
    step: int
    score: float  # as `RunProgress.best_score`


class _RunOutputs(NamedTuple):
    """What the loop reports to and evaluates with."""

    checkpoints: CheckpointWriter
    log: MetricsLog
    shown: Progress
    watchdog: distributed.Watchdog
    validation_losses: Callable[[Params], dict[str, float]]  # by task; "" of pairs alone


def train(run: Run, training: Corpus, validation: Corpus, console: Console) -> Best:
    """Train a model, from its initial parameters or from the checkpoint of a run.

    A checkpoint is written before the first step and at every evaluation, which selects the best
    parameters. A run that is killed and resumed ends with the same bits as one that is not.
    """
    for line in unsplit_warnings(run.mesh, run.settings.config):
        console.print(f"WARNING: {line}")
    start, training_config = _start(run), run.settings.training_config
    layout = epoch_layout(training, training_config)
    console.print(_epoch_report(training, run, layout))
    started = time.monotonic()
    count = len(layout.shapes)
    console.print(f"compiling the training step for {count} batch shape{'s' * (count > 1)}")
    with run.stop.during("the compilation and one step"):
        steps = {}
        step = sharded_train_step(run.mesh, run.settings.config, training_config, *run.teachers)
        for rows, length in layout.shapes:
            rows = filled_rows(rows, run.mesh, training_config.num_microbatches)
            target_length = layout.target_length or length
            batch = batch_shapes(run.settings.config, training_config, rows, length, target_length)
            steps[batch.tgt_in.shape] = step.lower(start.state, batch, *run.teachers).compile()
    console.print(f"compiled in {time.monotonic() - started:.1f} s")
    with _open_outputs(run, start.progress, training, validation, console) as outputs:
        outputs.checkpoints.save(start)
        checkpoint, loss_is_finite = _train_steps(run, start, steps, training, layout, outputs)
        with outputs.watchdog.paused():
            outputs.checkpoints.wait()
            # The other processes wait here for the main one, which writes.
            stopped_by = distributed.agreed_signal(run.stop.signal)
    if stopped_by and loss_is_finite:
        raise Stopped(
            f"stopped by {stopped_by.name}: step {checkpoint.progress.step:,} is saved in "
            f"{run.directory}; resume goes on from there",
            stopped_by,
        )
    return _best(run, checkpoint, loss_is_finite, console)


def _train_steps(
    run: Run,
    checkpoint: RunCheckpoint,
    steps: dict[tuple[int, int], TrainStep],
    training: Corpus,
    layout: EpochLayout,
    outputs: _RunOutputs,
) -> tuple[RunCheckpoint, bool]:
    """Make the remaining steps; return the last checkpoint, and whether each loss was finite."""
    training_config = run.settings.training_config
    remaining = max(training_config.steps - checkpoint.progress.step, 0)
    batches = _batches(training, run, layout, checkpoint.progress)
    for position, batch, task_counts in itertools.islice(batches, remaining):
        patience, since_best = training_config.patience, checkpoint.progress.evaluations_since_best
        if patience is not None and since_best >= patience:
            break
        state, metrics = steps[batch.tgt_in.shape](checkpoint.state, batch, *run.teachers)
        metrics = metrics._replace(task_counts=task_counts)
        progress = checkpoint.progress.after_step(position, metrics)
        checkpoint = RunCheckpoint(progress, state, checkpoint.best_params)

        last = progress.step == training_config.steps
        evaluating = last or progress.step % training_config.evaluation_interval == 0
        reporting = evaluating or len(progress.window) >= STEPS_PER_REPORT
        if reporting:
            checkpoint = checkpoint._replace(progress=_report(progress, outputs))
            _refuse_nonfinite(run, checkpoint.progress, training)
        if evaluating:
            with outputs.watchdog.paused():
                outputs.checkpoints.wait()  # a log of evaluations alone is not started again
            checkpoint, loss = _evaluate(run, checkpoint, outputs)
            if not math.isfinite(loss):
                return checkpoint, False
        # Several processes ask each other only after a report, when the host waits for the device.
        asking = reporting or jax.process_count() == 1
        stopping = asking and distributed.agreed_signal(run.stop.signal)
        if evaluating or stopping:
            with outputs.watchdog.paused():
                outputs.checkpoints.save(checkpoint)
        if stopping:
            break
    return checkpoint, True


def _report(progress: RunProgress, outputs: _RunOutputs) -> RunProgress:
    """Show and log the steps of the window; return the progress with an empty one."""
    progress = progress._replace(window=jax.device_get(progress.window))
    values = outputs.shown.report(progress.step, [metrics for _, metrics in progress.window])
    outputs.log.write(progress.step, values)
    outputs.watchdog.alive()
    return progress.after_report()


def _evaluate(
    run: Run, checkpoint: RunCheckpoint, outputs: _RunOutputs
) -> tuple[RunCheckpoint, float]:
    """Return the checkpoint with the best parameters up to date, and the validation loss."""
    progress, state, best_params = checkpoint
    measured = {}
    with outputs.watchdog.paused(), run.stop.during("this evaluation"):
        losses = outputs.validation_losses(state.eval_params)
        loss = sum(losses.values()) / len(losses)
        outputs.shown.report_validation(progress.step, losses)
        if math.isfinite(loss) and run.measure is not None:
            params = jax.tree.map(distributed.to_host, state.eval_params)
            measured = run.measure(progress.step, params)
            # Each process takes the main one's numbers: its own may differ in a bit.
            measured = json.loads(distributed.from_main(json.dumps(measured).encode()))
    outputs.shown.skip_time()
    of_tasks = {f"validation_loss_{task}": value for task, value in losses.items() if task}
    outputs.log.write(progress.step, {"validation_loss": loss, **of_tasks, **measured})
    if not math.isfinite(loss):
        return checkpoint, loss
    by = run.settings.training_config.select_by
    value = loss if by == "loss" else measured[f"validation_{by}"]
    score = -value if by in ("bleu", "chrf") else value
    progress = progress.after_evaluation(score)
    if progress.best_step == progress.step:
        # A copy, because the next step reuses the memory of these arrays.
        best_params = jax.tree.map(jnp.copy, state.eval_params)
    return RunCheckpoint(progress, state, best_params), loss


def _best(run: Run, checkpoint: RunCheckpoint, loss_is_finite: bool, console: Console) -> Best:
    """Return the best evaluation; warn if a loss that was not finite ended the run."""
    progress, _, best_params = checkpoint
    training_config = run.settings.training_config
    failed = f"step {progress.step:,}: the validation loss is not finite"
    remedy = "lower the learning rate, or raise warmup_steps"
    if best_params is None and loss_is_finite:
        raise InputError(f"steps={training_config.steps} is before the first evaluation; raise it")
    if best_params is None:
        raise InputError(
            f"{failed}, and no evaluation before it was usable; {remedy}="
            f"{training_config.warmup_steps}"
        )
    if not loss_is_finite:
        console.print(
            f"WARNING: {failed}, which ends the run early; the best earlier parameters, of step "
            f"{progress.best_step:,}, are kept; to train for longer, {remedy}"
        )
    params = jax.tree.map(distributed.to_host, best_params)
    return Best(params, progress.best_step, progress.best_score)


def discard_run(directory: Path) -> None:
    """Remove the checkpoints of an earlier run from a directory; a trained model stays."""
    shutil.rmtree(directory / CHECKPOINTS, ignore_errors=True)
    (directory / NONFINITE_FILE).unlink(missing_ok=True)


def _start(run: Run) -> RunCheckpoint:
    """Return the first checkpoint, on the mesh; batches that stopped the run are skipped."""
    config, training_config = run.settings.config, run.settings.training_config
    if run.resumed is None:
        if steps_in(run.directory / CHECKPOINTS):
            raise InputError(f"{run.directory}: holds a run already; resume it or name another")
        state = sharded_init_state(run.mesh, config, training_config, run.params)
        if run.init_checkpoint is not None:
            parts = run.settings.arguments["init_keeps"]
            state = with_kept(state, run.init_checkpoint.read(run.mesh).state, parts)
        return RunCheckpoint(RunProgress(int(state.step)), state, None)
    nonfinite = json.dumps(read_nonfinite(run.directory)).encode()
    positions = [Position(*values) for values in json.loads(distributed.from_main(nonfinite))]
    progress, state, best_params = run.resumed.read(run.mesh)
    return RunCheckpoint(progress.skipping(positions), state, best_params)


@contextlib.contextmanager
def _open_outputs(
    run: Run, progress: RunProgress, training: Corpus, validation: Corpus, console: Console
) -> Iterator[_RunOutputs]:
    """Open everything that the loop writes to, and close it in the end."""
    settings, training_config = run.settings, run.settings.training_config
    evaluate = sharded_evaluation_step(run.mesh, settings.config, training_config)
    corpora = validation.by_task() if validation.has_texts else {"": validation}
    plans = {}
    for task, corpus in corpora.items():
        plan = plan_epoch(corpus, training_config, epoch=0)
        plans[task] = fill_rows(plan, run.mesh, training_config.num_microbatches)

    def validation_losses(params: Params) -> dict[str, float]:
        return {
            task: _mean_loss(params, sharded_batches(run.mesh, corpora[task], plan), evaluate)
            for task, plan in plans.items()
        }

    logged = 0 if run.init_checkpoint else progress.step - len(progress.window)
    directory = run.directory if distributed.is_main() else None  # which alone writes a log
    with (
        CheckpointWriter(run.directory / CHECKPOINTS, settings) as checkpoints,
        contextlib.closing(MetricsLog(directory, logged, run.tensorboard)) as log,
        Progress(console, progress.step, training_config.steps, training.tasks) as shown,
        distributed.step_watchdog(run.lost_after) as watchdog,
    ):
        if log.is_damaged:
            console.print(
                f"WARNING: {run.directory / METRICS_FILE}: reports up to step {logged:,} are "
                "missing or damaged; the log and the curves go on without them"
            )
        yield _RunOutputs(checkpoints, log, shown, watchdog, validation_losses)


def _refuse_nonfinite(run: Run, progress: RunProgress, corpus: Corpus) -> None:
    """Stop a run whose latest steps were not finite; record their batches and training pairs."""
    if len(progress.nonfinite) < MOST_NONFINITE:
        return
    path, training_config = run.directory / NONFINITE_FILE, run.settings.training_config
    if distributed.is_main():
        layout = epoch_layout(corpus, training_config)
        batches = []
        for position in (*progress.skipped, *progress.nonfinite):
            plan = plan_window(corpus, training_config, layout, position.epoch, position.window)
            pairs = plan[position.batch].members.tolist()
            batches.append(position._asdict() | {"pairs": pairs})
        replace_file(path, (json.dumps({"batches": batches}, indent=2) + "\n").encode())
    raise InputError(
        f"step {progress.step:,}: {len(progress.nonfinite)} steps in a row were not finite; their "
        f"batches are in {path}, and a resumed run skips them; if others follow, use a lower "
        "learning rate"
    )


def read_nonfinite(directory: Path) -> tuple[Position, ...]:
    """Return the batches that an earlier run has recorded; none if there is no file."""
    path = directory / NONFINITE_FILE
    if not path.exists():
        return ()
    try:
        batches = read_json(path, MAX_RECORDS)["batches"]
        names = Position._fields
        return tuple(Position(*(int(batch[name]) for name in names)) for batch in batches)
    except (ValueError, LookupError, TypeError) as error:
        raise InputError(f"{path}: is damaged ({error}); repair or delete it") from error


def _mean_loss(params: Params, batches: Iterable[Batch], evaluate: EvaluationStep) -> float:
    sums = [evaluate(params, batch) for batch in batches]
    total, count = np.sum(jax.device_get(sums), axis=0)
    return float(total / count)


def _epoch_report(corpus: Corpus, run: Run, layout: EpochLayout) -> str:
    """Return one line: the batches of an epoch and their padding, by its first window."""
    training_config = run.settings.training_config
    plan = plan_window(corpus, training_config, layout, epoch=0, window=0)
    plan = fill_rows(plan, run.mesh, training_config.num_microbatches)
    about = "about " if layout.windows > 1 else ""
    return (
        f"{about}{len(plan) * layout.windows:,} batches an epoch, "
        f"{padding_share(corpus, plan):.1%} padding"
    )


def _batches(
    corpus: Corpus, run: Run, layout: EpochLayout, progress: RunProgress
) -> Iterator[tuple[Position, Batch, tuple[int, ...]]]:
    """Yield the batches from `progress.next` on, without the skipped ones, epoch after epoch.

    With each, the examples of each of the corpus's tasks, if it has several.
    """
    begin, settings = progress.next, run.settings.training_config
    merges = None
    if settings.bpe_dropout:
        merges = BPEDropout(run.settings.tokenizer, settings.bpe_dropout)
    for epoch in itertools.count(begin.epoch):
        first = (begin.window, begin.batch) if epoch == begin.epoch else (0, 0)
        pairs = ResampledCorpus(corpus, merges, settings.seed, epoch) if merges else corpus
        pairs = corpus.masked(settings.seed, epoch) if settings.spec_augment else pairs
        for numbered in sharded_epoch(run.mesh, pairs, settings, layout, epoch, first):
            position = Position(epoch, numbered.window, numbered.number)
            if position not in progress.skipped:
                yield position, numbered.batch, numbered.task_counts
