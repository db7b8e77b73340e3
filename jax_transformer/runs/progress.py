"""The progress of a training run: a live line on a terminal, a line now and then elsewhere."""

import time
from datetime import timedelta

from rich.console import Console

from jax_transformer.training.step import Metrics

SHORTEST = 1e-6  # seconds that some steps take at least, where the clock does not move on
LONGEST = 10**9  # seconds that are shown as left at most
SECONDS_PER_LINE = 10  # between two lines of progress, where there is no terminal


class Progress:
    """Shows how far a run is; on leaving the context, one line about the whole run."""

    def __init__(self, console: Console, first: int, steps: int) -> None:
        """Start after the `first` steps, made before the run was resumed, of all its steps."""
        self._console = console
        self._first, self._steps = first, steps
        self._live_line = console.status("")  # which shows nothing where there is no terminal
        self._tokens, self._seconds = 0, 0.0

    def __enter__(self) -> "Progress":
        self._started = self._window_started = self._line_shown = time.monotonic()
        self._live_line.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live_line.stop()
        if self._tokens:
            minutes = max(time.monotonic() - self._started, 0) / 60
            self._console.print(
                f"trained for {minutes:.1f} minutes, at "
                f"{self._tokens / self._seconds:,.0f} target tokens/s between the evaluations"
            )

    def report(self, step: int, metrics: list[Metrics]) -> dict[str, float]:
        """Show the steps since the last report; return their numbers for the log."""
        now = time.monotonic()
        seconds = max(now - self._window_started, SHORTEST)
        tokens = sum(int(each.target_tokens) for each in metrics)
        accepted = [each for each in metrics if each.finite and not each.spike]
        nonfinite = sum(not each.finite for each in metrics)
        rejected = len(metrics) - len(accepted)
        if rejected:
            self._console.print(
                f"step {step:,}: {rejected} of the last {len(metrics)} steps rejected: loss or "
                f"gradient not finite ({nonfinite}), spike of the loss ({rejected - nonfinite})"
            )
        values = {
            "learning_rate": float(metrics[-1].learning_rate),
            "tokens_per_second": tokens / seconds,
            "rejected": rejected,
        }
        shown_loss = "unknown (all steps rejected)"
        if accepted:
            counts = [int(each.target_tokens) for each in accepted]
            losses = map(lambda each, count: float(each.loss) * count, accepted, counts)
            values["loss"] = sum(losses) / max(sum(counts), 1)
            shown_loss = f"{values['loss']:.3f}"
        seconds_per_step = max(now - self._started, 0) / (step - self._first)
        left = timedelta(seconds=round(min(seconds_per_step * (self._steps - step), LONGEST)))
        line = (
            f"step {step:,}/{self._steps:,}  loss {shown_loss}  learning rate "
            f"{values['learning_rate']:.2e}  {values['tokens_per_second']:,.0f} tokens/s  "
            f"{left} left"
        )
        self._live_line.update(line)
        waits = 0 <= now - self._line_shown < SECONDS_PER_LINE
        if not self._console.is_terminal and not waits:
            self._console.print(line)
            self._line_shown = now
        self._window_started = now
        self._tokens, self._seconds = self._tokens + tokens, self._seconds + seconds
        return values

    def report_validation(self, step: int, loss: float) -> None:
        """Show a validation loss; the time of the evaluation does not count for the next steps."""
        self._console.print(f"step {step:,}: validation loss {loss:.3f} nats a token")
        self._window_started = time.monotonic()
