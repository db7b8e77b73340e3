"""The training loop: batches in, progress shown, the best parameters out."""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from jax_transformer.config import TransformerConfig
from jax_transformer.data.batches import (
    Batch,
    EncodedCorpus,
    PlannedBatch,
    epoch_plan,
    padding_share,
    training_batches,
)
from jax_transformer.errors import InputError
from jax_transformer.model import Params
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.step import (
    Metrics,
    TrainState,
    evaluation_step,
    init_state,
    train_step,
)

STEPS_PER_REPORT = 10  # metrics are fetched so seldom that the device need not wait for the host
SECONDS_PER_LINE = 10  # of progress, where no terminal shows it live

CompiledStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


class Best(NamedTuple):
    """The evaluation with the least validation loss.

    Attributes:
        params: The parameters evaluated.
        step: Number of steps made by then.
        validation_loss: The objective without dropout, in nats a target token.
    """

    params: Params
    step: int
    validation_loss: float


def train(
    config: TransformerConfig,
    training_config: TrainingConfig,
    training: EncodedCorpus,
    validation: EncodedCorpus,
    console: Console,
) -> Best:
    """Train a model from its initial parameters.

    Args:
        config: The shape of the model.
        training_config: How it is trained.
        training: Pairs to learn from.
        validation: Pairs whose loss, at every `evaluation_interval` and at the end, says which
            parameters are the best.
        console: Shows the progress: live on a terminal, as lines elsewhere. Compilation is timed
            apart.

    Raises:
        InputError: A setting is out of range, or the loss was not finite before an evaluation.
    """
    training_config.check()
    state = init_state(config, training_config)
    plan = _plan(training, training_config, epoch=0)
    console.print(f"{len(plan):,} batches an epoch, {padding_share(training, plan):.1%} padding")
    started = time.monotonic()
    with console.status("compiling"):
        steps = _compile_steps(state, plan, config, training_config)
    console.print(f"{len(steps)} batch shapes compiled in {time.monotonic() - started:.1f} s")

    validation_plan = _plan(validation, training_config, epoch=0)
    best: Best | None = None
    metrics: list[Metrics] = []
    last = training_config.steps
    with _Progress(console, last) as progress:
        batches = itertools.islice(_batches(training, training_config), last)
        for step, batch in enumerate(batches, start=1):
            state, step_metrics = steps[batch.src.shape](state, batch)
            metrics.append(step_metrics)
            evaluating = step % training_config.evaluation_interval == 0 or step == last
            if evaluating or len(metrics) == STEPS_PER_REPORT:
                window, metrics = jax.device_get(metrics), []
                progress.report(step, window)
                if len(window) == STEPS_PER_REPORT and not any(one.finite for one in window):
                    break
            if evaluating:
                held_out = training_batches(validation, validation_plan)
                loss = _mean_loss(state.params, held_out, config, training_config)
                progress.report_validation(step, loss)
                if not math.isfinite(loss):
                    break
                if best is None or loss < best.validation_loss:
                    # A copy, because the next step's arrays take the place of these.
                    best = Best(jax.tree.map(jnp.copy, state.params), step, loss)
    if best is None:
        raise InputError(
            f"learning_rate_factor={training_config.learning_rate_factor} with warmup_steps="
            f"{training_config.warmup_steps} made the loss not finite; use gentler ones"
        )
    return best


def _mean_loss(
    params: Params,
    batches: Iterable[Batch],
    config: TransformerConfig,
    training_config: TrainingConfig,
) -> float:
    sums = [evaluation_step(params, batch, config, training_config) for batch in batches]
    total, count = np.sum(jax.device_get(sums), axis=0)
    return float(total / count)


def _batches(encoded: EncodedCorpus, training_config: TrainingConfig) -> Iterator[Batch]:
    for epoch in itertools.count():
        yield from training_batches(encoded, _plan(encoded, training_config, epoch))


def _plan(
    encoded: EncodedCorpus, training_config: TrainingConfig, epoch: int
) -> list[PlannedBatch]:
    return epoch_plan(
        encoded.lengths,
        bucket_count=training_config.bucket_count,
        token_budget=training_config.token_budget,
        seed=training_config.seed,
        epoch=epoch,
    )


def _compile_steps(
    state: TrainState,
    plan: list[PlannedBatch],
    config: TransformerConfig,
    training_config: TrainingConfig,
) -> dict[tuple[int, int], CompiledStep]:
    """Compile the training step for every batch shape, [rows, length], of the plan."""
    steps = {}
    for shape in sorted({(planned.rows, planned.length) for planned in plan}):
        ids = jax.ShapeDtypeStruct(shape, jnp.int32)
        batch = Batch(src=ids, tgt_in=ids, tgt_out=ids)
        steps[shape] = train_step.lower(state, batch, config, training_config).compile()
    return steps


class _Progress:
    """Shows step, loss, learning rate, target tokens/s (padding not counted) and the time left.

    As a live bar on a terminal; elsewhere as a line every `SECONDS_PER_LINE`. On leaving, the
    whole run in one line.
    """

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._bar = Progress(
            BarColumn(),
            TextColumn("{task.description}"),
            disable=not console.is_terminal,
            console=console,
        )
        self._task = self._bar.add_task("", total=steps)
        self._tokens, self._seconds = 0, 0.0

    def __enter__(self) -> "_Progress":
        self._started = self._window_started = self._line_shown = time.monotonic()
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        if self._tokens:
            self._console.print(
                f"trained for {(time.monotonic() - self._started) / 60:.1f} minutes, at "
                f"{self._tokens / self._seconds:,.0f} target tokens/s between the evaluations"
            )

    def report(self, step: int, metrics: list[Metrics]) -> None:
        """Show the steps since the last report: their mean loss, their speed."""
        now = time.monotonic()
        seconds = now - self._window_started
        tokens = sum(int(one.target_tokens) for one in metrics)
        made = [one for one in metrics if one.finite]
        if len(made) < len(metrics):
            self._console.print(
                f"step {step:,}: {len(metrics) - len(made)} of the last {len(metrics)} steps left "
                "out, their loss or gradient was not finite"
            )
        loss = sum(float(one.loss) * int(one.target_tokens) for one in made)
        loss /= max(sum(int(one.target_tokens) for one in made), 1)
        left = timedelta(seconds=round((now - self._started) / step * (self._steps - step)))
        line = (
            f"step {step:,}/{self._steps:,}  loss {loss:.3f}  learning rate "
            f"{metrics[-1].learning_rate:.2e}  {tokens / seconds:,.0f} "
            f"tokens/s  {left} left"
        )
        self._bar.update(self._task, completed=step, description=line)
        if not self._console.is_terminal and now - self._line_shown >= SECONDS_PER_LINE:
            self._console.print(line)
            self._line_shown = now
        self._window_started = now
        self._tokens, self._seconds = self._tokens + tokens, self._seconds + seconds

    def report_validation(self, step: int, loss: float) -> None:
        """Show a validation loss; the time it took is not the next steps'."""
        self._console.print(f"step {step:,}: validation loss {loss:.3f} nats a token")
        self._window_started = time.monotonic()
