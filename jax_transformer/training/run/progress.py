"""The progress of a training run, as a person sees it: a live bar, or lines now and then."""

import time
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from jax_transformer.training.step import Metrics

SECONDS_PER_LINE = 10  # of progress, where no terminal shows it live


class Progress:
    """Shows step, loss, learning rate, target tokens/s (padding not counted) and the time left.

    As a live bar on a terminal; elsewhere as a line every `SECONDS_PER_LINE`. On leaving, the
    whole run in one line.
    """

    def __init__(self, console: Console, first: int, steps: int) -> None:
        """Start at a step.

        Args:
            console: Where it is shown.
            first: Steps that were made before, by the run that this one goes on with.
            steps: Steps to make in all.
        """
        self._console = console
        self._first, self._steps = first, steps
        self._bar = Bar(
            BarColumn(),
            TextColumn("{task.description}"),
            disable=not console.is_terminal,
            console=console,
        )
        self._task = self._bar.add_task("", total=steps, completed=first)
        self._tokens, self._seconds = 0, 0.0

    def __enter__(self) -> "Progress":
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

    def report(self, step: int, metrics: list[Metrics]) -> dict[str, float]:
        """Show the steps since the last report: their mean loss, their speed.

        Returns:
            The same, for the log: loss, learning_rate, tokens_per_second and steps rejected. No
            loss where every step was left out.
        """
        now = time.monotonic()
        seconds = now - self._window_started
        tokens = sum(int(one.target_tokens) for one in metrics)
        made = [one for one in metrics if one.finite and not one.spike]
        rejected = len(metrics) - len(made)
        spikes = sum(bool(one.spike) for one in metrics)
        if rejected:
            self._console.print(
                f"step {step:,}: {rejected} of the last {len(metrics)} steps left out, for a loss "
                f"or gradient that was not finite ({rejected - spikes}) or a spike ({spikes})"
            )
        loss = sum(float(one.loss) * int(one.target_tokens) for one in made)
        loss /= max(sum(int(one.target_tokens) for one in made), 1)
        told = {
            "learning_rate": float(metrics[-1].learning_rate),
            "tokens_per_second": tokens / seconds,
            "rejected": rejected,
        }
        since = (now - self._started) / (step - self._first)
        left = timedelta(seconds=round(since * (self._steps - step)))
        line = (
            f"step {step:,}/{self._steps:,}  loss {loss:.3f}  learning rate "
            f"{told['learning_rate']:.2e}  {told['tokens_per_second']:,.0f} tokens/s  {left} left"
        )
        self._bar.update(self._task, completed=step, description=line)
        if not self._console.is_terminal and now - self._line_shown >= SECONDS_PER_LINE:
            self._console.print(line)
            self._line_shown = now
        self._window_started = now
        self._tokens, self._seconds = self._tokens + tokens, self._seconds + seconds
        return told | ({"loss": loss} if made else {})

    def report_validation(self, step: int, loss: float) -> None:
        """Show a validation loss; the time it took is not the next steps'."""
        self._console.print(f"step {step:,}: validation loss {loss:.3f} nats a token")
        self._window_started = time.monotonic()
